"""Collectives: what the ranks of a worker do together. All of them call the same, in one order.

A faster all-reduce is another `Collective`: the model and the executors know only the protocol.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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
