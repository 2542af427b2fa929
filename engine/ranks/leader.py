"""Rank 0's side: it starts the other ranks, agrees with them on a pool, and sends them steps.

States of the ranks:

1. STARTED: they load. `check` raises once one has failed.
2. LOADED: each has reported its weights and its pages: `agree`.
3. READY: all have joined the group: `join`. On GPUs they capture graphs together. Then steps are
   sent: `wait_until_ready`.
4. LOST: one has ended or failed, or does not go on. The others are killed, since they wait for it.
   Every step fails, and `call_when_lost` calls back.
5. ENDED: `close`.

Until they are READY the keeper watches that their start goes on, so no wait is without bound.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, Protocol

import torch
import zmq

from engine.config import EngineConfig
from engine.ranks import process
from engine.ranks.copies import DIRECTIONS, LOAD, SAVE, CopyingRanks, MemoryInbox, SharedMover
from engine.ranks.executor import RankedExecutor
from engine.ranks.groups import RankGroup
from engine.ranks.keeper import Keeper, Pulse, RankError
from engine.ranks.stats import RankLoad, RankStats, Stage, watched
from engine.ranks.steps import encode
from engine.step.collective import Alone, Collective
from engine.step.executor import Executor
from engine.step.grid import Grid
from engine.step.stages import OneStage, Stages
from engine.tiers.movers import PageMover

MEET_LOOK_MS: Final = 50
"""While it meets the other ranks, rank 0 looks this often whether they live."""


class Ranks(Protocol):
    """The other ranks of an engine."""

    collective: Collective
    """What the ranks of rank 0's stage do together."""
    stages: Stages
    """The stages beside rank 0's."""
    beside: list[zmq.Socket[bytes]]
    """Sockets to what runs beside the steps of ranks 1, 2, ..., for one thread to use. They end
    with the ranks."""
    memories: list[list[int]]
    """The memory files of the host slots of ranks 1, 2, ..., by group, if there are stores. They
    end with the ranks."""

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
        self.beside: list[zmq.Socket[bytes]] = []
        self.memories: list[list[int]] = []
        self.lost = ""
        self.skew_s: float | None = None

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

    def loads(self) -> Sequence[RankLoad]:
        """See `Ranks`."""
        return ()

    def skew_between(self, start_ns: int, end_ns: int) -> float:
        """See `Ranks`."""
        return 0.0

    def close(self) -> None:
        """See `Ranks`."""


class HostRanks:
    """Ranks 1 to N - 1, processes of this host. All ranks divide the CPU threads that this process
    had."""

    def __init__(self, config: EngineConfig, beside: str = "") -> None:
        """Starts nothing yet.

        Args:
            config: no value of it depends on the device any more.
            beside: what a rank runs beside its steps, as MODULE:FUNCTION; see
                `engine.ranks.follower.Beside`. Empty: nothing.
        """
        self.beside: list[zmq.Socket[bytes]] = []
        self.memories: list[list[int]] = []
        self._beside = beside
        grid = Grid(config.pp, config.tp)
        own = self._group = RankGroup(config.device, 0, grid)
        self._folder = Path(tempfile.mkdtemp(prefix="baton-ranks-"))
        self.stats = RankStats(self._folder, grid.size, create=True, beside=grid.tp)
        """What each rank does with its time."""
        self.collective, self.stages = watched(own.collective, own.stages, self.stats, 0)
        self._config = config
        self._threads = torch.get_num_threads()
        self._closed = False
        self._context = zmq.Context()
        self._steps: list[zmq.Socket[bytes]] = []
        self._copies: dict[str, list[zmq.Socket[bytes]]] = {name: [] for name in DIRECTIONS}
        self._copying: CopyingRanks | None = None
        self._inbox: MemoryInbox | None = None
        self._keeper: Keeper | None = None

    @property
    def pids(self) -> dict[int, int]:
        """Processes by rank."""
        return self._kept.pids

    @property
    def lost(self) -> str:
        """See `Ranks`."""
        return self._keeper.lost if self._keeper else ""

    def loads(self) -> Sequence[RankLoad]:
        """See `Ranks`."""
        return self.stats.loads()

    @property
    def skew_s(self) -> float | None:
        """See `Ranks`."""
        return self.stats.skew_s

    def skew_between(self, start_ns: int, end_ns: int) -> float:
        """See `Ranks`."""
        return self.stats.skew.between(start_ns, end_ns)

    def start(self) -> None:
        """See `Ranks`.

        Raises:
            RankError: there is no place for their sockets.
        """
        try:
            self._start()
        except (OSError, zmq.ZMQError) as error:
            raise RankError(f"no rank can be started: {error}") from error

    def _start(self) -> None:
        folder = self._folder
        process.write_config(self._config, self._beside, folder)
        for rank in range(1, self._config.ranks):
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            # It connects, and the rank binds: so a send never waits for a rank that is gone.
            socket.connect(process.address(folder, process.steps_of(rank)))
            self._steps.append(socket)
            if self._beside:
                self.beside.append(self._pair(process.beside_of(rank)))
            if self._config.kv_host_bytes:
                for direction, sockets in self._copies.items():
                    sockets.append(self._pair(process.copies_of(rank, direction)))
        if self._config.kv_stores and self._config.kv_host_bytes:
            self._inbox = MemoryInbox(folder, self._config.ranks)
        threads = max(1, self._threads // self._config.ranks)
        torch.set_num_threads(threads)
        self._keeper = Keeper(folder, self._config.ranks, threads)
        self._keeper.call_when_lost(lambda _: self._group.let_go())
        own, pids = self.stats, self._all_pids
        self._keeper.watch(lambda: own.start_pulse(pids()), lambda: own.why_late(pids()))

    def _pair(self, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PAIR)
        socket.bind(process.address(self._folder, name))
        return socket

    def check(self) -> None:
        """See `Ranks`."""
        if self._keeper is not None:
            self.stats.sign(0)
            self._keeper.check()

    def agree(self, revision: str, num_pages: int) -> int:
        """See `Ranks`."""
        self.stats.reach(0, Stage.LOADED)
        reports = self._kept.wait_for(process.LOADED)
        for rank, report in enumerate(reports, 1):
            if report["revision"] != revision:
                raise RankError(f"rank {rank} has read other weights than rank 0: did they change?")
        least = min(num_pages, *(int(report["num_pages"]) for report in reports))
        self._send([process.PAGES, json.dumps(least).encode()])
        return least

    def join(self) -> None:
        """See `Ranks`."""
        errors = list[Exception]()

        def meet() -> None:
            try:
                self._group.join(self._folder / process.STORE)
            except Exception as error:
                errors.append(error)

        self.stats.reach(0, Stage.JOINING)
        # On a thread of its own: the group would wait for a rank that is gone.
        meeting = threading.Thread(target=meet, name="baton-ranks-join", daemon=True)
        meeting.start()
        while meeting.is_alive():
            self._kept.check()
            meeting.join(MEET_LOOK_MS / 1e3)
        self._kept.check()  # A rank lost before could not be let go of: nothing was mapped yet.
        if errors:
            raise RankError(f"rank 0 cannot join the group: {errors[0]}")
        self.stats.reach(0, Stage.JOINED)

    def wait_until_ready(self) -> None:
        """See `Ranks`. The folder is not needed any more then."""
        self.stats.reach(0, Stage.READY)
        self._kept.wait_for(process.READY)
        for socket in (*self.beside, *chain.from_iterable(self._copies.values())):
            while not socket.poll(MEET_LOOK_MS):
                self._kept.check()
            hello = socket.recv()
            assert hello == process.HELLO, "a rank says so before it is READY"
        if self._inbox is not None:
            self.memories = self._inbox.receive()
        self.stats.has_started = True
        shutil.rmtree(self._folder, ignore_errors=True)

    def executor(self, own: Executor) -> Executor:
        """See `Ranks`."""
        return RankedExecutor(
            own,
            self._kept,
            lambda plan: self._send([process.STEP, *encode(plan)]),
            self.stats.step_ended,
        )

    def mover(self, own: PageMover, group: int) -> PageMover:
        """See `Ranks`."""
        if self._copying is None:
            self._copying = CopyingRanks(self._copies[SAVE], self._copies[LOAD], self._why_gone)
        return SharedMover(own, self._copying, group)

    def _why_gone(self) -> str:
        return self.lost or ("the ranks are closed" if self._closed else "")

    def watch(self, pulse: Callable[[], Pulse]) -> None:
        """See `Ranks`."""
        self._kept.watch(pulse, lambda: self.stats.why_stuck(self._all_pids()))

    def _all_pids(self) -> dict[int, int]:
        return {0: os.getpid(), **self.pids}

    def call_when_lost(self, on_lost: Callable[[str], None]) -> None:
        """See `Ranks`."""

        def lost(reason: str) -> None:
            try:
                self._group.let_go()
            finally:
                on_lost(reason)

        self._kept.call_when_lost(lost)

    def close(self) -> None:
        """See `Ranks`."""
        if self._closed:
            return
        self._closed = True
        if self._keeper is not None:
            self._keeper.close(lambda: self._send([process.STOP]))
            torch.set_num_threads(self._threads)
        self._group.close()
        if self._copying is not None:
            self._copying.close()
        if self._inbox is not None:
            self._inbox.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _kept(self) -> Keeper:
        assert self._keeper is not None, "they are started"
        return self._keeper

    def _send(self, frames: list[bytes | memoryview]) -> None:
        for socket in self._steps:
            socket.send_multipart(frames)
