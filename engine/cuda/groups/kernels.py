"""Kernels that move tokens between the workers of an expert group, over memory that their GPUs
share. How programs meet, and how the halves of a buffer take turns, is in
`engine.cuda.ranks.kernels`: these are calls like those there.

Each worker brings R rows, of which the first T are tokens. A padding row has the weight 0 for each
of its experts, and what has no weight is computed nowhere.

Shapes: N workers, R rows of each, C chosen experts of a token, H what experts read and give.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from engine.cuda.experts.summing import sum_of_pairs, with_shared
from engine.cuda.ranks.kernels import buffer_of, meet, total_of


@triton.jit
def _section(buffers, rank, place, dtype: tl.constexpr):
    """The numbers of a type that begin at a byte of a rank's buffer, a multiple of 16."""
    return tl.multiple_of((tl.load(buffers + rank) + place).to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["rank", "tokens", "rows", "nobody"])
def gather_tokens(
    buffers, pads, calls, x, weights, experts, slots, out, out_weights, out_experts,
    rank, tokens, rows, half, weights_at, experts_at, nobody, held,
    has_slots: tl.constexpr, size: tl.constexpr, chosen: tl.constexpr, ranks: tl.constexpr,
    first: tl.constexpr, last: tl.constexpr, block: tl.constexpr, places: tl.constexpr,
):  # fmt: skip
    """Each worker's rows, one worker after the other. Phases: 0 copies, 1 gathers, and numbers the
    experts among the `held` ones of this worker, as `engine.model.experts.routing.held` does.

    `half`: bytes of a half. `weights_at`, `experts_at`: bytes of it that come before. `slots`: of
    each token, where those of `nobody` are padding.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x.dtype.element_ty
    call = tl.load(calls + program)
    start = call % 2 * half
    at, place = tl.arange(0, block), tl.arange(0, places)
    inside, used = at < size, place < chosen
    if first == 0:
        own = _section(buffers, rank, start, dtype)
        own_weights = _section(buffers, rank, start + weights_at, tl.float32)
        own_experts = _section(buffers, rank, start + experts_at, tl.int32)
        for row in range(program, rows, programs):
            there = row < tokens
            if has_slots:
                there = there & (tl.load(slots + row, mask=there, other=0) != nobody)
            value = tl.load(x + row * size + at, mask=inside & there, other=0.0)
            tl.store(own + row * size + at, value, mask=inside)
            pair = row * chosen + place
            weight = tl.load(weights + pair, mask=used & there, other=0.0)
            tl.store(own_weights + pair, weight, mask=used)
            expert = tl.load(experts + pair, mask=used & there, other=0)
            tl.store(own_experts + pair, expert, mask=used)
    if first < 1 and last >= 1:
        meet(pads, program, rank, 2 * call + 1, ranks)
    if last == 1:
        for other in range(ranks):
            theirs = _section(buffers, other, start, dtype)
            their_weights = _section(buffers, other, start + weights_at, tl.float32)
            their_experts = _section(buffers, other, start + experts_at, tl.int32)
            for row in range(program, rows, programs):
                target = tl.cast(other * rows + row, tl.int64)
                value = tl.load(
                    theirs + row * size + at, mask=inside, other=0.0, cache_modifier=".cg"
                )
                tl.store(out + target * size + at, value, mask=inside)
                pair = row * chosen + place
                weight = tl.load(their_weights + pair, mask=used, other=0.0, cache_modifier=".cg")
                expert = tl.load(their_experts + pair, mask=used, other=0, cache_modifier=".cg")
                # What a worker that is gone has left there may be no expert.
                ours = (expert % ranks == rank) & (weight != 0.0)
                ours = ours & (expert >= 0) & (expert < held * ranks)
                expert = tl.where(ours, expert // ranks, held)
                weight = tl.where(ours, weight, 0.0)
                tl.store(out_weights + target * chosen + place, weight, mask=used)
                tl.store(out_experts + target * chosen + place, expert, mask=used)
        tl.store(calls + program, call + 1)


@triton.jit(do_not_specialize=["rank", "tokens", "rows"])
def scatter_sums(
    buffers, pads, calls, parts, places, weights, shared, x, gate, out,
    rank, tokens, rows, half, size: tl.constexpr, chosen: tl.constexpr, ranks: tl.constexpr,
    has_shared: tl.constexpr, has_gate: tl.constexpr,
    first: tl.constexpr, last: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Adds up the experts of every worker's rows, and gives each worker the sums of its own tokens.
    Phases: 0 adds up over the experts here, 1 over the workers, in their order, and adds the expert
    that all tokens share. `half`: numbers of a half."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = out.dtype.element_ty
    call = tl.load(calls + program)
    start = call % 2 * half
    at = tl.arange(0, block)
    inside = at < size
    if first == 0:
        own = buffer_of(buffers, rank, start, dtype)
        for other in range(ranks):
            for row in range(program, rows, programs):
                token = tl.cast(other * rows + row, tl.int64)
                total = sum_of_pairs(parts, places, weights, token, at, inside, size, chosen)
                tl.store(own + token * size + at, total, mask=inside)
    if first < 1 and last >= 1:
        meet(pads, program, rank, 2 * call + 1, ranks)
    if last == 1:
        for row in range(program, tokens, programs):
            place = tl.cast(rank * rows + row, tl.int64) * size + at
            total = total_of(buffers, start, place, inside, dtype, ranks)
            token = tl.cast(row, tl.int64)
            if has_shared:
                total = with_shared(
                    total.to(tl.float32), shared, x, gate, token, at, inside, size, has_gate, block
                )
            tl.store(out + token * size + at, total, mask=inside)
        tl.store(calls + program, call + 1)
