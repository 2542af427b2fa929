"""Ranks that have joined a group of torch's: the base, and gloo for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.eager.meeting import Meeting
from engine.step.collective import CollectiveError

Float64s = NDArray[np.float64]
_dist: Any = dist
"""torch's stubs lack most of what is used here."""
LONGEST_S: Final = 3600.0
"""Longest wait for another rank, seconds. It only bounds what nobody watches: the watchdog ends a
worker whose step hangs, and a rank that dies closes its connections."""


class GroupCollective:
    """Ranks that have joined a group of torch's.

    The group is an object of its own and not torch's default one, which a user's process may have
    for itself.
    """

    waits_on_host = True
    """Whether the caller waits for the other ranks, and not its device."""

    def __init__(self, rank: int, size: int) -> None:
        """Not joined yet: see `join`."""
        self.rank = rank
        self.size = size
        self.on_step: Callable[[], None] = _nothing
        """Is called when a step begins on this rank."""
        self.on_waits: Callable[[Float64s], None] = _nothing
        """Rank 0, where devices wait: is called with the seconds that each rank has waited so far,
        when a step ends."""
        self._group: Any

    def join(self, meeting: Meeting) -> None:
        """Meets the other ranks. Blocks until all have come."""
        raise NotImplementedError

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective`."""
        wait(self._group.allreduce([x], at_once(_dist.AllreduceOptions())))
        return x

    def gather(self, x: Tensor, width: int) -> Tensor:
        """See `Collective`."""
        each = -(-width // self.size)
        x = F.pad(x, (0, each - x.shape[1])).contiguous()
        options = at_once(_dist.GatherOptions())
        options.rootRank = 0
        if self.rank:
            wait(self._group.gather([], [x], options))
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        wait(self._group.gather([parts], [x], options))
        return torch.cat(parts, dim=1)[:, :width].contiguous()

    def broadcast(self, x: Tensor) -> None:
        """See `Collective`."""
        options = at_once(_dist.BroadcastOptions())
        options.rootRank = 0
        wait(self._group.broadcast([x], options))

    def barrier(self) -> None:
        """See `Collective`."""
        wait(self._group.barrier())

    def begin_step(self) -> None:
        """See `Collective`."""
        self.on_step()

    def end_step(self) -> None:
        """See `Collective`."""

    def let_go(self) -> None:
        """Ends every wait of this rank for another one, for good: the ranks are lost."""

    def close(self) -> None:
        """No rank will do anything together any more."""


class GlooCollective(GroupCollective):
    """Ranks on CPUs, by torch.distributed's gloo. It waits without spinning.

    Its sums have one order for each element, so all ranks get the same bits.
    """

    def join(self, meeting: Meeting) -> None:
        """See `GroupCollective`."""
        self._group = gloo_group(meeting, self.rank, self.size)


def gloo_group(meeting: Meeting, rank: int, size: int) -> Any:
    """A group of gloo's, with those of the same meeting. Blocks until all have come."""
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=meeting.address)]
    options._timeout = timedelta(seconds=LONGEST_S)
    return _dist.ProcessGroupGloo(meeting.store, rank, size, options)


def _nothing(*_: Float64s) -> None:
    """Default for `on_step` and `on_waits`."""


def at_once(options: Any) -> Any:
    """Options of work that the caller's own thread, or stream, waits for at once."""
    options.asyncOp = False
    return options


def wait(work: Any) -> None:
    """Waits for a group's work: the host does, or the current stream.

    Raises:
        CollectiveError: another rank is gone.
    """
    with unbroken():
        if work is not None:
            work.wait()


@contextmanager
def unbroken() -> Iterator[None]:
    """Raises CollectiveError in place of what torch raises where another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError("the connection to another rank broke") from error
