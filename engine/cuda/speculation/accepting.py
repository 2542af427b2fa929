"""How many of a row's draws count, and the tables behind them, in one kernel (see
`engine.speculation.tables.accepted` and `SlotTables.advance`)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, power_of_2
from engine.cuda.speculation.noise import mantissa_of
from engine.speculation.tables import SlotTables

OF_ROW = 3
"""Numbers of a row's result behind its tokens."""
_SYNTHETIC = 1
"""The purpose of the noise by which `debug.synthetic_acceptance` accepts."""


class AcceptedRows(NamedTuple):
    """What the host reads of S draws; [S] int32 each, but tokens."""

    tokens: Tensor
    """[S, W]"""
    counts: Tensor
    drafted: Tensor
    finite: Tensor


@triton.jit(do_not_specialize=["total", "decodes", "context", "likely"])
def _accept(
    ids,
    drawn,
    slots,
    bounds,
    allowed,
    lengths,
    next_tokens,
    ready,
    prompt_lens,
    seeds,
    history,
    out,
    total,
    decodes,
    context,
    likely,
    limits: tl.constexpr,
    synthetic: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    length, drafts = tl.load(lengths + slot), tl.load(ready + slot)
    column = tl.arange(0, columns)
    verifies = row < decodes
    first = tl.where(verifies, row * width, decodes * width + row - decodes)
    here = (column < width) & (verifies | (column == 0))
    token = tl.load(drawn + first + column, mask=here, other=0)
    usable = tl.load(drawn + total + first + column, mask=here, other=1)
    follows = here & (column < width - 1) & verifies
    draft = tl.load(ids + first + column + 1, mask=follows, other=-1)
    agrees = follows & (token == draft)
    if synthetic:
        index = length + 1 + column - tl.load(prompt_lens + slot)
        noise = mantissa_of(tl.load(seeds + slot), index, index * 0, 1)
        agrees = follows & (noise.to(tl.float32) * 2.220446049250313e-16 < likely)
        token = tl.where(agrees, draft, token)
    count = tl.min(tl.where(agrees, columns, column), axis=0) + 1
    room = tl.load(bounds + row, mask=verifies, other=0) - length
    valid = tl.maximum(tl.minimum(tl.minimum(drafts + 1, width), room), 0)
    valid = tl.where(verifies, valid, 1)
    count = tl.minimum(count, valid)
    if limits:
        count = tl.minimum(count, tl.load(allowed + row))
    counted = column < count
    last = tl.sum(tl.where(column == count - 1, token, 0), axis=0)
    tl.store(next_tokens + slot, last, mask=count > 0)
    tl.store(ready + slot, 0)
    begin = tl.where(verifies, length + 1, length)
    tl.store(history + slot * context + begin + column, token, mask=counted)
    tl.store(lengths + slot, length + count, mask=verifies)
    out += row * (width + 3)
    tl.store(out + column, token, mask=here)
    tl.store(out + column, 0, mask=(column < width) & (column > 0) & (row >= decodes))
    tl.store(out + width, count)
    tl.store(out + width + 1, tl.maximum(valid - 1, 0))
    tl.store(out + width + 2, tl.min(tl.where(counted, usable, 1), axis=0))


def accept(
    ids: Tensor,
    drawn: Tensor,
    slots: Tensor,
    bounds: Tensor,
    width: int,
    tables: SlotTables,
    *,
    allowed: Tensor | None = None,
    synthetic: float | None = None,
) -> Tensor:
    """Moves the tables past a step's draws: those of B decode rows of W columns, then those of
    prompts, which have one column.

    Args:
        ids: int32, what was computed: W of each decode row, its last token and its drafts.
        drawn: [2, B * W + prompts] int32: the token drawn behind each; 1 if its logits held neither
            NaN nor infinity, else 0.
        slots: [S] int32, of all draws.
        bounds: [B] int32, the first position of each decode row that is not kept.
        width: W.
        tables: by slot. Drafts are used up.
        allowed: [S] int32, the most columns that may count; None: all.
        synthetic: accepts a draft with this probability, whatever was drawn; for measuring.

    Returns:
        [S, W + 3] int32, see `read_result`.
    """
    out = torch.empty(len(slots), width + OF_ROW, dtype=torch.int32, device=drawn.device)
    launch(
        _accept,
        (len(slots),),
        ids,
        drawn,
        slots,
        bounds,
        slots if allowed is None else allowed,
        tables.length,
        tables.next,
        tables.ready,
        tables.prompt_len,
        tables.seed,
        tables.history,
        out,
        drawn.shape[1],
        len(bounds),
        tables.history.shape[1],
        0.0 if synthetic is None else synthetic,
        allowed is not None,
        synthetic is not None,
        width,
        power_of_2(width),
        num_warps=1,
    )
    return out


def read_result(result: Tensor) -> AcceptedRows:
    """The parts of what `accept` returned."""
    width = result.shape[1] - OF_ROW
    return AcceptedRows(result[:, :width], *(result[:, width + at] for at in range(OF_ROW)))
