"""Runs the kernels of FP8 KV in Triton's interpreter, against `Fp8Pool` and float64.

A script of its own, because Triton looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from engine.attention.parts import Division, Tiles
from engine.cuda.kv import fp8_gather
from engine.cuda.kv.fp8_decode import decode_attention_fp8
from engine.cuda.kv.fp8_store import rope_store_fp8
from engine.cuda.kv.rope_store import HeadNorms, RopeTable, rope_store
from engine.pool.fp8_pool import Fp8Pool
from engine.pool.kv_pool import PlainPool
from engine.step.attention import AttentionSpec

CPU = torch.device("cpu")
DIM, KV_HEADS, HEADS, LAYERS = 32, 2, 8, 2
POISON = 0xDB
convert = interpreter._convert_float


def convert_as_a_gpu_does(x, source, target, mode):
    """The interpreter's own rounding to e4m3 loses the carry into the exponent."""
    if source != tl.float32 or target != tl.float8e4nv:
        return convert(x, source, target, mode)
    numbers = torch.from_numpy(np.frombuffer(x.tobytes(), np.float32).copy())
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(x.shape)


def pool_of(kind, pages: int, dtype: torch.dtype, page_size: int):
    """Pages of 16 tokens have two bands."""
    pool = kind(
        num_pages=pages, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM,
        page_size=page_size, dtype=dtype, device=CPU,
    )  # fmt: skip
    pool.divide([1, LAYERS - 1] if page_size == 16 else [LAYERS])
    return pool


def check_store(dtype: torch.dtype, norms: HeadNorms | None) -> None:
    """Bit for bit what `Fp8Pool.write` makes of the plain kernel's K and V."""
    plain = pool_of(PlainPool, 7, dtype, 16)
    fp8, want = (pool_of(Fp8Pool, 7, dtype, 16) for _ in "ab")
    qkv = torch.randn(6, (HEADS + 2 * KV_HEADS) * DIM) * torch.randn(6, 1).exp()
    qkv[2] = 0
    if norms is None:
        qkv[3, -1], qkv[4, -1] = float("nan"), float("inf")
    qkv, rope = qkv.to(dtype), torch.randn(50, DIM).to(dtype)
    positions = torch.tensor([3, 4, 9, 40, 0, 1], dtype=torch.int32)
    stores = torch.tensor([19, 20, 105, 95, 32, 64], dtype=torch.int32)
    table = RopeTable(rope, DIM // 2)
    q, k, v = rope_store(qkv.clone(), table, positions, stores, plain, 1, norms)
    got = rope_store_fp8(qkv.clone(), table, positions, stores, fp8, 1, norms)
    k, v = want.write(1, stores.long() // 16, stores.long() % 16, k, v)
    for ours, theirs in zip(got, (q, k, v), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(fp8.data, want.data)


def filled(contexts: Tensor, page_size: int, spread: float) -> tuple[Fp8Pool, Tensor]:
    """A pool whose rows differ in size by powers of two, and a page table."""
    width = -(-int(contexts.max()) // page_size) + 1
    pool = pool_of(Fp8Pool, len(contexts) * width, torch.float32, page_size)
    pool.data.fill_(POISON)
    table = torch.randperm(pool.num_pages).int().view(len(contexts), width)
    for row, length in enumerate(contexts.tolist()):
        at = torch.arange(length)
        k, v = torch.randn(2, length, KV_HEADS, DIM)
        v *= torch.exp2(torch.randn(length, 1, 1) * spread)
        pool.write(1, table[row][at // page_size].long(), at % page_size, k, v)
    return pool, table


SINKS = torch.linspace(-3, 4, HEADS)


def check_decode(
    page_size: int,
    window: int | None,
    parts: tuple[int, int],
    spread: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
    width: int = 1,
) -> None:
    """Rows of `width` new tokens each."""
    contexts = torch.tensor([width, 64, 64 + width, 200], dtype=torch.int32)
    pool, table = filled(contexts, page_size, spread)
    sizes = torch.tensor([1, 1e-9, 30, 0]).repeat_interleave(width)
    q = torch.randn(4 * width, HEADS + 4, DIM)[:, :HEADS] * sizes[:, None, None]
    division = Division(*parts, Tiles(64, 4, 3))
    spec = AttentionSpec(DIM**-0.5, window, cap, sinks)
    got = decode_attention_fp8(q, pool, 1, contexts, table, spec, division)
    lengths = (contexts[:, None] - width + 1 + torch.arange(width)).flatten()
    for token, length in enumerate(lengths.tolist()):
        row = token // width
        first = 0 if window is None else max(0, length - window)
        places = pool.places(table[row].long())
        keys, values = (x[:, first:length].double() for x in pool.gather(1, places))
        grouped = q[token].double().view(KV_HEADS, -1, DIM)
        logits = grouped @ keys.transpose(1, 2) * DIM**-0.5
        if cap is not None:
            logits = (logits / cap).tanh() * cap
        if sinks is not None:
            logits = torch.cat((logits, sinks.view(KV_HEADS, -1, 1).double()), 2)
        weights = logits.softmax(-1)[:, :, : keys.shape[1]]
        want = (weights @ values).view(HEADS, DIM)
        assert (got[token] - want).norm() < 2e-3 * want.norm(), (token, page_size, window, parts)


def check_no_number_is_told() -> None:
    """And spoils no other row."""
    contexts = torch.tensor([20, 20, 20], dtype=torch.int32)
    pool, table = filled(contexts, 16, 0)
    nan = torch.full((1, KV_HEADS, DIM), float("nan"))
    k, v = torch.randn(2, 1, KV_HEADS, DIM)
    at = torch.tensor([3])
    pool.write(1, table[0, :1].long(), at, nan, v)
    pool.write(1, table[1, :1].long(), at, k, nan)
    q = torch.randn(3, HEADS, DIM)
    division = Division(1, 1, Tiles(64, 4, 3))
    got = decode_attention_fp8(q, pool, 1, contexts, table, AttentionSpec(DIM**-0.5), division)
    assert got.isnan().all(2).all(1).tolist() == [True, True, False]
    assert got[2].isfinite().all()


def check_gather(page_size: int) -> None:
    contexts = torch.tensor([1, 63, 64, 65, 200], dtype=torch.int32)
    pool, table = filled(contexts, page_size, 3)
    gather = fp8_gather.Gatherer(pool)
    gather.reserve(500, 8)
    for rows in (5, 3):
        gather.begin(contexts[:rows], table[:rows])
        k, v, starts = gather(1)
        assert starts.tolist() == [0, *contexts[:rows].cumsum(0).tolist()]
        for row, length in enumerate(contexts[:rows].tolist()):
            want = pool.gather(1, pool.places(table[row].long()))
            for got, numbers in zip((k, v), want, strict=True):
                own = got[starts[row] : starts[row + 1]]
                assert torch.equal(own, numbers[:, :length].transpose(0, 1))
    assert not k[393:].any()


def main() -> None:
    """One case of each kernel, or all cases."""
    torch.manual_seed(0)
    interpreter._convert_float = convert_as_a_gpu_does
    fp8_gather._PROGRAMS_OF_A_HEAD = 3  # Here they run one after the other.
    norms = HeadNorms(torch.randn(DIM).bfloat16(), torch.randn(DIM).bfloat16(), 1e-6)
    check_store(torch.bfloat16, norms)
    check_decode(16, 100, (3, 64), 6)
    check_decode(16, 100, (3, 64), 0, 0.7, SINKS)
    check_gather(16)
    if "all" in sys.argv:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_store(dtype, None)
        check_decode(16, None, (1, 1), 0)
        check_decode(32, None, (3, 64), 6)
        check_decode(32, None, (1, 1), 0, 0.7)
        check_decode(16, None, (3, 64), 6, None, SINKS)
        check_no_number_is_told()
        check_gather(32)
        check_decode(32, None, (1, 1), 3, width=2)
        check_decode(16, 8, (16, 64), 3, width=8)
    check_decode(16, 100, (3, 64), 0, 0.7, SINKS, width=4)
    print("all equal")


if __name__ == "__main__":
    main()
