"""One Work stream to one worker: work channel, load report, lease and cancel path in one.

Life of a link:

1. CONNECTING: the stream is opened and attach sent.
2. ATTACHED: the worker answered with the identity and epoch that it had announced, and its step
   loop gave a sign of life: a worker that hung is not taken back merely because its other threads
   still answer.
3. LOST, once and for good: the stream ended, the progress counter stood still for too long, or the
   router let go of it. The owner is told at once, and nothing is sent any more.

The stream is the lease: whatever it carried ends with it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

import grpc

from baton.grpc_options import channel_options
from baton.process.release import stamp
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from router.workers.load_estimate import Capacity, LoadEstimate
from telemetry import failpoints

if TYPE_CHECKING:
    from collections.abc import Iterable

    Call = grpc.aio.StreamStreamCall[worker_pb2.WorkRequest, worker_pb2.WorkResponse]

logger = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES: Final = 4096
"""Messages waiting to be written; a worker that leaves more unread is given up."""
WATCH_INTERVAL_S: Final = 0.1
"""How late a frozen worker may be noticed."""
SLEPT_S: Final = 1.0
"""A look that comes this much too late means that this process, or its machine, was stopped."""
WOKEN_S: Final = 2.0
"""What broke meanwhile shows within this time."""
SLOW: Final = "slow"
"""Complaints of a path that works begin with this."""
_CLOSED_BY_KERNEL: Final = ("Socket closed", "Connection reset by peer")
"""How gRPC describes a connection that the peer's kernel closed without a goodbye of the peer."""


class LinkState(enum.IntEnum):
    """State of a link; failure is the smallest."""

    LOST = 0
    CONNECTING = 1
    ATTACHED = 2


class Loss(enum.Enum):
    """Why a link was lost."""

    SOCKET_CLOSED = "socket closed"
    """By the peer's kernel, without a goodbye: as when its process dies."""
    STREAM_ENDED = "stream ended"
    """In any other way: by the worker, or because the connection gave no sign of life."""
    FROZEN = "frozen"
    """The progress counter stood still."""
    REFUSED = "refused"
    """Who answered is not who announced itself."""
    CONGESTED = "congested"
    """The worker does not read its stream."""
    CLOSED = "closed"
    """This router closes."""


class LinkOwner(Protocol):
    """Hears of a link. Called on the event loop; must not block and must not raise."""

    def attached(self, link: WorkerLink) -> None:
        """The worker answered."""
        ...

    def loaded(self, link: WorkerLink) -> None:
        """A load report came."""
        ...

    def received(self, link: WorkerLink, message: worker_pb2.WorkResponse) -> None:
        """Anything else came."""
        ...

    def lost(self, link: WorkerLink, loss: Loss, was: LinkState) -> None:
        """The link is over; said once."""
        ...


class SendQueue:
    """Messages to be written, in order, but with Cancel and Abort first.

    Invariant: nothing of an attempt is behind its own Cancel or Abort: what these overtake is
    dropped, so that no worker is handed an attempt that has ended.
    """

    def __init__(self) -> None:
        self._urgent: deque[worker_pb2.WorkRequest] = deque()
        self._ordinary: deque[worker_pb2.WorkRequest] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ordinary)

    def put(self, message: worker_pb2.WorkRequest) -> None:
        """Queues a message."""
        match message.WhichOneof("message"):
            case "cancel":
                self._overtake(message.cancel.attempt_id)
                self._urgent.append(message)
            case "abort":
                self._overtake(message.abort.attempt_id)
                self._urgent.append(message)
            case _:
                self._ordinary.append(message)
        self._filled.set()

    async def get(self) -> worker_pb2.WorkRequest:
        """The next message, as soon as there is one."""
        while not len(self):
            self._filled.clear()
            await self._filled.wait()
        return (self._urgent or self._ordinary).popleft()

    def _overtake(self, attempt_id: bytes) -> None:
        kept = [message for message in self._ordinary if _attempt_of(message) != attempt_id]
        self._ordinary = deque(kept)


class WorkerLink:
    """A worker, as the router holds it: its stream, its identity, and the room it has."""

    def __init__(
        self,
        identity: worker_pb2.WorkerIdentity,
        router_id: str,
        owner: LinkOwner,
        *,
        stale_after_s: float,
        attach_timeout_s: float,
        known_progress: int = -1,
    ) -> None:
        """A link to a worker that announced itself.

        Args:
            identity: what it announced.
            router_id: this router's name.
            owner: hears of the link.
            stale_after_s: longest time without progress.
            attach_timeout_s: longest time until it is attached.
            known_progress: where its counter stood still, if it was lost for that.
        """
        self.identity = identity
        self.worker_id = identity.worker_id
        """Its stable name; set by the registry where another of that name is attached."""
        self.state = LinkState.CONNECTING
        self._clock = asyncio.get_running_loop().time
        self.estimate = LoadEstimate()
        self._owner = owner
        self._stale_after_s = stale_after_s
        self._outbox = SendQueue()
        self._lost = asyncio.Event()
        self.progress = known_progress
        """The step loop's counter, as last reported."""
        self._answered = False
        self._complaints: dict[str, str] = {}
        """Of peers, by agent name: a short word."""
        self._alive_until_s = self._clock() + attach_timeout_s
        self._look_due_s = math.inf
        self._woke_s = -math.inf
        self.was_slept_through = False
        """It was lost just as this router woke from standing still, which says nothing about the
        worker: it may have hung up because the router did not answer."""
        attach = stamp(worker_pb2.Attach(router_id=router_id))
        self.send(worker_pb2.WorkRequest(attach=attach))

    def __repr__(self) -> str:
        return f"WorkerLink({self.worker_id}, {self.state.name})"

    @property
    def role(self) -> str:
        """ "prefill", "decode" or "both"."""
        role = worker_pb2.WorkerRole.Name(self.identity.role)
        return role.removeprefix("WORKER_ROLE_").lower()

    @property
    def agent_name(self) -> str:
        """Name of its transfer agent; empty where it has none."""
        return self.identity.endpoint.agent_name

    def avoids(self, other: WorkerLink) -> bool:
        """Whether the worker complains of the other, or of the path to it."""
        return other.agent_name in self._complaints

    def gave_up(self, other: WorkerLink) -> bool:
        """Whether the complaint is of more than a slow path: what is sent there would fail."""
        return not self._complaints.get(other.agent_name, SLOW).startswith(SLOW)

    @property
    def draining(self) -> bool:
        """The worker takes no new work."""
        return self.estimate.load.draining

    def left_in_order(self, loss: Loss) -> bool:
        """Whether such an end was to be expected, or is this router's own: nobody need look."""
        return loss is Loss.CLOSED or (loss is Loss.STREAM_ENDED and self.draining)

    def capacity(self) -> Capacity:
        """What the worker has, by the router's estimate."""
        return self.estimate.capacity()

    def send(self, message: worker_pb2.WorkRequest) -> None:
        """Queues a message; to a lost worker, drops it."""
        if self.state is LinkState.LOST:
            return
        self._outbox.put(message)
        if len(self._outbox) > MAX_QUEUED_MESSAGES:
            asyncio.get_running_loop().call_soon(self.end, Loss.CONGESTED)

    async def run(self) -> None:
        """Runs the stream until it is lost. Cancelling it closes the link."""
        options = channel_options()
        async with grpc.aio.insecure_channel(self.identity.address, options=options) as channel:
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
            by_kernel = any(text in (error.details() or "") for text in _CLOSED_BY_KERNEL)
            self.end(Loss.SOCKET_CLOSED if by_kernel else Loss.STREAM_ENDED)
        except Exception as error:
            logger.error("a message broke its handler: %s", type(error).__qualname__)
            self.end(Loss.STREAM_ENDED)
            raise

    async def _write(self, call: Call) -> None:
        try:
            while True:
                message = await self._outbox.get()
                await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream is over; its reader learns why

    async def _watch(self) -> None:
        """Looks often, since the time granted can also shrink, as when a long step ends early. Time
        in which this router itself stood still does not count: it read nothing meanwhile."""
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
        elif message.WhichOneof("message") == "load":
            self._report(message.load)
        elif self.state is LinkState.ATTACHED:
            failpoints.hit("router.received", message.WhichOneof("message"))
            self._owner.received(self, message)

    def _answer(self, answered: worker_pb2.WorkerIdentity) -> None:
        expected = self.identity
        if (answered.worker_id, answered.epoch) != (expected.worker_id, expected.epoch):
            self.end(Loss.REFUSED)
            return
        self.identity = answered
        self._answered = True

    def _report(self, load: worker_pb2.Load) -> None:
        """A counter that moves is a sign of life; a long step is announced before it begins."""
        now_s = self._clock()
        self.estimate.report(load)
        self._complaints = {peer.agent_name: peer.cause for peer in load.peers if peer.cause}
        if load.progress != self.progress:
            self.progress = load.progress
            self._alive_until_s = now_s + self._stale_after_s + load.long_step_ms / 1e3
            if self.state is LinkState.CONNECTING:
                self.state = LinkState.ATTACHED
                self._owner.attached(self)
        if self.state is LinkState.ATTACHED:
            self._owner.loaded(self)


def _attempt_of(message: worker_pb2.WorkRequest) -> bytes:
    match message.WhichOneof("message"):
        case "submit":
            return message.submit.attempt_id
        case "grant":
            return message.grant.attempt_id
        case _:
            return b""
