"""What adapters add to products, in Triton's interpreter, beside the same written out: tokens of
several adapters and of none, ranks and parts that differ, few tokens and many.

A script of its own, because Triton looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from engine.adapters.types import Adapter, LowRank
from engine.cuda.adapters.sites import CudaAdapterSites
from engine.cuda.steps.shapes import Shape
from engine.model.linear import Build, Linear
from engine.model.precision.base import WeightSlice
from engine.model.precision.choice import Precision
from engine.model.region import Region
from engine.model.shard import Shard
from engine.step.collective import Alone

CPU = torch.device("cpu")
SLOTS = 3
BUFFERS = 8  # Of three stages.


class Plan:
    """What `pack` reads of a plan."""

    def __init__(self, adapters: list[int], queries: list[int], decodes: int) -> None:
        self.adapters, self.query_lens = np.array(adapters, np.int32), np.array(queries, np.int32)
        self.num_decodes, self.row_slots = decodes, np.zeros(len(adapters), np.int32)


class Products:
    """Products of a device."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return F.linear(x, weight, bias)


def linear(sizes: list[int], inputs: int, dtype: torch.dtype, device: torch.device = CPU) -> Linear:
    parts = [WeightSlice(f"p{i}", Region.whole(rows, inputs)) for i, rows in enumerate(sizes)]
    made = Linear(parts, True, Build(dtype, device, Precision(device, dtype), Shard(), Alone()))
    for each in made.parameters():
        each.normal_(0.0, 1.0)
    made.method.finish(Products())  # type: ignore[arg-type]
    return made


def adapter(number: int, sizes: list[int], inputs: int, ranks: list[int]) -> Adapter:
    draw = torch.Generator().manual_seed(number)
    modules = {
        f"p{i}": LowRank(
            torch.randn(rank, inputs, generator=draw),
            torch.randn(rows, rank, generator=draw),
            0.5 + number,
        )
        for i, (rows, rank) in enumerate(zip(sizes, ranks, strict=True))
        if rank
    }
    return Adapter(bytes([number]) * 32, modules, max(ranks))


def former(number: int, sizes: list[int], inputs: int) -> Adapter:
    """Of the largest rank; all products of its A overflow, though its numbers are finite."""
    own = adapter(number, sizes, inputs, [40] * len(sizes))
    for pair in own.modules.values():
        pair.a.fill_(torch.finfo(pair.a.dtype).max)
    return own


def compare(found: torch.Tensor, want: torch.Tensor) -> None:
    error = (found.float() - want).norm() / want.norm()
    assert error < (1e-5 if found.dtype is torch.float32 else 1e-2), float(error)


def check(sizes: list[int], inputs: int, plan: Plan, shape: Shape, dtype: torch.dtype) -> None:
    own = linear(sizes, inputs, dtype)
    sites = CudaAdapterSites([own], SLOTS, 40, dtype)
    sites.reserve(shape.tokens, shape.rows, BUFFERS)
    assert len(sites._staging._host) == BUFFERS, "a step may be packed before others have run"
    kinds = [[8] * len(sizes), [40, *[0] * (len(sizes) - 1)], [16] * len(sizes)]
    adapters = [adapter(i, sizes, inputs, ranks) for i, ranks in enumerate(kinds)]
    before = [former(7 + i, sizes, inputs) for i in range(SLOTS)]
    sites.load(tuple(enumerate(before)))
    sites.load(tuple(enumerate(adapters)))
    sites.pack(plan, shape)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(9)
    slots = np.full(shape.tokens, -1)
    real = plan.num_decodes
    decodes = np.repeat(plan.adapters[:real], shape.width)
    prompts = np.repeat(plan.adapters[real:], plan.query_lens[real:])
    slots[: len(decodes)] = decodes
    slots[shape.decode_tokens :][: len(prompts)] = prompts
    ends = np.full(shape.decode_tokens + shape.prompt_rows, -1)
    ends[: len(decodes)] = decodes
    ends[shape.decode_tokens :][: len(plan.adapters) - real] = plan.adapters[real:]
    for rows in (slots, ends) if len(ends) != len(slots) else (slots,):
        # Gate times up must fit into 16 bits; float32 must overflow with the former A.
        size = 0.02 if dtype is torch.float16 else 1.0
        x = (size * torch.randn(len(rows), inputs, generator=draw)).to(dtype)
        want = own.multiply(x).float()
        for token, slot in enumerate(rows.tolist()):
            first = 0
            for part, size in enumerate(sizes):
                pair = adapters[slot].modules.get(f"p{part}") if slot >= 0 else None
                if pair is not None:
                    a, b = pair.a.to(dtype).float(), pair.b.to(dtype).float()
                    want[token, first : first + size] += pair.scale * (x[token].float() @ a.T @ b.T)
                first += size
        compare(own(x), want)
        if len({*sizes[-2:]}) == 1 and len(sizes) < 3:
            gate, up = want.chunk(2, dim=1)
            compare(own.addition.gated(x, own), F.silu(gate) * up)


def main() -> None:
    one = Shape(1, adapted=True)
    long = Shape(4, 2, 508, adapted=True)
    alone = Shape(4, adapted=True)
    mixed = Shape(4, 3, 64, adapted=True)
    wide = Shape(2, 2, 40, width=4, adapted=True)
    rows = Plan([2, -1, 0], [1, 1, 1], 3)
    both = Plan([1, 1, -1, 0, 2], [1, 1, 1, 30, 20], 3)
    drafts = Plan([0, 2, 1], [4, 4, 37], 2)
    for dtype in (torch.float32, torch.float16):  # The interpreter multiplies no bfloat16.
        for slot in (0, 1, 2, -1):
            check([48, 16, 16], 200, Plan([slot], [1], 1), one, dtype)
            check([32, 32], 200, Plan([slot], [1], 1), one, dtype)
        check([80, 80], 192, both, mixed, dtype)
        check([70, 70], 72, Plan([0, -1, 2, 1, -1], [1, 1, 1, 300, 90], 3), long, dtype)
        check([128, 64, 64], 192, rows, alone, dtype)
        check([96, 24, 24], 72, both, mixed, dtype)
        check([100], 300, drafts, wide, dtype)
    print("all equal")


if __name__ == "__main__":
    main()
