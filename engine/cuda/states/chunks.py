"""Where prompts are cut: behind multiples of the grid among their sequences' tokens.

So a token is in the same piece, at the same place, however the prompt comes: whole, in chunks,
behind a cached part, beside others. That is why its numbers are equal, bit by bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.cuda.states.layout import States
from engine.model.mixers.config import GRID

COLUMNS: Final = 5
"""Numbers that describe a piece."""


@triton.jit(do_not_specialize=["decodes", "prompts"])
def _find_chunks(
    starts, contexts, out, decodes, prompts, grid: tl.constexpr, columns: tl.constexpr,
    padded: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    number = tl.arange(0, padded)
    there = number < prompts
    first = tl.load(starts + number, mask=there, other=0)
    count = tl.load(starts + number + 1, mask=there, other=0) - first
    context = tl.load(contexts + decodes + number, mask=there, other=0)
    start = tl.maximum(context - count, 0)
    pieces = tl.where(count > 0, (start + count + grid - 1) // grid - start // grid, 0)
    upto = tl.cumsum(pieces, 0)
    row = tl.sum((upto <= program).to(tl.int32))
    mine = number == row
    own_start = tl.sum(tl.where(mine, start, 0))
    own_count = tl.sum(tl.where(mine, count, 0))
    index = program - tl.sum(tl.where(mine, upto - pieces, 0))
    border = (own_start // grid + index) * grid
    begin = tl.maximum(border, own_start)
    end = tl.minimum(border + grid, own_start + own_count)
    within = begin - own_start
    out += program * columns
    tl.store(out, row)
    tl.store(out + 1, tl.sum(tl.where(mine, first, 0)) + within)
    tl.store(out + 2, tl.maximum(end - begin, 0))
    tl.store(out + 3, within)
    tl.store(out + 4, own_start)


def chunks_of(states: States, tokens: int) -> Tensor:
    """The pieces of a step's prompts, of `tokens` tokens together.

    Returns:
        [M, 5] int32: the row among prompts, the first token among theirs, the number of tokens,
        how many of the row come before in this step, and how many of the sequence before this
        step. Without tokens: there is none.
    """
    starts, prompts = states.step.query_starts, states.prompts
    assert starts is not None, "the step has prompts"
    most = pieces_of(tokens, GRID) + 2 * prompts
    out = torch.empty(most, COLUMNS, dtype=torch.int32, device=starts.device)
    padded = max(16, power_of_2(prompts))
    arguments = starts, states.step.context_lens, out, states.step.num_decodes, prompts
    launch(_find_chunks, (most,), *arguments, GRID, COLUMNS, padded, num_warps=1)
    return out
