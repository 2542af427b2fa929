"""The best token of each row, where ranks have parts of the vocabulary, as `engine.model.best`.

Each rank sends all others three float32 a row: the best logit of its part, that token's id, which
float32 holds exactly, and whether the part is finite.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import best_of_blocks, launch, power_of_2
from engine.model.best import BEST_NUMBERS


@triton.jit(do_not_specialize=["first_id", "num_blocks"])
def _best_of_part(best, ids, finite, bests, first_id, num_blocks, block_count: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, block_count)
    inside = at < num_blocks
    value = tl.load(best + row * num_blocks + at, mask=inside, other=float("-inf"))
    block = tl.argmax(value, axis=0, tie_break_left=True)
    usable = tl.load(finite + row * num_blocks + at, mask=inside, other=1)
    place = bests + row * 3
    tl.store(place, tl.max(value, axis=0))
    tl.store(place + 1, (first_id + tl.load(ids + row * num_blocks + block)).to(tl.float32))
    tl.store(place + 2, tl.min(usable, axis=0).to(tl.float32))


@triton.jit(do_not_specialize=["rows"])
def _choose(
    bests,
    slots,
    token_table,
    drawn,
    rows,
    keeps: tl.constexpr,
    ranks: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    rank = tl.arange(0, block)
    there = rank < ranks
    place = bests + (rank * rows + row) * 3
    value = tl.load(place, mask=there, other=float("-inf"))
    best = tl.argmax(value, axis=0, tie_break_left=True)
    token = tl.load(bests + (best * rows + row) * 3 + 1).to(tl.int32)
    usable = tl.load(place + 2, mask=there, other=1.0)
    tl.store(drawn + row, token)
    tl.store(drawn + rows + row, tl.min(usable, axis=0).to(tl.int32))
    if keeps:
        tl.store(token_table + tl.load(slots + row), token)


def best_of_part(logits: Tensor, first_id: int) -> Tensor:
    """What a rank sends of its part of the rows.

    Args:
        logits: [S, P], contiguous.
        first_id: token id of its first column.

    Returns:
        [S, 3] float32
    """
    blocks = best_of_blocks(logits)
    rows, num_blocks = blocks.best.shape
    bests = torch.empty(rows, BEST_NUMBERS, dtype=torch.float32, device=logits.device)
    count = power_of_2(num_blocks)
    launch(_best_of_part, (rows,), *blocks, bests, first_id, num_blocks, count)
    return bests


def best_of_ranks(
    bests: Tensor, slots: Tensor | None = None, token_table: Tensor | None = None
) -> Tensor:
    """As `engine.cuda.kernels.greedy`, from what all ranks sent: [N, S, 3], in the order of
    ranks. Without slots the tokens go nowhere else."""
    ranks, rows, _ = bests.shape
    drawn = torch.empty(2, rows, dtype=torch.int32, device=bests.device)
    block = power_of_2(ranks)
    keeps = slots is not None and token_table is not None
    to = (slots, token_table) if keeps else (drawn, drawn)
    launch(_choose, (rows,), bests, *to, drawn, rows, keeps, ranks, block)
    return drawn
