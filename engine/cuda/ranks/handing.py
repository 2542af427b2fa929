"""Hidden states from one stage to the next, through memory that their GPUs share.

The receiver's buffer is a ring of slots. A step's number chooses the slot. Program P of the sender
copies its part there and writes the number into its signal of the receiver's pad; program P of the
receiver waits for that number, or a larger one, and copies the same part out. So the sender never
waits: the ring has a slot for each step that may be in flight, and a further step begins when the
oldest one has ended in the last stage.

The memory and its signals are those of `engine.cuda.ranks.kernels`, which a rank that is lost lets
go of in the same way.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch
from engine.cuda.ranks.shared import Shared

PROGRAMS: Final = 64
"""Programs of each side, if the GPUs run as many at once. Not tuned."""
_BLOCK: Final = 4096
"""Numbers of a program at a time. Not tuned."""


@triton.jit(do_not_specialize=["rank", "peer", "count", "number", "start"])
def hand_on(
    buffers, pads, x, rank, peer, count, number, start, ranks: tl.constexpr, block: tl.constexpr
):
    """Writes `count` numbers to the peer's slot, which begins at `start`, and signals `number`."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    slot = tl.load(buffers + peer).to(tl.pointer_type(x.dtype.element_ty))
    slot = tl.multiple_of(slot, 16) + start
    for begin in range(program * block, count, programs * block):
        at = begin + tl.arange(0, block)
        tl.store(slot + at, tl.load(x + at, mask=at < count, other=0.0), mask=at < count)
    signals = tl.load(pads + peer).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()
    tl.atomic_xchg(signals + program * ranks + rank, number, sem="release", scope="sys")


@triton.jit(do_not_specialize=["rank", "peer", "count", "number", "start"])
def take_over(
    buffers, pads, x, rank, peer, count, number, start, ranks: tl.constexpr, block: tl.constexpr
):
    """Waits for the peer's `number`, and reads what it has written to the slot at `start`."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    signal = tl.load(pads + rank).to(tl.pointer_type(tl.int64)) + program * ranks + peer
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    while seen < number:
        seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    slot = tl.load(buffers + rank).to(tl.pointer_type(x.dtype.element_ty))
    slot = tl.multiple_of(slot, 16) + start
    for begin in range(program * block, count, programs * block):
        at = begin + tl.arange(0, block)
        part = tl.load(slot + at, mask=at < count, other=0.0, cache_modifier=".cg")
        tl.store(x + at, part, mask=at < count)


class Ring:
    """A stage's place among those that share memory. `slots`: steps that may be in flight."""

    def __init__(self, shared: Shared, slots: int) -> None:
        self._shared = shared
        self._slots = slots
        self.slot_bytes = 2 * shared.half_bytes // slots // 16 * 16
        self._received = self._sent = 0

    def receive(self, x: Tensor) -> None:
        """Overwrites `x`, contiguous, with what the stage before hands on. The stream waits."""
        self._received += 1
        self._move(take_over, x, self._shared.rank - 1, self._received)

    def send(self, x: Tensor) -> None:
        """Hands `x`, contiguous, on to the next stage."""
        self._sent += 1
        self._move(hand_on, x, self._shared.rank + 1, self._sent)

    def _move(self, kernel, x: Tensor, peer: int, number: int) -> None:
        own = self._shared
        assert x.nbytes <= self.slot_bytes, "a step fits a slot"
        start = number % self._slots * self.slot_bytes // x.element_size()
        programs = min(PROGRAMS, len(own.calls))
        given = own.buffers, own.pads, x, own.rank, peer, x.numel(), number, start
        launch(kernel, (programs,), *given, own.ranks, _BLOCK, num_warps=8)
