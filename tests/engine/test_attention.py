"""Backends over pages against attention written out, on random batches of every mix.

FlashAttention-2 and -3 run over stand-ins for their libraries, which this machine cannot run.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import flash_attn_3_like
import flash_attn_like
import numpy as np
import pytest
import torch
from engine_kit import specs_of
from torch import Tensor

from engine.attention import AttentionError, choose_backend
from engine.attention.fa2 import Fa2Backend
from engine.attention.fa3 import Fa3Backend, Fa3Operator, by_operator
from engine.cuda.attention_kernels import CudaKernels
from engine.pool.kv_pool import PlainPool
from engine.step.attention import AttentionBackend, AttentionBatch, AttentionSpec, Specs

CPU = torch.device("cpu")
LAYERS, HEADS, KV_HEADS, DIM, PAGES = 3, 6, 2, 16, 96
JUNK = 3e4
NO_LIBRARY = ModuleType("flash_attn_interface")


@pytest.fixture
def fa3_operator():
    library = flash_attn_3_like.registered()
    yield
    library._destroy()


class Row(NamedTuple):
    new: int
    context: int


def make_pool(size: int, dtype: torch.dtype = torch.float32) -> PlainPool:
    pool = PlainPool(
        num_pages=PAGES, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=size,
        dtype=dtype, device=CPU,
    )  # fmt: skip
    pool.elements.fill_(JUNK)
    return pool


def make_batch(rows: list[Row], size: int, rng: np.random.Generator, decodes: int):
    used = [-(-row.context // size) for row in rows]
    scattered = iter(rng.permutation(np.arange(1, PAGES)))
    table = np.zeros((len(rows), max(used) + 1), np.int64)
    for entries, count in zip(table, used, strict=True):
        entries[:count] = [next(scattered) for _ in range(count)]
    row_of = np.repeat(np.arange(len(rows)), [row.new for row in rows])
    positions = np.concatenate([np.arange(row.context - row.new, row.context) for row in rows])
    return AttentionBatch(
        query_lens=np.array([row.new for row in rows], np.int32),
        context_lens=np.array([row.context for row in rows], np.int32),
        num_decodes=decodes,
        page_table=torch.from_numpy(table),
        token_pages=torch.from_numpy(table[row_of, positions // size]),
        token_offsets=torch.from_numpy(positions % size),
    )


def put(pool: PlainPool, pages: Tensor, layer: int, kv: tuple[Tensor, Tensor]) -> None:
    """Stores [C, Hkv, D] at positions [0, C)."""
    for stored, tensor in zip(pool.layer(layer), kv, strict=True):
        for position, token in enumerate(tensor):
            stored[pages[position // pool.page_size], :, position % pool.page_size] = token


def written_out(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """q [N, Hq, D] at the end of k, v [C, Hkv, D], one query and head at a time, in float64."""
    out = torch.empty_like(q, dtype=torch.float64)
    window, cap = spec.window, spec.soft_cap
    group = q.shape[1] // k.shape[1]
    for n in range(len(q)):
        end = len(k) - len(q) + n + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        for head in range(q.shape[1]):
            keys, values = (t[seen, head // group].double() for t in (k, v))
            logits = keys @ q[n, head].double() * spec.scale
            if cap is not None:
                logits = (logits / cap).tanh() * cap
            if spec.sinks is not None:
                logits = torch.cat((logits, spec.sinks[head, None].double()))
            out[n, head] = logits.softmax(0)[: len(keys)] @ values
    return out


def backend_over(name: str, pool: PlainPool, specs: Specs) -> AttentionBackend:
    if name == "fa2":
        return Fa2Backend(pool, specs, flash_attn_like)
    if name == "fa3":
        return Fa3Backend(pool, specs, by_operator(NO_LIBRARY), flash_attn_3_like.decode)
    return choose_backend(name, pool, specs, CudaKernels())


def check(
    rows: list[Row],
    size: int,
    windows: tuple[int | None, ...] | Specs,
    decodes: int,
    seed: int,
    name: str = "sdpa",
):
    specs = tuple(
        each if isinstance(each, AttentionSpec) else AttentionSpec(DIM**-0.5, each)
        for each in windows
    )
    generator = torch.Generator().manual_seed(seed)
    pool = make_pool(size)
    batch = make_batch(rows, size, np.random.default_rng(seed), decodes)
    backend = backend_over(name, pool, specs)
    backend.begin(batch)
    for layer in reversed(range(LAYERS)):
        kv = [torch.randn(2, row.context, KV_HEADS, DIM, generator=generator) for row in rows]
        q = [torch.randn(row.new, HEADS, DIM, generator=generator) for row in rows]
        for row, (k, v), pages in zip(rows, kv, batch.page_table, strict=True):
            put(pool, pages, layer, (k[: -row.new], v[: -row.new]))
        new = [t[:, -row.new :] for row, t in zip(rows, kv, strict=True)]
        got = backend(layer, torch.cat(q), *torch.cat(new, dim=1))
        want = [written_out(a, *b, specs[layer]) for a, b in zip(q, kv, strict=True)]
        torch.testing.assert_close(got.double(), torch.cat(want), atol=1e-5, rtol=1e-4)


MIXES = {
    "decodes": ([Row(1, n) for n in (1, 2, 8, 9, 40, 64)], 6),
    "prompts": ([Row(7, 7), Row(16, 16), Row(17, 50), Row(3, 33)], 0),
    "both": ([Row(1, 30), Row(1, 5), Row(9, 9), Row(8, 40), Row(1, 1)], 2),
    "one": ([Row(1, 1)], 1),
    "a prompt's last token alone": ([Row(1, 1), Row(1, 25)], 0),
}
SEVERAL = {
    "three": ([Row(3, n) for n in (3, 4, 8, 9, 40, 64)], 6),
    "eight": ([Row(8, 30), Row(8, 8), Row(9, 9), Row(8, 40), Row(1, 1)], 2),
}
"""Decode rows of several tokens, which backends over pages take."""
WINDOWS = ((5, None, 16), (1, 200, 8))


@pytest.mark.parametrize(
    ("name", "size", "windows"),
    [
        ("sdpa", 4, WINDOWS[0]),
        ("sdpa", 16, WINDOWS[1]),
        ("fa2", 256, WINDOWS[0]),
        ("fa3", 16, WINDOWS[0]),
    ],
)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.usefixtures("fa3_operator")
def test_every_mix_of_rows(mix, name, size, windows):
    rows, decodes = MIXES[mix]
    check(rows, size, windows, decodes, 7, name)


@pytest.mark.parametrize("mix", SEVERAL)
def test_decode_rows_of_several_tokens(mix):
    rows, decodes = SEVERAL[mix]
    check(rows, 256, WINDOWS[0], decodes, 7, "fa2")


FEATURES = (
    AttentionSpec(0.5, 9, soft_cap=0.8),
    AttentionSpec(0.3, None, sinks=torch.linspace(-2, 3, HEADS)),
    AttentionSpec(0.4, 5, 2.0, torch.linspace(2, -1, HEADS)),
)


@pytest.mark.parametrize("mix", MIXES)
def test_scales_caps_and_sinks(mix):
    rows, decodes = MIXES[mix]
    check(rows, 8, FEATURES, decodes, 7)


@pytest.mark.parametrize("name", ["sdpa", "fa2", "fa3"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("fa3_operator")
def test_random_batches(seed, name):
    rng = np.random.default_rng(seed)
    decodes = int(rng.integers(0, 5))
    rows = [Row(1, int(rng.integers(1, 60))) for _ in range(decodes)]
    for _ in range(int(rng.integers(decodes == 0, 4))):
        new = int(rng.integers(2, 20))
        rows.append(Row(new, new + int(rng.integers(0, 40))))
    window = int(rng.integers(1, 40))
    size = 256 if name == "fa2" else int(rng.choice([4, 8, 16]))
    check(rows, size, (None, window, None), decodes, seed, name)


@pytest.mark.parametrize(
    ("there", "instead", "fits"),
    [
        ("int sm_margin=0", "int sm_margin=0", True),
        ("int window_size_left=-1", "int window_left=-1", False),
        ("Tensor v", "Tensor v, Tensor more", False),
    ],
)
def test_the_operator_of_flash_attention_3_is_called_if_it_takes_what_we_give(there, instead, fits):
    assert by_operator(NO_LIBRARY) is NO_LIBRARY, "none is registered"
    before, after = flash_attn_3_like.SCHEMA.split(there)
    library = flash_attn_3_like.registered(f"{before}{instead}{after}")
    try:
        assert isinstance(by_operator(NO_LIBRARY), Fa3Operator) == fits
    finally:
        library._destroy()


def test_fa2_reads_on_in_a_second_page():
    rows = [Row(1, 600), Row(1, 256), Row(1, 257), Row(20, 270)]
    check(rows, 256, (None, 260, 3), 3, 11, "fa2")


def test_new_tokens_go_where_the_batch_says_and_nowhere_else():
    pool = make_pool(8)
    rows = [Row(1, 12), Row(5, 10)]
    batch = make_batch(rows, 8, np.random.default_rng(0), decodes=1)
    backend = choose_backend("auto", pool, specs_of((None,) * LAYERS, DIM), CudaKernels())
    backend.begin(batch)
    k, v = torch.randn(2, 6, KV_HEADS, DIM)
    before = pool.elements.clone()
    backend(1, torch.randn(6, HEADS, DIM), k, v)
    for want, stored in zip((k, v), pool.layer(1), strict=True):
        assert torch.equal(stored[batch.token_pages, :, batch.token_offsets], want)
        stored[batch.token_pages, :, batch.token_offsets] = JUNK
    assert torch.equal(pool.elements, before)


@pytest.mark.parametrize(
    ("dtype", "left"),
    [
        (torch.bfloat16, torch.finfo(torch.bfloat16).max / 2),
        (torch.float16, torch.finfo(torch.float16).max / 2),
        (torch.bfloat16, torch.nan),
    ],
)
def test_what_is_left_in_the_tail_of_a_page_does_not_count(dtype, left):
    """Products with it may be infinite, or no numbers."""
    pool = make_pool(16, dtype)
    pool.elements.fill_(left)
    rows = [Row(1, 3), Row(1, 18), Row(4, 4)]
    backend = choose_backend("sdpa", pool, specs_of((None, 2, None), DIM), CudaKernels())
    backend.begin(make_batch(rows, 16, np.random.default_rng(0), decodes=2))
    for stored in pool.layer(1):
        stored[:, :, :3] = 0.5
    q, k, v = (torch.full((6, heads, DIM), 0.5, dtype=dtype) for heads in (HEADS, KV_HEADS, 2))
    assert backend(1, q, k, v)[0].eq(0.5).all()
    pool.elements.fill_(0.5)
    assert backend(0, q, k, v).eq(0.5).all()


def test_an_int32_page_table_will_do():
    pool = make_pool(8)
    batch = make_batch([Row(1, 9), Row(4, 12)], 8, np.random.default_rng(0), decodes=1)
    q, k, v = (torch.randn(5, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    backend = choose_backend("sdpa", pool, specs_of((4, None, None), DIM), CudaKernels())
    backend.begin(batch)
    want = backend(0, q, k, v)
    narrow = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    backend.begin(AttentionBatch(**narrow | {"page_table": batch.page_table.int()}))
    assert torch.equal(backend(0, q, k, v), want)


@pytest.mark.parametrize("name", ["fa3", "fa2"])
def test_a_backend_that_cannot_run_says_why(name):
    with pytest.raises(AttentionError, match=f"{name} cannot run here: the device is a cpu"):
        choose_backend(name, make_pool(256), specs_of((None,) * LAYERS, DIM), CudaKernels())


def test_a_backend_that_does_not_exist_is_refused():
    with pytest.raises(AttentionError, match=r"'flash'.*sdpa"):
        choose_backend("flash", make_pool(8), specs_of((None,) * LAYERS, DIM), CudaKernels())
