"""What kernels of products with experts share: how a product is cut, and whose rows they take."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl


class Tiles(NamedTuple):
    """How a product is cut."""

    outputs: int
    """Outputs of a program."""
    inputs: int
    """Inputs of a step of the loop; of INT4 and MXFP4, bytes."""
    rows: int
    """At a time."""
    warps: int = 4
    stages: int = 3


BY_EXPERT: Final = tl.constexpr(0)
BY_PAIR: Final = tl.constexpr(1)
ALONE: Final = tl.constexpr(2)
"""Whose a program is: an expert's; a pair's, and those that are not the first of their expert get
no pairs; or a pair's where all pairs are of one token, in its order."""


def whose(tokens: int, pairs: int, experts: int) -> int:
    """The programs of so many tokens."""
    if tokens == 1:
        return int(ALONE.value)
    return int(BY_PAIR.value if pairs <= experts else BY_EXPERT.value)


@triton.jit
def expert_of(pairs, starts, experts, count, programs: tl.constexpr):
    """The expert of a program, and where its pairs begin and end. `count`: experts that the rank
    holds. Pairs of others are nobody's."""
    number = tl.program_id(0)
    expert, begin, end = number, number, number + 1
    if programs == ALONE:
        expert = tl.load(experts + number)
        end = tl.where(expert < count, end, begin)
    else:
        if programs == BY_PAIR:
            expert = tl.load(experts + tl.load(pairs + number))
        begin = tl.load(starts + expert)
        end = tl.load(starts + tl.minimum(expert + 1, count))
        if programs == BY_PAIR:
            end = tl.where(begin == number, end, begin)
    return expert, begin, end


@triton.jit
def with_bias(acc, bias, row, inside, has_bias: tl.constexpr):
    """The sums [bn, bm] of rows of the weight, with their biases."""
    if has_bias:
        acc += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    return acc
