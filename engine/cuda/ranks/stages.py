"""Stages on GPUs: hidden states and tokens go from GPU to GPU by NCCL, or through host memory.

NCCL takes one rank a GPU. Two neighbours have a communicator of their own, made and used once when
they join: one that is made in service waits for a stage that may be busy with something else. All
is queued on the caller's stream, and graphs of steps contain none of it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from engine.cuda.ranks.collective import environment, nccl_environment, nccl_group
from engine.eager.collective import wait
from engine.eager.meeting import Meeting
from engine.eager.stages import GlooStages
from engine.step.collective import CollectiveError
from engine.step.lanes import flights_of

_dist: Any = dist
_UNSENT: Final = 2
"""Steps whose hidden states may wait to be taken. The stage goes on meanwhile."""
_MOST_CTAS: Final = 4
"""Blocks of a send or a receive. One that waits for the other stage keeps so many processors busy.
Not tuned: it is 3 of 100 on an H100, where four blocks copy some 80 GB/s."""


class NcclStages:
    """A stage's place in the ring of ranks that have the same place in their stages."""

    waits_on_host = False

    def __init__(self, stage: int, count: int, device: torch.device) -> None:
        """Not joined yet: see `join`."""
        self.is_first = stage == 0
        self.is_last = stage == count - 1
        self._stage, self._count, self._device = stage, count, device
        self._unsent = flights_of(count) if self.is_last else _UNSENT
        """Tokens that were sent before the steps in flight have been taken."""
        self._before: Any = None
        self._behind: Any = None
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def join(self, meeting: Meeting) -> None:
        """Meets the stages beside this one; see `GroupCollective.join`. The caller's thread may be
        any."""
        if not _dist.is_nccl_available():
            raise CollectiveError("the PyTorch that is installed has no NCCL: set pp to 1")
        torch.cuda.set_device(self._device)
        word = torch.zeros(1, device=self._device)
        with environment(nccl_environment(meeting)):
            before = (self._stage - 1) % self._count
            for first in sorted((before, self._stage)):  # In one order, since pairs wait for both.
                if first == before:
                    self._before = self._pair(meeting, first, 1)
                    self.receive(word)
                else:
                    self._behind = self._pair(meeting, first, 0)
                    self.send(word)
            torch.cuda.current_stream(self._device).synchronize()

    def receive(self, x: Tensor) -> Tensor:
        """See `Stages`. The current stream waits."""
        wait(self._before.recv([x], 0, 0))
        return x

    def send(self, x: Tensor) -> None:
        """See `Stages`. It is copied, so the caller may change it."""
        while len(self._sent) >= self._unsent:
            wait(self._sent.popleft()[0])
        own = x.clone()
        self._sent.append((self._behind.send([own], 1, 0), own))

    def let_go(self) -> None:
        """Ends every wait of this stage for another one, for good. What the device still computes
        has no meaning."""
        self.close()

    def close(self) -> None:
        """Stages do nothing together any more."""
        for pair in (self._before, self._behind):
            if pair is not None:
                with contextlib.suppress(Exception):
                    pair.abort()

    def _pair(self, meeting: Meeting, first: int, rank: int) -> Any:
        """A communicator of the stages `first` and the next in the ring; this has a rank of it."""
        return nccl_group(meeting, str(first), rank, 2, _MOST_CTAS)


class HostStages(GlooStages):
    """Stages that share a GPU. Each waits on its host for its device, so one computes at a time,
    and the host's clock does not tell how long it has waited for another stage."""

    waits_on_host = False

    def receive(self, x: Tensor) -> Tensor:
        """See `Stages`."""
        return x.copy_(super().receive(torch.empty_like(x, device="cpu")))

    def send(self, x: Tensor) -> None:
        """See `Stages`. It is copied, so the caller may change it."""
        super().send(x.to("cpu", copy=True))
