"""What each rank does with its time, in memory that all ranks of a worker share.

The memory is a file in the private folder, with a row of float64 for each rank. A rank writes its
own row without a lock, and rank 0 reads them all. It costs a rank two looks at the clock for each
collective. Columns:

    STEPS     steps that it has begun
    BUSY_S    seconds in which it computed, all steps
    WAITED_S  seconds in which it was in a collective, all steps
    BEGAN_S   when it began its last step, by the clock that all processes of a host share
    STEP_S    seconds in which it has computed in that step
    IS_BUSY   1 while it computes, 0 while it is in a collective or has no step
    STAGE     how far its start has come, a `Stage`
    SIGNS     parts of its start that it has done: a tensor that is read, a graph that is captured
    PAIRS     pairs of a token and an expert that it has computed, where it holds some whole; on
              GPUs those of steps of one token are not counted

The time in collectives is that of the sum itself and that of waiting for the slowest rank. So the
wait for the slowest is taken from BEGAN_S + STEP_S, when a rank would have ended the step without
any wait: the largest less the smallest of all ranks. All have written theirs when the step's last
collective ends.

On GPUs the devices wait, and hosts see nothing of it: a rank writes STEPS alone. The devices count
their waits, and rank 0 reads them all and writes WAITED_S of each row. The wait for the slowest is
the largest less the smallest wait of a step: who waits least is the slowest. Where sums go by NCCL,
nobody counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from engine.eager.collective import Float64s, GroupCollective
from engine.hosts.processes import is_stopped
from engine.hosts.rows import COLUMNS, mapped
from engine.ranks.keeper import Pulse
from engine.ranks.skew import SkewHistory
from engine.step.collective import Alone, Collective
from engine.step.stages import Stages

STEPS, BUSY_S, WAITED_S, BEGAN_S, STEP_S, IS_BUSY, STAGE, SIGNS, PAIRS = range(9)
START_S: Final = 300.0
"""The start of the ranks may stand still for this long, seconds: while a large tensor is read from
a slow disk, or while kernels are compiled."""
STOPPED_S: Final = 10.0
"""A start may stand still for this long while a rank is stopped."""
T = TypeVar("T")


class Stage(IntEnum):
    """How far a rank's start has come."""

    LOADING = 0
    LOADED = 1
    JOINING = 2
    """From here on a rank waits for others."""
    JOINED = 3
    READY = 4


class RankLoad(NamedTuple):
    """A rank's part of the work, since it started."""

    rank: int
    steps: int
    busy_s: float | None
    """Seconds in which it computed; None: nobody knows."""
    waited_s: float | None
    """Seconds in which it was in a collective, or waited for another stage; on GPUs, in which its
    device waited for others in one. None: nobody knows."""
    stage: int = 0
    """0 has the first layers."""
    pairs: int | None = None
    """Pairs of a token and an expert that it has computed; None: it holds no expert whole."""


class RankStats:
    """The rows of all ranks."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        create: bool = False,
        beside: int | None = None,
        here: int | None = None,
    ) -> None:
        """Maps them. Rank 0 creates the file; the folder may go afterwards. `beside`: ranks of rank
        0's stage, the first ones; None: all. The others run other steps at the same time. `here`:
        ranks of this host, the first ones; None: all."""
        memory = mapped(folder, count, create=create)
        self.rows: Float64s = np.frombuffer(memory).reshape(count, COLUMNS)
        self.skew = SkewHistory()
        """The wait for the slowest rank. Rank 0 keeps it."""
        self.slowest = [0] * (beside or count)
        """Steps in which each rank of rank 0's stage was the slowest."""
        self.has_started = False
        """Rank 0: all are ready for steps."""
        self._one_clock = here is None or len(self.slowest) <= here
        self._stopped: dict[int, Collection[int]] = {}
        """What the agents of other hosts said last."""
        self._waited_s: Float64s | None = None
        """What `devices_waited` was told last."""

    @property
    def skew_s(self) -> float | None:
        """Rank 0: the wait for the slowest rank of its stage, all steps; None: no step has told
        it."""
        return self.skew.total_s if any(self.slowest) else None

    def step_ended(self) -> None:
        """Rank 0: a step has ended on all ranks."""
        own = self.rows[: len(self.slowest)]
        if not self._one_clock:
            return  # Each host has a clock of its own.
        ends_s = own[:, BEGAN_S] + own[:, STEP_S]
        if len(own) == 1 or not ends_s.any():
            return  # Their devices wait, and the hosts know no times.
        self._add(ends_s)

    def devices_waited(self, waited_s: Float64s) -> None:
        """Rank 0: a step has ended. By then each rank's device has waited so long since it started.

        The first step tells only how long they waited during the start.
        """
        before_s, self._waited_s = self._waited_s, waited_s
        if before_s is not None:
            step_s = waited_s - before_s
            self.rows[: len(step_s), WAITED_S] += step_s
            self._add(-step_s)

    def _add(self, ends_s: Float64s) -> None:
        """Another step. `ends_s`: when each rank would have ended it without any wait, by any clock
        that is the same for all."""
        self.skew.add(float(ends_s.max() - ends_s.min()))
        self.slowest[int(ends_s.argmax())] += 1

    def take(self, first: int, rows: bytes) -> None:
        """The rows of the ranks of another host, from that rank on."""
        their = np.frombuffer(rows).reshape(-1, COLUMNS)
        self.rows[first : first + len(their)] = their

    def take_stopped(self, first: int, ranks: Collection[int]) -> None:
        """The ranks of that host that are stopped."""
        self._stopped[first] = ranks

    def computed(self, rank: int, pairs: int) -> None:
        """A rank has computed so many pairs since it started."""
        self.rows[rank, PAIRS] = pairs

    def begin_step(self, rank: int) -> None:
        """A rank has begun a step of which its host knows no times."""
        self.rows[rank, STEPS] += 1

    def loads(self) -> list[RankLoad]:
        """Load of each rank."""
        beside = len(self.slowest)
        last = (len(self.rows) - 1) // beside
        return [
            RankLoad(
                rank,
                int(row[STEPS]),
                row[BUSY_S].item() or None,
                row[WAITED_S].item() or None,
                last - rank // beside,
                int(row[PAIRS]) or None,
            )
            for rank, row in enumerate(self.rows)
        ]

    def reach(self, rank: int, stage: Stage) -> None:
        """A rank's start has come so far."""
        self.rows[rank, STAGE] = stage

    def sign(self, rank: int) -> None:
        """A rank has done another part of its start."""
        self.rows[rank, SIGNS] += 1

    def start_pulse(self, pids: Mapping[int, int]) -> Pulse:
        """Moves while the start of any rank goes on.

        Args:
            pids: processes of all ranks.
        """
        allowed_s = STOPPED_S if self._all_stopped(pids) else START_S
        return Pulse(
            float(self.rows[:, [STAGE, SIGNS]].sum()),
            math.inf if self.has_started else allowed_s,
            "the start of the ranks has not gone on",
        )

    def why_late(self, pids: Mapping[int, int]) -> str:
        """Which ranks are the reason where the start does not go on. `pids`: see `start_pulse`."""
        stages = self.rows[:, STAGE]
        return self._why(pids, [rank for rank, one in enumerate(stages) if one < stages.max()])

    def why_stuck(self, pids: Mapping[int, int]) -> str:
        """Which ranks are the reason where a step does not end. `pids`: see `start_pulse`."""
        return self._why(pids, self.stuck())

    def stuck(self) -> list[int]:
        """Ranks that compute while others wait for them, or have not begun the step that others
        have begun. Where a step does not end, these are the reason. Stages before the one that does
        not go on may be some steps ahead."""
        steps = self.rows[:, STEPS]
        last = np.flatnonzero(steps == steps.min()).tolist()
        busy = [rank for rank in last if self.rows[rank, IS_BUSY]]
        return busy or (last if len(last) < len(steps) else [])

    def _why(self, pids: Mapping[int, int], behind: Sequence[int]) -> str:
        """Names the ranks that were stopped, or else those that are behind."""
        if stopped := self._all_stopped(pids):
            return f"{_named(stopped)} stopped"
        return f"{_named(behind)} not going on" if behind else "no rank is behind the others"

    def _all_stopped(self, pids: Mapping[int, int]) -> list[int]:
        here = [rank for rank, pid in pids.items() if is_stopped(pid)]
        return [*here, *(rank for ranks in list(self._stopped.values()) for rank in ranks)]


def _named(ranks: Sequence[int]) -> str:
    """The ranks as words, and the verb."""
    names = ", ".join(map(str, ranks))
    return f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"


def watched(
    group: GroupCollective | Alone, stages: Stages, stats: RankStats, rank: int
) -> tuple[Collective, Stages]:
    """What a rank does with others, with its row of stats."""
    if stages.waits_on_host if isinstance(group, Alone) else group.waits_on_host:
        clock = _Clock(stats.rows[rank])
        return TimedCollective(group, clock), TimedStages(stages, clock)
    if isinstance(group, Alone):
        return _Counted(partial(stats.begin_step, rank)), stages
    group.on_step = partial(stats.begin_step, rank)
    group.on_waits = stats.devices_waited
    return group, stages


class _Counted(Alone):
    """The only rank of its stage, whose device waits for other stages."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def begin_step(self) -> None:
        """See `Collective`."""
        self._on_step()


class _Clock:
    """The time of one rank."""

    def __init__(self, row: Float64s) -> None:
        self._row = row
        self._since_s = time.monotonic()

    def begin(self) -> None:
        """A step begins."""
        row = self._row
        row[BEGAN_S] = self._since_s = time.monotonic()
        row[STEP_S], row[IS_BUSY] = 0.0, 1.0
        row[STEPS] += 1

    def end(self) -> None:
        """It has ended."""
        self._row[IS_BUSY] = 0.0

    def waiting(self, do: Callable[[], T]) -> T:
        """Does what waits for others."""
        row, began_s = self._row, time.monotonic()
        row[BUSY_S] += began_s - self._since_s
        row[STEP_S] += began_s - self._since_s
        row[IS_BUSY] = 0.0
        try:
            return do()
        finally:
            self._since_s = time.monotonic()
            row[WAITED_S] += self._since_s - began_s
            row[IS_BUSY] = 1.0


class TimedStages:
    """Other stages, with the time of one rank."""

    def __init__(self, inner: Stages, clock: _Clock) -> None:
        self.is_first, self.is_last = inner.is_first, inner.is_last
        self.waits_on_host = inner.waits_on_host
        self._inner = inner
        self._clock = clock

    def receive(self, x: Tensor) -> Tensor:
        """See `Stages`."""
        return self._clock.waiting(lambda: self._inner.receive(x))

    def send(self, x: Tensor) -> None:
        """See `Stages`."""
        self._clock.waiting(lambda: self._inner.send(x))


class TimedCollective:
    """Another collective, with the time of one rank."""

    def __init__(self, inner: Collective, clock: _Clock) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner
        self._clock = clock

    def begin_step(self) -> None:
        """See `Collective`."""
        self._clock.begin()

    def end_step(self) -> None:
        """See `Collective`."""
        self._clock.end()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective`."""
        return self._clock.waiting(lambda: self._inner.all_reduce(x))

    def gather(self, x: Tensor, width: int) -> Tensor:
        """See `Collective`."""
        return self._clock.waiting(lambda: self._inner.gather(x, width))

    def broadcast(self, x: Tensor) -> None:
        """See `Collective`."""
        self._clock.waiting(lambda: self._inner.broadcast(x))

    def barrier(self) -> None:
        """See `Collective`."""
        self._clock.waiting(self._inner.barrier)
