"""The agent of a host that is not the leader: it keeps the ranks there, until the group ends.

It needs no torch. Its life:

1. JOINING: it says who it is, again and again until the leader is there, at most `FORM_S`.
2. KEEPING: it has its order, and its ranks run. It passes on their figures.
3. ENDING: a rank has ended, the leader says so, or nothing comes from the leader any more. Then no
   rank is of use. All are killed and reaped. When this process has ended, too, the guard says so to
   the routers (`worker.hosts.guard`): pages that these ranks could write are free from then on.

The exit code is 0 if the leader has ended in order, and else 1: a supervisor starts it again.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import grpc

from baton.grpc_options import direct_options
from baton.version import __version__
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from engine.hosts.folder import PrivateFolder
from engine.hosts.lifeline import SILENT_S, STOPPED_S
from engine.hosts.processes import RankProcesses, Share, StoppedRanks
from engine.hosts.rows import Rows
from engine.hosts.wires import Keys, write_ends
from engine.ranks.process import CONFIG
from serving.gpu_slots import NoSlotError, claimed_for
from serving.net.internal_net import (
    InternalNet,
    TlsNet,
    is_untrusted,
    server_name_of,
    workers_net,
)
from serving.net.tls import TlsError
from telemetry.logs import setup_logging
from telemetry.names import Service
from worker.hosts.digest import model_digest
from worker.hosts.guard import Guard
from worker.hosts.interfaces import keep_data_plane_on
from worker.hosts.place import FORM_S, Place
from worker.hosts.witness import looking
from worker.router_addresses import RouterAddresses
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

LOOK_MS: Final = 200
"""The agent looks at its ranks this often, and tells the leader of them: fifteen times in SILENT_S.
A rank that ends wakes it."""
AGAIN_S: Final = 1.0
"""Time between two tries to reach the leader, seconds. Not tuned."""


class GroupEndedError(Exception):
    """The group has ended; the message says why. Empty: in order."""


def main(settings: WorkerSettings, place: Place, guard: Guard) -> NoReturn:
    """Runs the agent of a host. It never returns: nothing is left to tidy up, and threads of gRPC's
    would keep a process whose ranks have ended."""
    code = _run(settings, place, guard)
    sys.stderr.flush()
    os._exit(code)


def _run(settings: WorkerSettings, place: Place, guard: Guard) -> int:
    name, debug = f"{settings.name}/{place.node}", settings.debug
    setup_logging(Service.BOTH, name, debug.log_level, settings.log_format)
    keep_data_plane_on(place.interface)
    try:
        net = workers_net(settings.tls, settings.name)
        claimed = claimed_for(
            settings.device, settings.gpu_slots_dir, settings.name, settings.ranks_here
        )
        with claimed, RouterAddresses(settings.routers) as routers:
            agent = Agent(settings, place, net, guard)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: agent.leave())
            with looking(settings.name, routers, net):
                return agent.run()
    except (NoSlotError, TlsError, OSError) as error:
        logger.error("the agent cannot start: %s", error)
        return 1


class Agent:
    """See the module. It belongs to the main thread."""

    def __init__(
        self, settings: WorkerSettings, place: Place, net: InternalNet, guard: Guard
    ) -> None:
        self._guard = guard
        self._settings = settings
        self._place = place
        self._net = net
        self._keys = Keys.new()
        self._share = Share.of(place.node, place.nodes, settings.ranks)
        self._own_folder = PrivateFolder()
        self._folder = self._own_folder.path
        self._rows = Rows(self._folder, self._share)
        self._ranks: RankProcesses | None = None
        self._digest = model_digest(settings.model)
        self._outbox: queue.SimpleQueue[worker_pb2.JoinRequest | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[worker_pb2.JoinResponse | grpc.RpcError] = (
            queue.SimpleQueue()
        )
        self._heard_s = time.monotonic()
        self._told_to_leave = 0
        self._stopped = StoppedRanks()

    def run(self) -> int:
        """Joins, and keeps the ranks until the group ends. Returns the exit code."""
        reason = ""
        try:
            self._join()
        except GroupEndedError as ended:
            reason = str(ended)
        finally:
            self._end_ranks(at_once=bool(reason))
            self._own_folder.remove()
        if not reason:
            return 0
        logger.error("the agent ends: %s", reason)
        return 1

    def _end_ranks(self, *, at_once: bool) -> None:
        if self._ranks is None:
            return
        if at_once:
            self._ranks.kill()
        self._ranks.end()

    def leave(self) -> None:
        """The operator ends this agent: at first in order, and at once if asked again."""
        self._told_to_leave += 1  # `_keep` looks: this may come at any point of it.

    def _join(self) -> None:
        """Never returns but by GroupEndedError."""
        ends_s = time.monotonic() + FORM_S
        while True:
            with self._channel() as channel:
                self._outbox, self._inbox = queue.SimpleQueue(), queue.SimpleQueue()
                self._outbox.put(worker_pb2.JoinRequest(member=self._member()))
                answers = worker_pb2_grpc.GroupServiceStub(channel).Join(self._said())
                reading = threading.Thread(target=self._read, args=(answers,), daemon=True)
                reading.start()
                try:
                    self._keep()
                except grpc.RpcError as error:
                    self._judge(error, ends_s)
                finally:
                    self._outbox.put(None)
            if self._told_to_leave:  # Nothing else may look: a refused connection ends at once.
                raise GroupEndedError("it was told to end")
            time.sleep(AGAIN_S)

    def _keep(self) -> None:
        """Until the stream breaks, which raises RpcError, or the group ends."""
        poll, ranks, has_said_so = select.poll(), dict[int, int](), False
        self._heard_s = time.monotonic()
        while True:
            ended = [ranks[descriptor] for descriptor, _ in poll.poll(LOOK_MS)]
            if ended and self._ranks is not None:
                self._lost(self._ranks.ending(ended[0]))
            now_s = time.monotonic()
            while not self._inbox.empty():
                if self._take(self._inbox.get()) and self._ranks is not None:
                    ranks = self._ranks.pidfds()
                    for descriptor in ranks:
                        poll.register(descriptor, select.POLLIN)
            if now_s - self._heard_s > SILENT_S and self._ranks is not None:
                raise GroupEndedError(f"the leader has said nothing for {SILENT_S:.0f} s")
            pids = self._ranks.pids if self._ranks is not None else {}
            if (stopped := self._stopped.look(pids, STOPPED_S)) is not None:
                self._lost(f"rank {stopped} is stopped")
            if self._told_to_leave > 1 or (self._told_to_leave and self._ranks is None):
                raise GroupEndedError("it was told to end")
            if self._told_to_leave and not has_said_so:
                has_said_so = True
                self._outbox.put(worker_pb2.JoinRequest(leaves=worker_pb2.AgentLeaves()))
            self._outbox.put(worker_pb2.JoinRequest(figures=self._figures()))

    def _take(self, message: worker_pb2.JoinResponse | grpc.RpcError) -> bool:
        """Takes what came from the leader. Returns whether it was the order."""
        if isinstance(message, grpc.RpcError):
            raise message
        self._heard_s = time.monotonic()
        match message.WhichOneof("message"):
            case "order":
                self._start(message.order)
                return True
            case "stop":
                raise GroupEndedError(message.stop.reason)
        return False

    def _start(self, order: worker_pb2.GroupOrder) -> None:
        config: dict[str, Any] = json.loads(order.config)
        config["model"] = self._settings.model
        (self._folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        where = self._keys, self._place.fabric, self._place.interface
        write_ends(self._folder, order.addresses, order.server_key, *where)
        threads = self._settings.threads or len(os.sched_getaffinity(0))
        each = max(1, threads // self._share.count)
        self._ranks = RankProcesses(self._folder, self._share, each, self._guard.keeps)
        self._ranks.start()
        logger.info("ranks started", extra={"ranks": len(self._ranks.pids)})

    def _lost(self, how: str) -> None:
        """A rank is lost: the leader hears how, unless it has just told the ranks to end."""
        self._outbox.put(worker_pb2.JoinRequest(ended=worker_pb2.RankEnded(how=how)))
        time.sleep(2 * LOOK_MS / 1e3)
        while not self._inbox.empty():
            self._take(self._inbox.get())
        raise GroupEndedError(how)

    def _figures(self) -> worker_pb2.RankFigures:
        if self._ranks is None:
            return worker_pb2.RankFigures()
        return worker_pb2.RankFigures(rows=self._rows.here(), stopped=self._stopped.ranks)

    def _member(self) -> worker_pb2.GroupMember:
        settings, place = self._settings, self._place
        return worker_pb2.GroupMember(
            worker_id=settings.name,
            node=place.node,
            nodes=place.nodes,
            tp=settings.tp,
            pp=settings.pp,
            release=__version__,
            model_digest=self._digest,
            public_key=self._keys.public,
        )

    def _channel(self) -> grpc.Channel:
        net, shown = self._net, ""
        if isinstance(net, TlsNet):
            shown = server_name_of(net.rotating.certificate.names, self._settings.name)
        return net.open(self._place.leader, shown, direct_options())

    def _said(self) -> Iterator[worker_pb2.JoinRequest]:
        outbox = self._outbox
        while (message := outbox.get()) is not None:
            yield message

    def _read(self, answers: Any) -> None:
        inbox = self._inbox
        try:
            for answer in answers:
                inbox.put(answer)
            inbox.put(grpc.RpcError())
        except grpc.RpcError as error:
            inbox.put(error)

    def _judge(self, error: grpc.RpcError, ends_s: float) -> None:
        """The stream is over: raises GroupEndedError unless it is to be opened again."""
        code, details = _status(error)
        if self._ranks is not None:
            raise GroupEndedError("the leader is gone") from error
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise GroupEndedError(f"the leader refuses it: {details}") from error
        if is_untrusted(details):
            raise GroupEndedError(
                f"the leader {self._place.leader} shows no valid certificate of its name"
            ) from error
        if time.monotonic() > ends_s:
            raise GroupEndedError(
                f"the leader {self._place.leader} is not reached: {details}"
            ) from error


def _status(error: Any) -> tuple[grpc.StatusCode | None, str]:
    """Status and details of an error of gRPC's; a stream that the leader ended has none."""
    if not isinstance(error, grpc.Call):
        return None, "it left"
    return error.code(), error.details() or ""
