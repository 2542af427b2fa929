"""Collectives: what the ranks of a worker do together. All of them call the same, in one order.

A faster all-reduce is another `Collective`: the model and the executors know only the protocol.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_dist: Any = dist
"""torch's stubs lack most of what is used here."""
LONGEST_S: Final = 3600.0
"""Longest wait for another rank, seconds. It only bounds what nobody watches: the watchdog ends a
worker whose step hangs, and a rank that dies closes its connections."""
LOOPBACK: Final = "127.0.0.1"


class CollectiveError(Exception):
    """Another rank is gone, or went wrong."""


class Collective(Protocol):
    """Ranks count from 0, and rank 0 has the scheduler and the sampler.

    Where another rank is gone, an operation raises CollectiveError.
    """

    rank: int
    size: int
    """Number of ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, with the same bits on all of them. `x` is overwritten."""
        ...

    def gather(self, x: Tensor, width: int) -> Tensor:
        """Puts columns side by side on rank 0.

        Args:
            x: this rank's columns, [R, C]. All ranks have `width / size`, rounded up; the last may
                have fewer.
            width: columns of all ranks.

        Returns:
            [R, width] on rank 0; elsewhere this rank's own.
        """
        ...

    def broadcast(self, x: Tensor) -> None:
        """Overwrites `x` with that of rank 0."""
        ...

    def barrier(self) -> None:
        """Returns, or on a GPU goes on, when all ranks have come here."""
        ...

    def begin_step(self) -> None:
        """A step begins on this rank."""
        ...

    def end_step(self) -> None:
        """Its last collective has ended."""
        ...


class Alone:
    """The only rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective`."""
        return x

    def gather(self, x: Tensor, width: int) -> Tensor:
        """See `Collective`."""
        return x

    def broadcast(self, x: Tensor) -> None:
        """See `Collective`."""

    def barrier(self) -> None:
        """See `Collective`."""

    def begin_step(self) -> None:
        """See `Collective`."""

    def end_step(self) -> None:
        """See `Collective`."""


class GlooCollective:
    """Ranks on CPUs, by torch.distributed's gloo over loopback. It waits without spinning.

    The group is an object of its own and not torch's default one, which a user's process may have
    for itself. Its sums have one order for each element, so all ranks get the same bits.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Not joined yet: see `join`."""
        self.rank = rank
        self.size = size

    def join(self, store: Path) -> None:
        """Meets the other ranks. Blocks until all have come.

        Args:
            store: a file that does not exist yet, the same for all ranks.
        """
        options = _dist.ProcessGroupGloo._Options()
        device = _dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)
        options._devices = [device]
        options._timeout = timedelta(seconds=LONGEST_S)
        file = _dist.FileStore(str(store), self.size)
        self._group = _dist.ProcessGroupGloo(file, self.rank, self.size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective`."""
        _wait(self._group.allreduce([x]))
        return x

    def gather(self, x: Tensor, width: int) -> Tensor:
        """See `Collective`."""
        each = -(-width // self.size)
        x = F.pad(x, (0, each - x.shape[1])).contiguous()
        options = _dist.GatherOptions()
        options.rootRank = 0
        if self.rank:
            _wait(self._group.gather([], [x], options))
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        _wait(self._group.gather([parts], [x], options))
        return torch.cat(parts, dim=1)[:, :width].contiguous()

    def broadcast(self, x: Tensor) -> None:
        """See `Collective`."""
        _wait(self._group.broadcast(x, 0))

    def barrier(self) -> None:
        """See `Collective`."""
        _wait(self._group.barrier())

    def begin_step(self) -> None:
        """See `Collective`."""

    def end_step(self) -> None:
        """See `Collective`."""


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise CollectiveError("the connection to another rank broke") from error
