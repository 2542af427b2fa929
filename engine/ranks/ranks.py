"""The other ranks of an engine, as it sees them, and those of an engine that has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from engine.model.experts.counting import PairCount
from engine.ranks.keeper import Pulse
from engine.ranks.stats import RankLoad
from engine.step.collective import Alone, Collective
from engine.step.dispatch import STAY, Dispatch
from engine.step.executor import Executor
from engine.step.stages import OneStage, Stages
from engine.tiers.movers import PageMover


class Ranks(Protocol):
    """The other ranks of an engine."""

    collective: Collective
    """What the ranks of rank 0's stage do together."""
    stages: Stages
    """The stages beside rank 0's."""
    dispatch: Dispatch
    """How tokens come to experts."""
    beside: list[zmq.Socket[bytes]]
    """Sockets to what runs beside the steps of ranks 1, 2, ..., for one thread to use. They end
    with the ranks."""
    memories: list[list[int]]
    """The memory files of the host slots of ranks 1, 2, ..., by group, if there are stores. They
    end with the ranks."""

    unit: str
    """Engines of other processes with an equal one end together with this one, which knows it once
    they have met; empty: it ends alone."""

    @property
    def lost(self) -> str:
        """Which rank is lost, and why; empty: none is."""
        ...

    def start(self) -> None:
        """Starts them. It returns at once."""
        ...

    def check(self) -> None:
        """Reports that this rank's start goes on. Raises RankError if a rank is lost."""
        ...

    def agree(self, revision: str, num_pages: int) -> int:
        """Waits until all have loaded; returns the pages that fit on every rank.

        Raises:
            RankError: one failed, or has read other weights.
        """
        ...

    def join(self) -> None:
        """Meets them: from now on they can do things together.

        Raises:
            RankError: one failed.
        """
        ...

    def wait_until_ready(self) -> None:
        """Waits until all are ready for steps.

        Raises:
            RankError: one failed.
        """
        ...

    def executor(self, own: Executor) -> Executor:
        """Runs steps on all of them; `own` runs this rank's part."""
        ...

    def call_when_lost(self, on_lost: Callable[[str], None]) -> None:
        """Calls `on_lost` once, with the reason, when they are lost."""
        ...

    def mover(self, own: PageMover, group: int) -> PageMover:
        """Copies pages of a group on all of them; `own` copies this rank's part."""
        ...

    def watch(self, pulse: Callable[[], Pulse]) -> None:
        """Gives them up where steps do not end; see `Keeper.watch`."""
        ...

    def count(self, pairs: PairCount | None) -> None:
        """Tells in `loads` what rank 0's experts compute."""
        ...

    def loads(self) -> Sequence[RankLoad]:
        """What each rank does with its time; nothing where there is one rank."""
        ...

    @property
    def skew_s(self) -> float | None:
        """Sum over all steps of the time for which the fastest rank waited for the slowest. None:
        there is one rank, or nobody knows."""
        ...

    def skew_between(self, start_ns: int, end_ns: int) -> float:
        """Skew of the last steps alone; see `SkewHistory.between`."""
        ...

    def close(self) -> None:
        """Ends them. A second call does nothing."""
        ...


class NoRanks:
    """There are no others."""

    def __init__(self) -> None:
        self.collective: Collective = Alone()
        self.stages: Stages = OneStage()
        self.dispatch: Dispatch = STAY
        self.beside: list[zmq.Socket[bytes]] = []
        self.memories: list[list[int]] = []
        self.skew_s: float | None = None
        self.unit = ""

    @property
    def lost(self) -> str:
        """See `Ranks`."""
        return ""

    def start(self) -> None:
        """See `Ranks`."""

    def check(self) -> None:
        """See `Ranks`."""

    def agree(self, revision: str, num_pages: int) -> int:
        """See `Ranks`."""
        return num_pages

    def join(self) -> None:
        """See `Ranks`."""

    def wait_until_ready(self) -> None:
        """See `Ranks`."""

    def executor(self, own: Executor) -> Executor:
        """See `Ranks`."""
        return own

    def mover(self, own: PageMover, group: int) -> PageMover:
        """See `Ranks`."""
        return own

    def call_when_lost(self, on_lost: Callable[[str], None]) -> None:
        """See `Ranks`."""

    def watch(self, pulse: Callable[[], Pulse]) -> None:
        """See `Ranks`."""

    def count(self, pairs: PairCount | None) -> None:
        """See `Ranks`."""

    def loads(self) -> Sequence[RankLoad]:
        """See `Ranks`."""
        return ()

    def skew_between(self, start_ns: int, end_ns: int) -> float:
        """See `Ranks`."""
        return 0.0

    def close(self) -> None:
        """See `Ranks`."""
