"""One Work stream to one worker: work channel, load report, lease and cancel path in one.

Life of a link:

1. CONNECTING: the stream is opened and attach sent.
2. ATTACHED: the worker answered with the identity and epoch that it had announced, and its step
   loop made progress. A worker that hung is not taken back just because its other threads answer.
3. LOST, once and for good: the stream ended, the progress counter stood still for too long, or the
   router let go of it. The owner is told at once, and nothing more is sent.

The stream is the lease: every attempt on it ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Final, Protocol

import grpc

from baton.grpc_options import direct_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from faults import failpoints
from router.workers.life import AskedRole, kind_of
from router.workers.life import LinkState as LinkState
from router.workers.life import Loss as Loss
from router.workers.load_estimate import Capacity, LoadEstimate
from router.workers.send_queue import SendQueue
from serving.net.internal_net import ClearNet, InternalNet, is_untrusted
from serving.release import stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Set

    from router.jobs import ServedModel

    Call = grpc.aio.StreamStreamCall[worker_pb2.WorkRequest, worker_pb2.WorkResponse]

logger = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES: Final = 4096
"""Most messages that wait to be written. A worker that leaves more unread is given up."""
WATCH_INTERVAL_S: Final = 0.1
"""Time between two looks at the progress counter, seconds."""
SLEPT_S: Final = 1.0
"""A look that comes this many seconds late means that this process, or its machine, was stopped."""
WOKEN_S: Final = 2.0
"""Breaks that happened during such a stop show within this many seconds after it."""
SLOW: Final = "slow"
"""Prefix of complaints about a path that works."""
_CLOSED_BY_KERNEL: Final = ("Socket closed", "Connection reset by peer")
"""gRPC's texts for a connection that the peer's kernel closed without a goodbye of the peer."""


class LinkOwner(Protocol):
    """Receives the events of a link. Called on the event loop; must not block or raise."""

    def attached(self, link: WorkerLink) -> None:
        """The worker answered."""

    def loaded(self, link: WorkerLink) -> None:
        """A load report came."""

    def received(self, link: WorkerLink, message: worker_pb2.WorkResponse) -> None:
        """Any other message came."""

    def role_changed(self, link: WorkerLink) -> None:
        """A report told of another role, or of the begin or the end of a change."""

    def adapters_changed(self, link: WorkerLink) -> None:
        """An attached worker has other adapters, or other names for them."""

    def lost(self, link: WorkerLink, loss: Loss, was: LinkState) -> None:
        """The link is over. Called once."""


class WorkerLink:
    """A worker in the router: its stream, its identity and its capacity."""

    def __init__(
        self,
        identity: worker_pb2.WorkerIdentity,
        router_id: str,
        owner: LinkOwner,
        *,
        stale_after_s: float,
        attach_timeout_s: float,
        known_progress: int = -1,
        net: InternalNet | None = None,
        server_name: str = "",
        balances: bool = False,
    ) -> None:
        """A link to a worker that announced itself.

        Args:
            identity: the identity that it announced.
            router_id: this router's name.
            owner: receives the events of the link.
            stale_after_s: longest time without progress.
            attach_timeout_s: longest time until it is attached.
            known_progress: the counter's last value, if an earlier link was lost as frozen.
            net: how to reach it; in clear by default.
            server_name: the name that its certificate must have.
            balances: this router changes roles by itself.
        """
        self.adapters: Mapping[str, bytes] = {}
        """Digests of its adapters by name."""
        self.adapter_bytes: Mapping[bytes, int] = {}
        """Their sizes, by digest."""
        self.takes_adapters = False
        self.identity = identity
        self.worker_id = identity.worker_id
        """Its stable name. The registry changes it if another worker of that name is attached."""
        self.asked = AskedRole()
        self.state = LinkState.CONNECTING
        self._clock = asyncio.get_running_loop().time
        self.estimate = LoadEstimate()
        self.capacity: Callable[[], Capacity] = self.estimate.capacity
        """The worker's capacity, by the router's estimate. A request asks some forty times."""
        self._owner = owner
        self._net = net or ClearNet()
        self._server_name = server_name
        self._stale_after_s = stale_after_s
        self._to_send = SendQueue()
        self._lost = asyncio.Event()
        self.progress = known_progress
        """The step loop's counter, as last reported."""
        self._answered = False
        self.complained_of: Set[str] = frozenset()
        """Agent names of the peers of which, or of whose path, the worker complains."""
        self.gave_up_on: Set[str] = frozenset()
        """Peers of which it complains for more than a slow path, so that a transfer would
        fail."""
        self._paths: dict[str, float] = {}
        """Measured gigabytes per second to or from peers, by agent name."""
        self.measured: Set[str] = frozenset()
        """Agent names of the peers to which the path was measured."""
        self._alive_until_s = self._clock() + attach_timeout_s
        self._look_due_s = math.inf
        self._woke_s = -math.inf
        self._doubted_until_s = 0.0
        self.was_slept_through = False
        """It was lost just after this router had been stopped. This says nothing about the worker,
        which may have hung up because the router did not answer."""
        attach = stamp(worker_pb2.Attach(router_id=router_id, balances=balances))
        self.send(worker_pb2.WorkRequest(attach=attach))

    def __repr__(self) -> str:
        return f"WorkerLink({self.worker_id}, {self.state.name})"

    @property
    def identity(self) -> worker_pb2.WorkerIdentity:
        """Who it is."""
        return self._identity

    @identity.setter
    def identity(self, identity: worker_pb2.WorkerIdentity) -> None:
        model = identity.model
        self._identity = identity
        self.model = model.name, model.revision
        """Name and revision of its model."""
        self.flexible = identity.flexible
        """Whether its role may change."""
        self.agent_name = identity.endpoint.agent_name
        """Name of its transfer agent; empty if it has none."""
        self.page_bytes = identity.endpoint.page_bytes
        """Bytes of a KV page; 0 without a transport."""
        pages = zip(identity.endpoint.groups[1:], identity.model.resume_pages, strict=False)
        self.resume_bytes = sum(group.page_bytes * count for group, count in pages)
        """Bytes that a resume point has beside the pages of group 0."""
        self.fingerprint = model.fingerprint
        """Workers with equal ones may exchange KV pages."""
        self.extensions = frozenset(model.extensions)
        """Hooks for which it takes bytes."""
        self.pools = model.HasField("pooling")
        """Whether it pools prompts."""
        self.only_pools = model.pooling.only_pools
        self._take_role(identity.role, worker_pb2.WORKER_ROLE_UNSPECIFIED)

    def _take_role(
        self,
        role: worker_pb2.WorkerRole.ValueType,
        next_role: worker_pb2.WorkerRole.ValueType,
    ) -> None:
        self._identity.role, self.next_role = role, next_role
        self.prefills = role in (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_BOTH)
        self.decodes = role in (worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_ROLE_BOTH)
        kind = (*self.model, role, self.fingerprint, bool(self.agent_name), self.extensions)
        adapters = frozenset(self.adapter_bytes)
        self._kind = kind_of((*kind, self.pools, adapters))

    @property
    def kind(self) -> int:
        """Workers with equal ones differ in nothing that a route depends on but their load and the
        size of their pools."""
        return -self._kind.number if self.draining else self._kind.number

    @property
    def role(self) -> str:
        """ "prefill", "decode" or "both"."""
        return name_of(self.identity.role)

    def avoids(self, other: WorkerLink) -> bool:
        """Whether the worker complains of the other, or of the path to it."""
        return other.agent_name in self.complained_of

    def path_bytes_per_s(self, other: WorkerLink) -> float:
        """Rate of the path between the two, as it was measured; 0 while unknown."""
        return 1e9 * self._paths.get(other.agent_name, 0.0)

    @property
    def draining(self) -> bool:
        """Whether the worker gets no new work, for good or for a while."""
        return self.estimate.draining or bool(self.next_role) or self.is_doubted

    def doubt(self, seconds: float) -> None:
        """Gives it no new work for so long: another worker of its failure unit was lost."""
        self._doubted_until_s = self._clock() + seconds

    @property
    def is_doubted(self) -> bool:
        """Whether it is likely to end: another one of its failure unit was lost just now."""
        # Each choice asks it of every worker: the clock is read for those alone that ever were.
        return bool(self._doubted_until_s) and self._clock() < self._doubted_until_s

    def left_in_order(self, loss: Loss) -> bool:
        """Whether the end was announced, or is this router's own. Then it needs no warning."""
        return loss is Loss.CLOSED or (loss is Loss.STREAM_ENDED and self.estimate.draining)

    def send(self, message: worker_pb2.WorkRequest) -> None:
        """Queues a message. Drops it if the worker is lost."""
        if self.state is LinkState.LOST:
            return
        self._to_send.put(message)
        if len(self._to_send) > MAX_QUEUED_MESSAGES:
            asyncio.get_running_loop().call_soon(self.end, Loss.CONGESTED)

    async def run(self) -> None:
        """Runs the stream until it is lost. Cancelling it closes the link."""
        async with self._net.open_aio(
            self.identity.address, self._server_name, direct_options()
        ) as channel:
            call: Call = worker_pb2_grpc.WorkerServiceStub(channel).Work()
            parts: Iterable[asyncio.Task[None]] = [
                asyncio.create_task(part)
                for part in (self._read(call), self._write(call), self._watch())
            ]
            try:
                await self._lost.wait()
            finally:
                self.end(Loss.CLOSED)
                call.cancel()
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)

    def end(self, loss: Loss) -> None:
        """Ends the link now, once; the owner hears of it before this returns."""
        if self.state is LinkState.LOST:
            return
        now_s = self._clock()
        self.was_slept_through = (
            now_s - self._look_due_s > SLEPT_S or now_s - self._woke_s < WOKEN_S
        )
        was, self.state = self.state, LinkState.LOST
        self._lost.set()
        self._owner.lost(self, loss, was)

    async def _read(self, call: Call) -> None:
        try:
            async for message in call:
                self._receive(message)
            self.end(Loss.STREAM_ENDED)
        except grpc.aio.AioRpcError as error:
            self.end(_loss_of(error.details() or ""))
        except Exception as error:
            logger.error("the handler of a message failed: %s", type(error).__qualname__)
            self.end(Loss.STREAM_ENDED)
            raise

    async def _write(self, call: Call) -> None:
        try:
            while True:
                message = await self._to_send.get()
                await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream is over; its reader learns why

    async def _watch(self) -> None:
        """Ends the link when the counter stands still for too long. It looks often, since the
        allowed time can also shrink, for example when a long step ends early. Time in which this
        router itself stood still does not count, since it read nothing then."""
        while (left_s := self._alive_until_s - self._clock()) > 0:
            wait_s = min(left_s, WATCH_INTERVAL_S)
            self._look_due_s = self._clock() + wait_s
            await asyncio.sleep(wait_s)
            late_s = self._clock() - self._look_due_s
            if late_s > SLEPT_S:
                self._alive_until_s += late_s
                self._woke_s = self._clock()
        self.end(Loss.FROZEN)

    def _receive(self, message: worker_pb2.WorkResponse) -> None:
        if self.state is LinkState.LOST:
            return
        if not self._answered:
            self._answer(message.attached.worker)
        elif (kind := message.WhichOneof("message")) == "load":
            self._report(message.load)
        elif kind == "adapters":
            self._take_adapters(message.adapters)
        elif self.state is LinkState.ATTACHED:
            failpoints.hit("router.received", kind)
            self._owner.received(self, message)

    def _answer(self, answered: worker_pb2.WorkerIdentity) -> None:
        expected = self.identity
        other_role = answered.role != expected.role and not (
            answered.flexible and answered.role in worker_pb2.WorkerRole.values()
        )
        if _start_of(answered) != _start_of(expected) or other_role:
            self.end(Loss.REFUSED)
            return
        self.identity = answered
        self._answered = True

    def _report(self, load: worker_pb2.Load) -> None:
        """Takes a load report. A counter that moves is a sign of life. A worker announces a long
        step before it begins."""
        now_s = self._clock()
        self.estimate.report(load)
        if not load.same_peers:
            self._read_peers(load.peers)
        has_changed = self._read_role(load)
        if load.progress != self.progress:
            self.progress = load.progress
            self._alive_until_s = now_s + self._stale_after_s + load.long_step_ms / 1e3
            if self.state is LinkState.CONNECTING:
                self.state = LinkState.ATTACHED
                self._owner.attached(self)
                has_changed = False
        if has_changed and self.state is LinkState.ATTACHED:
            self._owner.role_changed(self)
        if self.state is LinkState.ATTACHED:
            self._owner.loaded(self)

    def _read_role(self, load: worker_pb2.Load) -> bool:
        """Takes the role of a report; returns whether it is another one, or a change began or
        ended."""
        self.asked.reported(load.next_role or load.role)
        told, known = (load.role, load.next_role), worker_pb2.WorkerRole.values()
        has_changed = told != (self.identity.role, self.next_role)
        if not load.role or not has_changed or not all(role in known for role in told):
            return False  # Its role never changes, has not, or is one of a later release.
        self._take_role(*told)
        return True

    def _take_adapters(self, told: worker_pb2.Adapters) -> None:
        """Takes the adapters that requests may name. The first word of them comes before the link
        is attached."""
        self.takes_adapters = True
        self.adapters = {each.name: each.digest for each in told.adapters}
        self.adapter_bytes = {each.digest: each.num_bytes for each in told.adapters}
        self._take_role(self.identity.role, self.next_role)  # It makes the kind.
        if self.state is LinkState.ATTACHED:
            self._owner.adapters_changed(self)

    def serves(self, model: ServedModel) -> bool:
        """Whether it has this revision of a model, and the adapter."""
        if self.model != (model.name, model.revision):
            return False
        return not model.digest or model.digest in self.adapter_bytes

    def _read_peers(self, peers: Iterable[worker_pb2.PeerHealth]) -> None:
        paths, complaints = {}, {}
        for peer in peers:
            name = peer.agent_name
            if rate := peer.gigabytes_per_s:
                paths[name] = rate
            if cause := peer.cause:
                complaints[name] = cause
        self._paths, self.measured = paths, paths.keys()
        self.complained_of = complaints.keys()
        given_up = (name for name, cause in complaints.items() if not cause.startswith(SLOW))
        self.gave_up_on = frozenset(given_up)


def name_of(role: worker_pb2.WorkerRole.ValueType) -> str:
    """ "prefill", "decode" or "both"."""
    return worker_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()


def _start_of(worker: worker_pb2.WorkerIdentity) -> tuple[str, int, str]:
    """What names one start of a worker, to routers and to its peers."""
    return worker.worker_id, worker.epoch, worker.endpoint.agent_name


def _loss_of(details: str) -> Loss:
    """The cause of a broken stream, by gRPC's text."""
    if is_untrusted(details):
        return Loss.UNTRUSTED
    by_kernel = any(text in details for text in _CLOSED_BY_KERNEL)
    return Loss.SOCKET_CLOSED if by_kernel else Loss.STREAM_ENDED
