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
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Final

import torch
import zmq

from engine.config import EngineConfig
from engine.hosts.control import Control
from engine.hosts.folder import PrivateFolder
from engine.hosts.lifeline import STOPPED_S
from engine.hosts.meetings import RankMeetings
from engine.hosts.others import Heard, OtherHosts
from engine.hosts.processes import RankProcesses, Share, StoppedRanks
from engine.model.experts.counting import PairCount
from engine.ranks import process
from engine.ranks.copies import DIRECTIONS, LOAD, SAVE, CopyingRanks, MemoryInbox, SharedMover
from engine.ranks.executor import RankedExecutor
from engine.ranks.groups import RankGroup
from engine.ranks.keeper import Keeper, Pulse, RankError
from engine.ranks.stats import RankLoad, RankStats, Stage, watched
from engine.ranks.steps import Message, StepMessages
from engine.step.dispatch import STAY, Dispatch
from engine.step.executor import Executor
from engine.step.grid import Grid
from engine.step.plan import StepPlan
from engine.tiers.movers import PageMover

MEET_LOOK_MS: Final = 50
"""While it meets the other ranks, rank 0 looks this often whether they live."""


class HostRanks:
    """Ranks 1 to N - 1, processes of this host and of others. The ranks of this host divide the CPU
    threads that this process had."""

    def __init__(
        self, config: EngineConfig, beside: str = "", hosts: OtherHosts | None = None
    ) -> None:
        """Starts nothing yet.

        Args:
            config: no value of it depends on the device any more.
            beside: what a rank runs beside its steps, as MODULE:FUNCTION; see
                `engine.ranks.follower.Beside`. Empty: nothing.
            hosts: the agents of others; None: all ranks are here.
        """
        self.beside: list[zmq.Socket[bytes]] = []
        self.memories: list[list[int]] = []
        self._beside = beside
        self._share = Share.of(0, config.nodes, config.ranks)
        grid = Grid(config.pp, config.tp)
        own = self._group = RankGroup(config.device, 0, grid, 0)
        self._own_folder = PrivateFolder()
        self._folder = self._own_folder.path
        self.stats = RankStats(
            self._folder, grid.size, create=True, beside=grid.tp, here=self._share.count
        )
        """What each rank does with its time."""
        self.dispatch: Dispatch = STAY
        self.collective, self.stages = watched(own.collective, own.stages, self.stats, 0)
        self._config = config
        self._threads = torch.get_num_threads()
        self._closed = False
        self._control = Control(self._folder, hosts)
        self._processes: RankProcesses | None = None
        self._steps: list[zmq.Socket[bytes]] = []
        self._messages = StepMessages()
        self._copies: dict[str, list[zmq.Socket[bytes]]] = {name: [] for name in DIRECTIONS}
        self._copying: CopyingRanks | None = None
        self._inbox: MemoryInbox | None = None
        self._stopped = StoppedRanks()
        self._keeper: Keeper | None = None
        self._meetings: RankMeetings | None = None
        """torch may ask its store later, too."""
        self.unit = ""

    @property
    def pids(self) -> dict[int, int]:
        """Processes by rank."""
        return dict(self._processes.pids) if self._processes else {}

    @property
    def lost(self) -> str:
        """See `Ranks`."""
        return self._keeper.lost if self._keeper else ""

    def count(self, pairs: PairCount | None) -> None:
        """See `Ranks`."""
        if pairs is not None:
            pairs.tell = partial(self.stats.computed, 0)

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
        config, control = self._config, self._control
        text = process.config_text(config, self._beside)
        (self._folder / process.CONFIG).write_text(text, encoding="utf-8")
        control.open()
        reports = control.bound(zmq.PULL, process.REPORTS)
        for rank in range(1, config.ranks):
            self._steps.append(control.bound(zmq.PAIR, process.steps_of(rank)))
            if self._beside:
                self.beside.append(control.bound(zmq.PAIR, process.beside_of(rank)))
            if config.kv_host_bytes:
                for direction, sockets in self._copies.items():
                    sockets.append(control.bound(zmq.PAIR, process.copies_of(rank, direction)))
        if config.kv_stores and config.kv_host_bytes:
            self._inbox = MemoryInbox(self._folder, config.ranks)
        control.tell_ranks_here()
        threads = max(1, self._threads // self._share.count)
        torch.set_num_threads(threads)
        self._processes = RankProcesses(self._folder, self._share, threads, control.started_here)
        beat = self._beat if control.beat else None
        self._keeper = Keeper(self._processes, config.ranks, reports, beat)
        self._keeper.call_when_lost(self._let_go)
        own, pids = self.stats, self._all_pids
        self._keeper.watch(lambda: own.start_pulse(pids()), lambda: own.why_late(pids()))
        control.begin_elsewhere(text, Heard(own.take, own.take_stopped, self._keeper.lose))

    def _beat(self) -> None:
        """Over hosts: what is stopped here is lost as soon as what is stopped elsewhere."""
        if self._control.beat is not None:
            self._control.beat()
        if (stopped := self._stopped.look(self.pids, STOPPED_S)) is not None:
            self._kept.lose(f"rank {stopped} is stopped")

    def _let_go(self, reason: str) -> None:
        try:
            self._control.stop_elsewhere(reason)
        finally:
            self._group.let_go()

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
        self._meet(self._steps)
        _send(self._steps, [process.PAGES, json.dumps(least).encode()])
        return least

    def join(self) -> None:
        """See `Ranks`."""
        errors = list[Exception]()
        own = RankMeetings(self._folder, self._config.nodes, self._config.ranks)
        self._meetings = own

        def meet() -> None:
            try:
                self._group.join(own)
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
        """See `Ranks`. The folder of this host is not needed any more then; agents keep theirs."""
        self.stats.reach(0, Stage.READY)
        self._kept.wait_for(process.READY)
        self._meet([*self.beside, *chain.from_iterable(self._copies.values())])
        if self._inbox is not None:
            self.memories = self._inbox.receive()
        self.stats.has_started = True
        self._own_folder.remove()

    def _meet(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        """Waits until the connections of ranks stand."""
        for socket in sockets:
            while not socket.poll(MEET_LOOK_MS):
                self._kept.check()
            hello = socket.recv()
            assert hello == process.HELLO, "a rank says so first"

    def executor(self, own: Executor) -> Executor:
        """See `Ranks`."""
        return RankedExecutor(
            own,
            self._kept,
            self._send_step,
            self.stats.step_ended,
        )

    def _send_step(self, plan: StepPlan) -> None:
        here, each = len(self._share.processes), self._share.count
        firsts, further = self._steps[here::each], list(self._steps[here:])
        del further[::each]
        for told in self._messages.of(plan):
            _send(self._steps[:here], told.here)
            # An adapter's memory is sent from where it is, since it never changes.
            _send(firsts, told.first, copy=told.first[0] != process.ADAPTER)
            _send(further, told.further)

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
                self._let_go(reason)
            finally:
                on_lost(reason)

        self._kept.call_when_lost(lost)

    def close(self) -> None:
        """See `Ranks`."""
        if self._closed:
            return
        self._closed = True
        if self._keeper is not None:
            self._keeper.close(lambda: _send(self._steps, [process.STOP]))
            torch.set_num_threads(self._threads)
        self._control.stop_elsewhere(self.lost)
        self._group.close()
        if self._copying is not None:
            self._copying.close()
        if self._inbox is not None:
            self._inbox.close()
        if self._meetings is not None:
            self._meetings.close()
        self._control.close()
        self._own_folder.remove()

    @property
    def _kept(self) -> Keeper:
        assert self._keeper is not None, "they are started"
        return self._keeper


def _send(to: Sequence[zmq.Socket[bytes]], frames: Message, *, copy: bool = True) -> None:
    for socket in to:
        with suppress(zmq.Again):  # It is gone, and so will be the others.
            socket.send_multipart(frames, zmq.DONTWAIT, copy=copy)
