"""Moves tokens between the workers of an expert group by gloo, on CPUs.

A forward pass of one worker is one of all: each runs every layer of experts once, with its own
tokens or without. The first layer waits for the turn, in which each worker says how many it has.

Shapes: T tokens of this worker, A of all, C chosen experts of each, H what experts read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.eager.collective import at_once, gloo_group
from engine.eager.meeting import meeting_in
from engine.step.collective import CollectiveError
from engine.step.dispatch import Asks, Dispatched, Turns

_dist: Any = dist
"""torch's stubs lack most of what is used here."""
_LOOK: Final = timedelta(seconds=0.5)
"""Who waits for others looks this often whether the group is lost."""


class GlooDispatch:
    """See `engine.step.dispatch.Dispatch`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.member: Turns
        """Who knows when a step begins."""
        self._layers: list[Callable[[], None]] = []
        self._group: Any = None
        self._owner = 0
        """The thread whose step runs; 0: none does."""
        self._without = 0
        """The thread that runs steps without tokens."""
        self._counts: Sequence[int] = ()
        self._done = 0
        """Layers that this step has passed."""

    def join(self, store: Path) -> None:
        """Meets the other workers. Blocks until all have come."""
        self._group = gloo_group(meeting_in(store, self.size), self.rank, self.size)

    def add(self, without_tokens: Callable[[], None]) -> None:
        """See `Dispatch`."""
        self._layers.append(without_tokens)

    def run_without_tokens(self, asks: Asks) -> None:
        """A step for which this worker has no tokens."""
        self._without = threading.get_ident()
        self._open(asks)
        for layer in self._layers:
            layer()

    def let_go(self) -> None:
        """Closes the connections, so that who waits for this worker hears of it.

        gloo joins its own threads when it goes, and those wait for a worker that is stopped. So it
        goes on a thread of its own, and nobody waits here.
        """
        if self._group is None:
            return
        last = [self._group]
        self._group = None
        threading.Thread(target=last.clear, name="gloo's end", daemon=True).start()

    def failed(self) -> None:
        """A step of this worker has failed. In its middle the others wait in it, so the group is
        lost at once: nobody knows when this worker has a step again."""
        if self._owner not in (0, self._without):
            self.member.lose("a step failed between two layers, and the others wait in it")

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor) -> Dispatched:
        """See `Dispatch`. All travels in float32, which holds every number of 16 bits and every
        expert."""
        if self._owner != threading.get_ident():
            self._open(self.member.take([len(x)]))
        own = torch.cat((x.float(), weights.float(), experts.float()), dim=1)
        own = F.pad(own, (0, 0, 0, max(self._counts) - len(own))).contiguous()
        every = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(self._joined().allgather([every], [own]))
        pairs = zip(every, self._counts, strict=True)
        rows = torch.cat([part[:count] for part, count in pairs])
        width, behind = x.shape[1], x.shape[1] + weights.shape[1]
        shares = rows[:, width:behind].contiguous()
        return Dispatched(rows[:, :width].to(x.dtype), shares, rows[:, behind:].long())

    def combine(self, out: Tensor) -> Tensor:
        """See `Dispatch`."""
        out = out.contiguous()
        self._wait(self._joined().allreduce([out], at_once(_dist.AllreduceOptions())))
        first = sum(self._counts[: self.rank])
        own = out[first : first + self._counts[self.rank]]
        self._done += 1
        if self._done == len(self._layers):
            self._close()
        return own

    def _joined(self) -> Any:
        if self._group is None:
            raise CollectiveError(self.member.lost)
        return self._group

    def _wait(self, work: Any) -> None:
        """Waits until it is done, or the group is lost: the connection to a worker that is stopped
        does not break."""
        while not work.is_completed():
            with suppress(RuntimeError):  # It is not done yet, or has failed, which it says below.
                work.wait(_LOOK)
            if self.member.lost:
                raise CollectiveError(self.member.lost)
        try:
            work.wait()
        except RuntimeError as error:
            self.member.lose("the connection to another worker of the expert group broke")
            raise CollectiveError(self.member.lost) from error

    def _open(self, asks: Asks) -> None:
        self._owner, self._done = threading.get_ident(), 0
        self._counts = [sum(asks.get(rank, ())) for rank in range(self.size)]

    def _close(self) -> None:
        has_tokens, self._owner, self._counts = self._owner != self._without, 0, ()
        if has_tokens:
            self.member.done()
            self.member.ended()
