"""What kernels of products with experts share: how a product is cut, and whose rows they take."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Tiles(NamedTuple):
    """How a product is cut."""

    outputs: int
    """Of a program."""
    inputs: int
    """Of a step; of INT4 and MXFP4, bytes."""
    rows: int
    """At a time."""
    warps: int = 4
    stages: int = 3


@triton.jit
def expert_of(pairs, starts, experts, by_pair: tl.constexpr):
    """The expert of a program, and where its pairs begin and end. With `by_pair` a program that is
    not the first of its expert gets no pairs."""
    number = tl.program_id(0)
    expert = number
    if by_pair:
        expert = tl.load(experts + tl.load(pairs + number))
    begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    if by_pair:
        end = tl.where(begin == number, end, begin)
    return expert, begin, end


@triton.jit
def with_bias(acc, bias, row, inside, has_bias: tl.constexpr):
    """The sums [bn, bm] of rows of the weight, with their biases."""
    if has_bias:
        acc += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    return acc
