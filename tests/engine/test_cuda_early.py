"""Kernels that start while the one before still runs: through many layers in a graph they give what
they give one by one. Layers reuse the same memory, so a value that is read too early is another
layer's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import experts_kit as kit
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.adapters.types import Adapter, LowRank
from engine.attention.parts import OF_FEW, Division
from engine.model.experts.config import Gate, Routing
from engine.model.linear import Build, Linear, RmsNorm
from engine.model.precision.base import WeightSlice
from engine.model.precision.choice import Precision
from engine.model.region import Region
from engine.model.shard import Shard
from engine.pool.kv_pool import PlainPool
from engine.step.attention import AttentionSpec
from engine.step.collective import Alone

pytestmark = pytest.mark.gpu

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
EXPERTS, CHOSEN = 12, 3
LAYERS, REPLAYS = 100, 20
CONTEXT, HEADS, KV_HEADS, DIM = 500, 8, 2, 64
EARLY = (
    "adapters.kernels", "adapters.one_row", "decode_attention", "experts.four_bits_row",
    "experts.one_row", "experts.routing", "experts.summing", "kernels", "kv.rope_store",
    "products.fp8", "products.one_row", "products.rounding", "products.single_row",
    "products.unrounded_row",
)  # fmt: skip
"""Modules with such kernels."""


@pytest.mark.parametrize(("hidden", "width"), [(512, 256), (2048, 768)])
@pytest.mark.parametrize("precision", ["float", "fp8", "fp8-blocks", "mxfp4"])
def test_experts_of_one_row(precision, hidden, width, monkeypatch):
    from engine.cuda.experts.mixing import parts_of
    from engine.cuda.experts.routing import route
    from engine.cuda.joining import Join, joined
    from engine.cuda.products.single_row import linear

    torch.manual_seed(hidden)
    parts = kit.parts_of(EXPERTS, ("gate", "up"), width, hidden)
    gate_up = kit.stacked(precision, parts, BF16, False).weights.to(CUDA)
    parts = kit.parts_of(EXPERTS, ("down",), hidden, width)
    down = kit.stacked(precision, parts, BF16, False).weights.to(CUDA)
    join = Join(None, norm_of(hidden, None), lambda: None, 1.0)
    how = Routing(EXPERTS, CHOSEN, normalised=True)
    routers, start = drawn(LAYERS, EXPERTS, hidden), drawn(1, hidden)

    def chain() -> Tensor:
        residual, x, chosen = start.clone(), start, []
        for router in routers:
            choice = route(linear(x, router), how, None)
            chosen.append(choice.experts.flatten())
            x = joined(residual, parts_of(x, choice, gate_up, down, Gate()), join)
        return torch.cat((residual.flatten(), x.flatten(), *chosen))

    want = one_by_one(chain, monkeypatch)
    assert len(want[2 * hidden :].view(LAYERS, CHOSEN).unique(dim=0)) > LAYERS // 2
    check(chain, want)


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("name", ["float", "fp8", "fp8-blocks"])
def test_attention_of_one_row(name, parts, monkeypatch):
    from engine.cuda.decode_attention import decode_attention
    from engine.cuda.joining import Join, entered, joined
    from engine.cuda.kv.rope_store import RopeTable, rope_store

    torch.manual_seed(parts)
    hidden, pages = HEADS * DIM, -(-CONTEXT // 16)
    pool = PlainPool(
        num_pages=pages, num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=16,
        dtype=BF16, device=CUDA,
    )  # fmt: skip
    pool.elements.normal_()
    table = torch.randperm(pages, device=CUDA).int()[None]
    contexts = torch.tensor([CONTEXT], dtype=torch.int32, device=CUDA)
    last = contexts - 1
    stores = table[0, last // 16] * 16 + last % 16
    rope = RopeTable(drawn(CONTEXT, DIM), DIM // 2)
    scheme = kit.PRECISIONS[name][1]
    precision = Precision(CUDA, BF16, kit.OneScheme(scheme) if scheme else None)
    qkv, output = (
        linear_of(precision, outputs, hidden) for outputs in ((HEADS + 2 * KV_HEADS) * DIM, hidden)
    )
    how = AttentionSpec(DIM**-0.5), Division(parts, 64, OF_FEW)
    join = Join(None, norm_of(hidden, precision), lambda: qkv.reads, 1.0)
    start = drawn(1, hidden)

    def chain() -> Tensor:
        residual = start.clone()
        x = entered(residual, join)
        for layer in range(LAYERS):
            q, _, _ = rope_store(qkv(x), rope, last, stores, pool, layer % 2, None)
            attended = decode_attention(q, pool, layer % 2, contexts, table, *how)
            x = joined(residual, output(attended.flatten(1)), join)
        return residual

    check(chain, one_by_one(chain, monkeypatch))


@pytest.mark.parametrize(
    ("precision", "rows"),
    [("float", 1), ("float", 4), ("float", 40), ("float", 600), ("fp8", 1), ("fp8", 600)],
)
def test_adapters(precision, rows, monkeypatch):
    """FP8 products of few rows are cut otherwise where none starts early."""
    from engine.cuda.adapters.sites import CudaAdapterSites
    from engine.cuda.feed_forward import gated
    from engine.cuda.joining import Join, entered, joined
    from engine.cuda.steps.shapes import Shape

    torch.manual_seed(rows)
    hidden, width, rank, count = 1024, 512, 16, 3
    scheme = kit.PRECISIONS[precision][1]
    how = Precision(CUDA, BF16, kit.OneScheme(scheme) if scheme else None)
    gate_up = linear_of(how, width, hidden, "gate", "up")
    down = linear_of(how, hidden, width, "down")
    sites = CudaAdapterSites([gate_up, down], count, rank, BF16)
    sites.reserve(rows, rows, 2)
    own = [
        {
            part.module: LowRank(drawn(rank, inputs) / inputs**0.5, drawn(outputs, rank) / 4, 1.0)
            for linear, inputs in ((gate_up, hidden), (down, width))
            for part in linear.parts
            for outputs in (part.rows,)
        }
        for _ in range(count)
    ]
    sites.load(tuple((i, Adapter(bytes([i + 1]) * 32, own[i], rank)) for i in range(count)))
    slots = np.arange(rows, dtype=np.int32) % (count + 1) - (rows > 1)
    ones = np.ones(rows, np.int32)
    plan: Any = SimpleNamespace(
        adapters=slots, query_lens=ones, num_decodes=rows, row_slots=np.zeros(rows, np.int32)
    )
    sites.pack(plan, Shape(rows, adapted=True))
    join, start = Join(None, norm_of(hidden, None), lambda: gate_up.reads, 1.0), drawn(rows, hidden)

    def chain() -> Tensor:
        residual = start.clone()
        x = entered(residual, join)
        for _ in range(LAYERS):
            x = joined(residual, down(gated(x, gate_up, down.reads)), join)
        return residual

    check(chain, one_by_one(chain, monkeypatch))


def check(chain: Callable[[], Tensor], want: Tensor) -> None:
    assert want.isfinite().all()
    assert torch.equal(chain(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(REPLAYS):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def one_by_one(chain: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The chain's result when no kernel starts before the one before has ended."""
    with monkeypatch.context() as patched:
        for name in EARLY:
            module = importlib.import_module(f"engine.cuda.{name}")
            patched.setattr(module, "early", lambda: False)
        return chain()


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=BF16)


def linear_of(precision: Precision, outputs: int, inputs: int, *names: str) -> Linear:
    """`outputs`: of each part."""
    from engine.cuda.products import CudaProducts

    built, region = build_of(precision), Region.whole(outputs, inputs)
    parts = [WeightSlice(name, region) for name in names or ("layer",)]
    made = Linear(parts, False, built)
    for number in range(len(parts)):
        made.method.fill(number * outputs, drawn(outputs, inputs) / inputs**0.5)
    made.method.finish(CudaProducts())
    return made


def norm_of(size: int, precision: Precision | None) -> RmsNorm:
    norm = RmsNorm(size, 1e-6, build_of(precision))
    norm.weight.fill_(1)
    return norm


def build_of(precision: Precision | None) -> Build:
    return Build(BF16, CUDA, precision or Precision(CUDA, BF16), Shard(), Alone())
