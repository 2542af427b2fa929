"""The suffix drafter in one kernel; `engine.speculation.suffix` has the rule."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, power_of_2
from engine.speculation.suffix import LONGEST, SHORTEST
from engine.speculation.tables import SlotTables

_BLOCK = 2048
"""Tokens of a context that a program compares in a turn. Not tuned."""
_WARPS = 8
"""Eight tokens of a block for each thread."""


@triton.jit(do_not_specialize=["context"])
def _draft_suffix(
    slots,
    lengths,
    history,
    drafts,
    ready,
    context,
    most: tl.constexpr,
    padded: tl.constexpr,
    longest: tl.constexpr,
    shortest: tl.constexpr,
    always: tl.constexpr,
    block: tl.constexpr,
):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    newest = tl.load(lengths + slot)
    tokens = history + slot * context
    best, place = 0, -1
    for start in tl.range(0, newest, block):
        at = start + tl.arange(0, block)
        alive = at < newest
        matched = tl.zeros((block,), tl.int32)
        depth, going = 0, 1
        while (depth < longest) & (going > 0):
            own = tl.load(tokens + tl.maximum(newest - depth, 0))
            alive &= at >= depth
            other = tl.load(tokens + at - depth, mask=alive, other=-1)
            alive &= other == own
            matched += alive.to(tl.int32)
            going = tl.max(alive.to(tl.int32), axis=0)
            depth += 1
        most_here = tl.max(matched, axis=0)
        latest = tl.max(tl.where(matched == most_here, at, -1), axis=0)
        better = (most_here > 0) & (most_here >= best)
        place = tl.where(better, latest, place)
        best = tl.maximum(best, most_here)
    column = tl.arange(0, padded)
    distance = tl.maximum(newest - place, 1)
    known = (column < most) & (best >= shortest)
    found = tl.load(tokens + place + 1 + column % distance, mask=known, other=0)
    tl.store(drafts + slot * most + column, found, mask=column < most)
    count = tl.where(best >= shortest, tl.minimum(best, most), 0)
    if always:
        count = count * 0 + most
    tl.store(ready + slot, count)


def draft_suffix(slots: Tensor, tables: SlotTables, *, always: bool = False) -> None:
    """Sets the drafts of the sequences in these slots, [S] int32. `always`: as many as there may
    be, of anything where there is no match."""
    launch(
        _draft_suffix,
        (len(slots),),
        slots,
        tables.length,
        tables.history,
        tables.drafts,
        tables.ready,
        tables.history.shape[1],
        tables.most,
        power_of_2(tables.most),
        LONGEST,
        SHORTEST,
        always,
        _BLOCK,
        num_warps=_WARPS,
    )
