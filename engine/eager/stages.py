"""Stages on CPUs, by torch.distributed's gloo."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from engine.eager.collective import gloo_group, unbroken
from engine.eager.meeting import Meeting
from engine.step.lanes import flights_of


class GlooStages:
    """A stage's place in the ring of ranks that have the same place in their stages.

    What is sent waits in this process until the next stage takes it, so a stage goes on with its
    next step meanwhile. What was sent before the steps in flight has been taken.
    """

    waits_on_host = True

    def __init__(self, stage: int, count: int) -> None:
        """Not joined yet: see `join`."""
        self.is_first = stage == 0
        self.is_last = stage == count - 1
        self._stage, self._count = stage, count
        self._unsent = flights_of(count)
        self._group: Any
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def join(self, meeting: Meeting) -> None:
        """Meets the other stages; see `GroupCollective.join`."""
        self._group = gloo_group(meeting, self._stage, self._count)

    def receive(self, x: Tensor) -> Tensor:
        """See `Stages`."""
        with unbroken():
            self._group.recv([x], (self._stage - 1) % self._count, 0).wait()
        return x

    def send(self, x: Tensor) -> None:
        """See `Stages`."""
        x = x.contiguous()
        with unbroken():
            while len(self._sent) >= self._unsent:
                self._sent.popleft()[0].wait()
            to = (self._stage + 1) % self._count
            self._sent.append((self._group.send([x], to, 0), x))

    def let_go(self) -> None:
        """The ranks are lost. A rank that ends closes its connections, which ends waits for it."""

    def close(self) -> None:
        """Stages do nothing together any more."""
