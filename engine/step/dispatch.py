"""How tokens come to the experts of a layer, where other workers hold some of these.

A worker of an expert group has attention whole, the pages of its own sequences, and some experts
whole. At each layer of experts all workers bring their tokens together, each one computes its
experts for all of them, and each takes the sums of its own tokens back.

Another way to move tokens is another `Dispatch`: the model knows only the protocol.

Shapes: T tokens of this worker, A of all, C chosen experts of each, H what experts read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from urllib.parse import parse_qsl

from torch import Tensor

from engine.bounds import MOST_RANKS

_MOST_PATH_BYTES: Final = 100
"""Linux has 107 for the name of a socket, and that is in the folder."""


class Dispatched(NamedTuple):
    """Tokens of all workers, in the order of these."""

    x: Tensor
    """[A, H]"""
    weights: Tensor
    """[A, C] float32."""
    experts: Tensor
    """[A, C] int64, among all experts."""


class Dispatch(Protocol):
    """Moves tokens. A forward pass calls `dispatch`, then `combine`, once for each layer that was
    added, in this order. Where another worker is gone, both raise CollectiveError."""

    def add(self, without_tokens: Callable[[], None]) -> None:
        """Takes note of a layer of experts. `without_tokens` runs it for no token of this
        worker."""
        ...

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor) -> Dispatched:
        """[T, H], [T, C] and [T, C] of this worker -> those of all."""
        ...

    def combine(self, out: Tensor) -> Tensor:
        """[A, H], this worker's part of the sums -> [T, H], whole ones of its own tokens. `out` is
        overwritten."""
        ...


Asks = dict[int, list[int]]
"""What the workers that have tokens in a step have asked for, by rank. Their `Dispatch` knows what
the numbers say."""


class Turns(Protocol):
    """Whose step it is in an expert group."""

    lost: str
    """Why there is no group any more; empty: there is one."""

    def take(self, ask: list[int]) -> Asks:
        """Waits until this worker's step begins; returns what all have asked for.

        Raises:
            CollectiveError: the group is lost.
        """
        ...

    def done(self) -> None:
        """The step needs the turn no more: the next one may be queued."""
        ...

    def ended(self) -> None:
        """The step has ended on this worker's device. If it has more to do it asks soon."""
        ...

    def lose(self, why: str) -> None:
        """Gives the group up: nobody can tell any more which step the others run."""
        ...


class Stay:
    """Nobody else has tokens."""

    def add(self, without_tokens: Callable[[], None]) -> None:
        """See `Dispatch`."""

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor) -> Dispatched:
        """See `Dispatch`."""
        return Dispatched(x, weights, experts)

    def combine(self, out: Tensor) -> Tensor:
        """See `Dispatch`."""
        return out


STAY = Stay()


class GroupPlace(NamedTuple):
    """A worker's place in an expert group."""

    folder: Path
    """All workers of the group, and nobody else, are told of this one."""
    rank: int
    ranks: int


def place_of(text: str) -> GroupPlace:
    """Reads `FOLDER?rank=R&ranks=N`.

    Raises:
        ValueError: it is something else; the message says what.
    """
    folder, _, options = text.partition("?")
    given = dict(parse_qsl(options, keep_blank_values=True))
    if not folder or set(given) != {"rank", "ranks"} or not all(map(str.isdecimal, given.values())):
        raise ValueError(f"expert_group {text} must be FOLDER?rank=R&ranks=N")
    rank, ranks = int(given["rank"]), int(given["ranks"])
    if not 2 <= ranks <= MOST_RANKS:
        raise ValueError(f"expert_group: {ranks} ranks must be 2 to {MOST_RANKS}")
    if rank >= ranks:
        raise ValueError(f"expert_group: rank {rank} must be below ranks {ranks}: they begin at 0")
    path = Path(folder).expanduser()
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise ValueError(
            f"expert_group: {folder} has more than {_MOST_PATH_BYTES} bytes: sockets have no longer"
            " names"
        )
    return GroupPlace(path, rank, ranks)
