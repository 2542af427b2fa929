"""Kernels over memory that the GPUs of all ranks can read and write. No multicast.

Each rank has a buffer of two halves, and a pad of signals. A table of addresses says where those
of all ranks are. A call is a launch on each rank:

1. A program copies its rows into the rank's own buffer.
2. It meets the program of the same number on all ranks: it writes a number into a signal of each
   rank's pad, and waits until its own pad has that number, or a larger one, from every rank.
3. It reads what the others have copied. Sums are added in the order of ranks, in float32, and
   rounded once to the dtype. So all ranks get the same bits, and those of `add_rms_norm` after a
   sum.

With *one shot* each rank adds up all rows. With *two shots* it adds up every Nth row, writes the
sums into the buffers of all ranks, and the programs meet again. So fewer bytes go between ranks.

The halves take turns: who writes into one has met all others in a call since they read it. Which
half it is follows from the number of calls, which the device counts. So a graph may contain any
number of calls. Each program counts for itself. So every call has the same number of programs,
which all fit the GPU at once: a program that waits must not keep another from starting.

A signal never falls. A program that has looked for it a thousand times, about a millisecond, looks
once whether its rank lets it go: a word in the host's memory, whose address comes behind those of
the pads (`engine.cuda.ranks.symmetric`).

Behind its signals a rank's pad has the time, nanoseconds, that its program 0 has waited for others
in all calls. Any rank may read it (`waits_of_ranks`). The wait of the last meeting may still be
missing there. It is measured by the clock that counts nanoseconds, since the clock of a processor
changes its frequency. That clock goes on in steps, of 32 ns or 1 us by the kind of GPU, which
even out over calls.

Profiles show kernels by the names of their functions.

A launch runs some phases of a call: all of them, or one. Where the ranks' buffers lie on one
device, as in tests, each phase is a launch for each rank, and no program waits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _now(program):
    """Nanoseconds, in the first thread of program 0. In others it is not defined."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred other;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            or.b32 thread, thread, $1;
            setp.ne.u32 other, thread, 0;
            @other bra read;
            mov.u64 $0, %globaltimer;
        read:
        }
        """,
        "=l,r",
        [program],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def meet(pads, program, rank, number, ranks: tl.constexpr):
    """Signals to program `program` of all ranks that this rank's has come, and waits for theirs.
    What a rank wrote before it came can be read afterwards. Thread T signals to rank T, and waits
    for it."""
    pad = tl.load(pads + rank)
    gone = tl.load(pads + ranks)
    waited = (pad + (tl.num_programs(0) * ranks).to(tl.int64) * 8).to(tl.pointer_type(tl.int64))
    waited_ns = tl.load(waited)  # Here, because it comes while the program waits.
    tl.debug_barrier()
    place = (program * ranks + rank).to(tl.int64) * 8
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred there;
            .reg .u32 thread;
            .reg .u64 place;
            mov.u32 thread, %tid.x;
            setp.lt.u32 there, thread, $4;
            mul.wide.u32 place, thread, 8;
            add.u64 place, place, $1;
            @there ld.global.u64 place, [place];
            add.u64 place, place, $2;
            @there st.release.sys.global.u64 [place], $3;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,l,l,r",
        [pads, place, number, ranks],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    own = pad + (program * ranks).to(tl.int64) * 8
    began_ns = _now(program)
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred other, early, often;
            .reg .u32 thread, looks;
            .reg .u64 place, seen;
            mov.u32 thread, %tid.x;
            setp.ge.u32 other, thread, $3;
            @other bra met;
            mul.wide.u32 place, thread, 8;
            add.u64 place, place, $1;
            mov.u32 looks, 0;
        look:
            ld.acquire.sys.global.u64 seen, [place];
            setp.lt.s64 early, seen, $2;
            @!early bra met;
            add.u32 looks, looks, 1;
            and.b32 looks, looks, 1023;
            setp.ne.u32 often, looks, 0;
            @often bra look;
            ld.relaxed.sys.global.u64 seen, [$4];
            setp.eq.u64 early, seen, 0;
            @early bra look;
        met:
            mov.u32 $0, 0;
        }
        """,
        "=r,l,l,r,l",
        [own, number, ranks, gone],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
    tl.store(waited, waited_ns + (_now(program) - began_ns), mask=program == 0)


@triton.jit
def buffer_of(buffers, rank, start, dtype: tl.constexpr):
    """A rank's half, as numbers of a type; `start` of them come before it."""
    place = tl.load(buffers + rank).to(tl.pointer_type(dtype))
    return tl.multiple_of(place, 16) + start


@triton.jit
def total_of(buffers, start, place, inside, dtype: tl.constexpr, ranks: tl.constexpr):
    """The sum of all ranks' numbers, rounded to their type."""
    total = tl.zeros(place.shape, tl.float32)
    for rank in tl.static_range(ranks):
        theirs = buffer_of(buffers, rank, start, dtype)
        part = tl.load(theirs + place, mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total.to(dtype)


@triton.jit
def _keep(
    total, x, residual, weight, eps, place, at, inside, size: tl.constexpr, adds: tl.constexpr
):
    """Stores a row's sum in `x`; or adds it to the residual, and stores the norm of that."""
    if adds:
        dtype: tl.constexpr = x.dtype.element_ty
        value = total.to(tl.float32)
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(dtype)
        tl.store(residual + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / size + eps)
        gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + place, value * scale * gain, mask=inside)
    else:
        tl.store(x + place, total, mask=inside)


@triton.jit(do_not_specialize=["rank", "rows"])
def all_reduce_one_shot(
    buffers,
    pads,
    calls,
    x,
    residual,
    weight,
    eps,
    rank,
    rows,
    half,
    size: tl.constexpr,
    ranks: tl.constexpr,
    adds: tl.constexpr,
    first: tl.constexpr,
    last: tl.constexpr,
    block: tl.constexpr,
):
    """Phases: 0 copies, 1 adds up."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x.dtype.element_ty
    call = tl.load(calls + program)
    start = call % 2 * half
    at = tl.arange(0, block)
    inside = at < size
    if first == 0:
        own = buffer_of(buffers, rank, start, dtype)
        for row in range(program, rows, programs):
            place = row * size + at
            tl.store(own + place, tl.load(x + place, mask=inside, other=0.0), mask=inside)
    if first < 1 and last >= 1:
        meet(pads, program, rank, 2 * call + 1, ranks)
    if last == 1:
        for row in range(program, rows, programs):
            place = row * size + at
            total = total_of(buffers, start, place, inside, dtype, ranks)
            _keep(total, x, residual, weight, eps, place, at, inside, size, adds)
        tl.store(calls + program, call + 1)


@triton.jit(do_not_specialize=["rank", "rows"])
def all_reduce_two_shots(
    buffers,
    pads,
    calls,
    x,
    residual,
    weight,
    eps,
    rank,
    rows,
    half,
    size: tl.constexpr,
    ranks: tl.constexpr,
    adds: tl.constexpr,
    first: tl.constexpr,
    last: tl.constexpr,
    block: tl.constexpr,
):
    """Phases: 0 copies, 1 adds up and spreads, 2 keeps. A program has groups of N rows, of which
    each rank adds up one."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x.dtype.element_ty
    call = tl.load(calls + program)
    start = call % 2 * half
    at = tl.arange(0, block)
    groups = tl.cdiv(rows, ranks)
    own = buffer_of(buffers, rank, start, dtype)
    if first == 0:
        for group in range(program, groups, programs):
            for turn in tl.static_range(ranks):
                row = group * ranks + turn
                place, inside = row * size + at, (at < size) & (row < rows)
                tl.store(own + place, tl.load(x + place, mask=inside, other=0.0), mask=inside)
    if first < 1 and last >= 1:
        meet(pads, program, rank, 2 * call + 1, ranks)
    if first <= 1 and last >= 1:
        for group in range(program, groups, programs):
            row = group * ranks + rank
            place, inside = row * size + at, (at < size) & (row < rows)
            total = total_of(buffers, start, place, inside, dtype, ranks)
            for other in tl.static_range(ranks):
                tl.store(buffer_of(buffers, other, start, dtype) + place, total, mask=inside)
    if first < 2 and last >= 2:
        meet(pads, program, rank, 2 * call + 2, ranks)
    if last == 2:
        for group in range(program, groups, programs):
            for turn in tl.static_range(ranks):
                row = group * ranks + turn
                place, inside = row * size + at, (at < size) & (row < rows)
                total = tl.load(own + place, mask=inside, other=0.0, cache_modifier=".cg")
                _keep(total, x, residual, weight, eps, place, at, inside, size, adds)
        tl.store(calls + program, call + 1)


@triton.jit(do_not_specialize=["rank", "count"])
def all_gather(
    buffers,
    pads,
    calls,
    x,
    out,
    rank,
    count,
    half,
    ranks: tl.constexpr,
    first: tl.constexpr,
    last: tl.constexpr,
    block: tl.constexpr,
):
    """Each rank's `count` words, one rank after the other. Phases: 0 copies, 1 gathers. With no
    word it is a barrier."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = x.dtype.element_ty
    call = tl.load(calls + program)
    start = call % 2 * half
    if first == 0:
        own = buffer_of(buffers, rank, start, dtype)
        for begin in range(program * block, count, programs * block):
            at = begin + tl.arange(0, block)
            tl.store(own + at, tl.load(x + at, mask=at < count, other=0), mask=at < count)
    if first < 1 and last >= 1:
        meet(pads, program, rank, 2 * call + 1, ranks)
    if last == 1:
        for begin in range(program * block, count, programs * block):
            at = begin + tl.arange(0, block)
            for other in tl.static_range(ranks):
                theirs = buffer_of(buffers, other, start, dtype)
                word = tl.load(theirs + at, mask=at < count, other=0, cache_modifier=".cg")
                tl.store(out + other * count + at, word, mask=at < count)
        tl.store(calls + program, call + 1)


@triton.jit
def waits_of_ranks(pads, out, place, ranks: tl.constexpr, block: tl.constexpr):
    """How long each rank has waited so far; `place`: bytes of a pad that come before that."""
    rank = tl.arange(0, block)
    there = rank < ranks
    waited = (tl.load(pads + rank, mask=there, other=0) + place).to(tl.pointer_type(tl.int64))
    waited_ns = tl.load(waited, mask=there, other=0, cache_modifier=".cg")
    tl.store(out + rank, waited_ns, mask=there)
