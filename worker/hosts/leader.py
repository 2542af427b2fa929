"""The leader's side of a worker on several hosts: it waits for the agents, and is their lease.

Life of a group:

1. FORMING: the leader listens, and each other host's agent joins. Who does not belong is refused by
   name. If a host is missing after `FORM_S`, the leader ends.
2. ORDERED: rank 0 has looked at the model. Agents get the order, and start their ranks.
3. LOST: a rank or an agent has ended, or an agent says nothing for `SILENT_S`. All ranks of all
   hosts are ended, and so is this process.
4. STOPPED: rank 0 ends in order. Agents wait for their ranks to end.

An agent that the operator ends has the leader drain the worker first.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from baton.grpc_options import server_options
from baton.version import __version__
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from engine.hosts.lifeline import BEAT_S, SILENT_S
from engine.hosts.others import Heard, Order
from engine.hosts.wires import Keys
from serving.net.internal_net import InternalNet
from worker.hosts.guard import Guard
from worker.hosts.place import FORM_S, Place
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

FIRST_WORD_S: Final = 5.0
"""An agent says who it is as soon as its stream is open: one that is silent for so long holds a
thread in vain."""
LAST_REPORT_S: Final = 0.2
"""A rank that has ended may have said why to rank 0 itself, which is more than its agent knows."""
END_S: Final = 8.0
"""After a stop agents get this long to end their ranks and to leave, seconds: a little more than
ranks get."""


class GroupError(Exception):
    """The hosts of a worker do not come together; the message says which, and why."""


class _Agent:
    """One that has joined."""

    def __init__(self, member: worker_pb2.GroupMember) -> None:
        self.member = member
        self.name = f"node {member.node}"
        self.heard_s = time.monotonic()
        self.outbox: queue.SimpleQueue[worker_pb2.JoinResponse | None] = queue.SimpleQueue()
        """None ends the stream."""
        self.gone = threading.Event()


class Group:
    """All agents of a worker, as `OtherHosts`. Any thread may call it.

    Args:
        settings: the worker's.
        place: this host's, which is the leader's.
        net: by which agents join.
        digest: that of the model here.
        guard: bears witness of the ranks of this host.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        place: Place,
        net: InternalNet,
        digest: bytes,
        guard: Guard,
    ) -> None:
        self.nodes, self.address = place.nodes, place.address
        self.fabric, self.interface = place.fabric, place.interface
        self.keys = Keys.new()
        self._settings = settings
        self._net = net
        self._digest = digest
        self._guard = guard
        self._each = settings.ranks // place.nodes
        self._agents: dict[int, _Agent] = {}
        self._changed = threading.Condition()
        self._heard: Heard | None = None
        self._lost = ""
        self._stopped = False
        self._closing = threading.Event()
        self._server = grpc.server(
            ThreadPoolExecutor(2 * place.nodes + 2, "baton-group"), options=server_options()
        )
        worker_pb2_grpc.add_GroupServiceServicer_to_server(_Servicer(self), self._server)
        net.bind(self._server, place.listen)
        self._server.start()
        threading.Thread(target=self._beat, name="baton-group-beat", daemon=True).start()

    def called(self, context: Any) -> None:
        """A call came from somebody, so the certificate that was shown is valid."""
        self._net.refusals.called(context.peer())

    @property
    def known(self) -> list[str]:
        """See `OtherHosts`."""
        with self._changed:
            members = (agent.member.public_key for agent in self._agents.values())
            return [self.keys.public, *members]

    def form(self, within_s: float = FORM_S) -> None:
        """Waits until all hosts have joined.

        Raises:
            GroupError: some have not.
        """
        ends_s = time.monotonic() + within_s
        with self._changed:
            while missing := sorted(set(range(1, self.nodes)) - self._agents.keys()):
                if not self._changed.wait(max(0.0, ends_s - time.monotonic())):
                    names = ", ".join(map(str, missing))
                    raise GroupError(f"no agent of node {names} has joined in {within_s:.0f} s")
            logger.info("all hosts have joined", extra={"nodes": self.nodes})

    def keeps(self, pids: Collection[int]) -> None:
        """See `OtherHosts`."""
        self._guard.keeps(pids)

    def begin(self, order: Order, heard: Heard) -> None:
        """See `OtherHosts`."""
        message = worker_pb2.GroupOrder(
            config=order.config,
            addresses=order.addresses,
            server_key=order.server,
        )
        with self._changed:
            self._heard, lost = heard, self._lost
            if len(self._agents) < self.nodes - 1:
                lost = lost or "an agent has left before there were ranks"
            for agent in self._agents.values():
                agent.outbox.put(worker_pb2.JoinResponse(order=message))
        if lost:
            heard.lost(lost)

    def stop(self, reason: str) -> None:
        """See `OtherHosts`. In order, it waits until the agents have left."""
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            agents = list(self._agents.values())
        for agent in agents:
            stop = worker_pb2.StopRanks(reason=reason)
            agent.outbox.put(worker_pb2.JoinResponse(stop=stop))
        ends_s = time.monotonic() + (LAST_REPORT_S if reason else END_S)
        for agent in agents:
            agent.gone.wait(max(0.0, ends_s - time.monotonic()))

    def close(self) -> None:
        """Ends all streams. Agents whose ranks live end them."""
        self._closing.set()
        with self._changed:
            for agent in self._agents.values():
                agent.outbox.put(None)
        self._server.stop(LAST_REPORT_S).wait()

    # -- what agents say, each on a thread of its own ---------------------------------------------

    def refusal(self, context: Any) -> str:
        """Why nobody with this certificate is an agent; empty: one may be."""
        return self._net.admit(context, self._settings.name).refusal

    def joins(self, member: worker_pb2.GroupMember, context: Any) -> _Agent | str:
        """Takes an agent in; or says why not."""
        if refusal := self._mismatch(member):
            return refusal
        with self._changed:
            if member.node in self._agents:
                return f"node {member.node} has joined already: two hosts have one number"
            self._agents[member.node] = agent = _Agent(member)
            self._changed.notify_all()
        logger.info("host joined", extra={"node": member.node, "peer": context.peer()})
        return agent

    def hear(self, agent: _Agent, message: worker_pb2.JoinRequest) -> None:
        """Takes what an agent says."""
        agent.heard_s = time.monotonic()
        heard, first = self._heard, agent.member.node * self._each
        match message.WhichOneof("message"):
            case "figures" if heard is not None and message.figures.rows:
                heard.rows(first, message.figures.rows)
                heard.stopped(first, tuple(message.figures.stopped))
            case "ended":
                time.sleep(LAST_REPORT_S)
                self._lose(f"{message.ended.how} on {agent.name}")
            case "leaves":
                logger.info("told to end: the worker drains", extra={"host": agent.name})
                os.kill(os.getpid(), signal.SIGTERM)

    def left(self, agent: _Agent) -> None:
        """The stream of an agent has ended."""
        agent.gone.set()
        with self._changed:
            if self._heard is None and not self._stopped:
                del self._agents[agent.member.node]  # It may come again.
                return
        self._lose(f"the agent of {agent.name} is gone")

    def _mismatch(self, member: worker_pb2.GroupMember) -> str:
        own = self._settings
        pairs = (
            ("is the worker", member.worker_id, own.name),
            ("has the release", member.release, __version__),
            ("has nodes", member.nodes, self.nodes),
            ("has tp", member.tp, own.tp),
            ("has pp", member.pp, own.pp),
        )
        for what, theirs, ours in pairs:
            if theirs != ours:
                return f"node {member.node} {what} {theirs}, and the leader {ours}"
        if not 0 < member.node < self.nodes:
            return f"node {member.node} must be from 1 to {self.nodes - 1}"
        if member.model_digest != self._digest:
            return f"node {member.node} has another model than the leader, or another revision"
        return ""

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._stopped:
                return
            self._lost = self._lost or reason
            heard = self._heard
        if heard is not None:
            heard.lost(reason)

    def _beat(self) -> None:
        lives = worker_pb2.JoinResponse(lives=worker_pb2.LeaderLives())
        last_s = time.monotonic()
        while not self._closing.wait(BEAT_S):
            now_s = time.monotonic()
            slept_s, last_s = now_s - last_s - BEAT_S, now_s
            with self._changed:
                agents = list(self._agents.values())
            for agent in agents:
                agent.outbox.put(lives)
                if slept_s > BEAT_S:  # This process stood still itself.
                    agent.heard_s += slept_s
                if now_s - agent.heard_s > SILENT_S:
                    self._lose(f"the agent of {agent.name} has said nothing for {SILENT_S:.0f} s")


class _Servicer(worker_pb2_grpc.GroupServiceServicer):
    """`GroupService`: two threads for each agent."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def Join(  # noqa: N802 - gRPC's name
        self, request_iterator: Iterator[worker_pb2.JoinRequest], context: Any
    ) -> Iterator[worker_pb2.JoinResponse]:
        """Serves one agent."""
        self._group.called(context)
        agent: _Agent | str = self._group.refusal(context)
        if not agent:
            silent = threading.Timer(FIRST_WORD_S, context.cancel)
            silent.start()
            try:
                first = next(request_iterator, None)
            finally:
                silent.cancel()
            agent = self._group.joins(first.member, context) if first else "it has said nothing"
        if isinstance(agent, str):
            logger.warning("agent refused", extra={"cause": agent, "peer": context.peer()})
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, agent)
            return
        reading = threading.Thread(
            target=self._read, args=(agent, request_iterator), name="baton-agent", daemon=True
        )
        reading.start()
        context.add_callback(lambda: agent.outbox.put(None))
        try:
            while (message := agent.outbox.get()) is not None:
                yield message
        finally:
            self._group.left(agent)

    def _read(self, agent: _Agent, messages: Iterator[worker_pb2.JoinRequest]) -> None:
        try:
            for message in messages:
                self._group.hear(agent, message)
        except Exception:  # gRPC's, of a stream that broke: no page of it says which.
            logger.debug("the stream of an agent broke", exc_info=True)
        finally:
            agent.outbox.put(None)
