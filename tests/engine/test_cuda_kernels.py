"""Kernels and attention on a GPU, against PyTorch in higher precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_kit import specs_of

from engine.attention import choose_backend
from engine.attention.parts import LARGE, MIDDLE, OF_FEW, SMALL, Division, division
from engine.cuda.attention_kernels import CudaKernels
from engine.model.mixers.rope import rotate
from engine.pool.fp8_pool import Fp8Pool
from engine.pool.kv_pool import KvPool, PlainPool
from engine.step.attention import AttentionBatch, AttentionSpec

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PAGE_SIZE = 16


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device=CUDA, dtype=torch.bfloat16)


def pool_of(pages: int, heads: int, dim: int, layers: int = 2, kind=PlainPool) -> KvPool:
    return kind(
        num_pages=pages, num_layers=layers, num_kv_heads=heads, head_dim=dim,
        page_size=PAGE_SIZE, dtype=torch.bfloat16, device=CUDA,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3, 256])
@pytest.mark.parametrize("size", [576, 4096])
def test_norms(rows, size):
    from engine.cuda.kernels import add_rms_norm, rms_norm

    x, residual, weight = draw(rows, size), draw(rows, size, seed=1), draw(size)
    want = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    assert relative_error(rms_norm(x, weight, 1e-5), want) < 4e-3
    total = residual + x
    want = F.rms_norm(total.double(), (size,), weight.double(), 1e-5)
    assert relative_error(add_rms_norm(residual, x.clone(), weight, 1e-5), want) < 4e-3
    assert torch.equal(residual, total)


@pytest.mark.parametrize("rows", [1, 7])
def test_silu_mul(rows):
    from engine.cuda.kernels import silu_mul

    gate_up = draw(rows, 2 * 14336)
    gate, up = gate_up.double().chunk(2, -1)
    assert relative_error(silu_mul(gate_up), F.silu(gate) * up) < 5e-3


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (8, 1, 128)])
def test_rope_store_fills_pages_beyond_two_to_the_31_elements(heads, kv_heads, dim, norms):
    from engine.cuda.kv.rope_store import HeadNorms, RopeTable, rope_store

    layers, positions = 32, torch.tensor([0, 5, 17, 999], dtype=torch.int32, device=CUDA)
    page_elements = kv_heads * layers * 2 * PAGE_SIZE * dim
    last = (1 << 31) // page_elements + 3
    pool = pool_of(last + 1, kv_heads, dim, layers)
    qkv = draw(4, (heads + 2 * kv_heads) * dim)
    q, k, v = qkv.clone().view(4, -1, dim).split((heads, kv_heads, kv_heads), 1)
    angles = torch.rand(1000, dim // 2, device=CUDA) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    head_norms = HeadNorms(draw(dim), draw(dim, seed=3), 1e-6) if norms else None
    if head_norms is not None:
        q = F.rms_norm(q, (dim,), head_norms.q_weight, 1e-6)
        k = F.rms_norm(k, (dim,), head_norms.k_weight, 1e-6)
    both = [torch.cat((t, t), 1)[positions.long()][:, None].double() for t in (cos, sin)]
    want_q, want_k = rotate(q.double(), *both), rotate(k.double(), *both)
    places = [(1, 0), (last, 5), (last, 6), (last - 1, 15)]
    stores = torch.tensor([p * PAGE_SIZE + o for p, o in places], dtype=torch.int32, device=CUDA)
    rope = RopeTable(torch.cat((cos, sin), 1).contiguous(), dim // 2)
    got_q, got_k, got_v = rope_store(qkv, rope, positions, stores, pool, layers - 1, head_norms)
    assert relative_error(got_q, want_q) < 5e-3
    assert relative_error(got_k, want_k) < 5e-3
    assert torch.equal(got_v, v)
    for token, (page, offset) in enumerate(places):
        stored = torch.stack([x[page, :, offset] for x in pool.layer(layers - 1)], 1)
        assert torch.equal(stored, torch.stack((got_k[token], got_v[token]), 1))
        for kept in pool.layer(layers - 1):
            kept[page, :, offset] = 0
    assert not pool.elements.any(), "something was stored elsewhere"


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 14336), (333, 512), (64, 96), (5120, 2880)]
)
def test_products_of_a_single_row(outputs, inputs):
    from engine.cuda.products.single_row import gated, linear

    x, weight = draw(1, inputs), draw(outputs, inputs, seed=1)
    want, bias = x.double() @ weight.double().T, draw(1, outputs, seed=3)[0]
    assert relative_error(linear(x, weight), want) < 3e-3
    assert relative_error(linear(x, weight, bias), want + bias.double()) < 3e-3
    both = draw(2 * outputs, inputs, seed=2) * inputs**-0.5
    gate, up = (x.double() @ both.double().T).chunk(2, -1)
    got = gated(x, both)
    assert got is not None
    assert relative_error(got, F.silu(gate) * up) < 6e-3
    assert gated(draw(2, inputs), both) is None


@pytest.mark.parametrize("parts", [(1, 1), (2, 64), (5, 64), (32, 64), (8, 150), (32, 1024)])
@pytest.mark.parametrize("tiles", [LARGE, MIDDLE, SMALL, OF_FEW])
@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("window", [None, 100])
def test_parts_of_a_context_make_a_whole(parts, tiles, page_size, window):
    pool = of_rows(PlainPool, page_size)
    pool.elements.normal_()
    check_parts(pool, draw(6, 12, 128)[:, :8], Division(*parts, tiles), window)


ROWS = (1, 63, 64, 65, 700, 2000)


def of_rows(kind, page_size):
    """A pool for six rows of up to 2,048 tokens."""
    return kind(
        num_pages=6 * 2048 // page_size, num_layers=2, num_kv_heads=2, head_dim=128,
        page_size=page_size, dtype=torch.bfloat16, device=CUDA,
    )  # fmt: skip


def check_parts(pool, q, division, window):
    """Decode attention over `ROWS` by a division, against float64."""
    from engine.cuda.decode_attention import decode_attention
    from engine.cuda.kv.fp8_decode import decode_attention_fp8

    contexts = torch.tensor(ROWS, dtype=torch.int32, device=CUDA)
    table = torch.randperm(pool.num_pages, device=CUDA).int().view(6, -1)
    attend = decode_attention_fp8 if isinstance(pool, Fp8Pool) else decode_attention
    got = attend(q, pool, 1, contexts, table, AttentionSpec(128**-0.5, window), division)
    for row, length in enumerate(ROWS):
        first = 0 if window is None else max(0, length - window)
        places = pool.places(table[row].long())
        keys, values = (x[:, first:length].double() for x in pool.gather(1, places))
        grouped = q[row].double().view(2, 4, 128)
        weights = (grouped @ keys.transpose(1, 2) * 128**-0.5).softmax(-1)
        assert relative_error(got[row], (weights @ values).view(8, 128)) < 1e-2


@pytest.mark.parametrize("times", [1, 8, 12, 40, 100])
def test_batches_of_any_size_are_cut_to_the_same_result(times):
    """Few rows, and more and more."""
    from engine.cuda.decode_attention import decode_attention

    contexts = torch.tensor([1, 63, 64, 65, 700, 2000], dtype=torch.int32, device=CUDA)
    pool = pool_of(6 * 128, 2, 128)
    pool.elements.normal_()
    table = torch.randperm(pool.num_pages, device=CUDA).int().view(6, -1)
    q, rows = draw(6, 8, 128).repeat(times, 1, 1), (contexts.repeat(times), table.repeat(times, 1))
    spec = AttentionSpec(128**-0.5)
    want = decode_attention(q, pool, 1, *rows, spec, Division(1, 1, OF_FEW))
    for differ in (True, False):
        divided = division(len(q), 2, differ=differ)
        got = decode_attention(q, pool, 1, *rows, spec, divided)
        assert relative_error(got, want) < 1e-2
        again = decode_attention(q, pool, 1, *rows, spec, divided)
        assert torch.equal(got, again), "a division gives a row the same result every time"
        assert torch.equal(got[:6], got[-6:]), "and in every place"


def test_greedy_takes_the_lowest_of_equals_and_tells_bad_rows():
    from engine.cuda.kernels import greedy

    logits = draw(5, 128256)
    logits[1, 77], logits[2, 128255], logits[4, 5] = float("nan"), float("inf"), float("-inf")
    logits[3, 100] = logits[3, 90000] = 50
    table = torch.full((9,), -1, dtype=torch.int32, device=CUDA)
    slots = torch.tensor([7, 0, 3, 2, 5], dtype=torch.int32, device=CUDA)
    tokens, finite = greedy(logits, slots, table)
    assert finite.tolist() == [1, 0, 0, 1, 0]
    assert tokens[0] == logits[0].float().cpu().argmax()
    assert tokens[3] == 100
    assert table[slots.long()].tolist() == tokens.tolist()
    assert (table == -1).sum() == 4


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (8, 1, 128), (4, 4, 64), (9, 3, 64)]
)
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1), (1, 16), (1, 700), (1, 17)],
        [(33, 33), (1, 1), (200, 200)],
        [(20, 90), (64, 64), (7, 300)],
        [(1, 5), (1, 400), (50, 50), (100, 164)],
        [(1, 30 + 9 * i) for i in range(40)],
    ],
    ids=["decode", "fresh", "continued", "mixed", "many"],
)
def test_fa3_equals_sdpa(rows, heads, kv_heads, dim, window):
    pool = pool_of(600, kv_heads, dim)
    pool.elements.normal_()
    check_fa3(pool, rows, heads, window)


def check_fa3(pool, rows, heads, window):
    """Rows of (new tokens, context), decode rows first, over a pool of 600 pages and two layers."""
    rng, kv_heads, dim = np.random.default_rng(len(rows)), pool.num_kv_heads, pool.head_dim
    queries, contexts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    need = -(-contexts // PAGE_SIZE)
    free = rng.permutation(np.arange(1, 600))[: need.sum()]
    table = np.zeros((len(rows), need.max()), np.int64)
    for row, pages in enumerate(np.split(free, need.cumsum()[:-1])):
        table[row, : len(pages)] = pages
    positions = np.concatenate([np.arange(c - q, c) for q, c in rows])
    row_of = np.repeat(np.arange(len(rows)), queries)
    batch = AttentionBatch(
        query_lens=queries,
        context_lens=contexts,
        num_decodes=int((queries == 1).sum()) if queries[0] == 1 else 0,
        page_table=torch.from_numpy(table).to(CUDA),
        token_pages=torch.from_numpy(table[row_of, positions // PAGE_SIZE]).to(CUDA),
        token_offsets=torch.from_numpy(positions % PAGE_SIZE).to(CUDA),
    )
    total = int(queries.sum())
    q, k, v = (draw(total, n, dim, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    got = []
    for name in ("fa3", "sdpa"):
        backend = choose_backend(name, pool, specs_of((None, window), dim), CudaKernels())
        backend.begin(batch)
        got.append([backend(layer, q, k, v) for layer in (0, 1)])
    for ours, theirs in zip(*got, strict=True):
        assert relative_error(ours, theirs) < 1e-2


def test_fa3_reads_pages_beyond_two_to_the_31_elements():
    pool = pool_of(2060, 8, 128, layers=32)
    pool.elements[2050:].normal_()
    small = pool_of(20, 8, 128, layers=32)
    small.elements[1:11] = pool.elements[2050:]
    outputs = []
    q, k, v = draw(6, 32, 128), draw(6, 8, 128), draw(6, 8, 128, seed=5)
    for where, first in ((pool, 2050), (small, 1)):
        table = torch.arange(first, first + 10, device=CUDA)[None]
        backend = choose_backend("fa3", where, specs_of((None,) * 32, 128), CudaKernels())
        queries, contexts = np.array([1, 5], np.int32), np.array([80, 80], np.int32)
        batch = AttentionBatch(
            queries, contexts, 1, table.view(2, 5), table.view(-1)[[4, 9, 9, 9, 9, 9]],
            torch.tensor([15, 11, 12, 13, 14, 15], device=CUDA),
        )  # fmt: skip
        backend.begin(batch)
        outputs.append(backend(31, q, k, v))
    assert torch.equal(*outputs)
