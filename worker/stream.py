"""The Work stream: it brings the routers' messages to the services, and their answers back.

Life of a stream:

1. Its router attaches and gets this worker's identity. The first load report follows.
2. ATTACHED: one task reads messages and hands them on, another writes the messages of the outbox.
   Several routers may be attached at once. A leg belongs to the stream that it came on.
3. ENDED, for any reason: the router left, the connection broke, the process stops, or the router
   left too much unread. Every leg of the stream ends before anything else happens.

Every worker has both services. Its role (`worker_base.roles`) only says what routers send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc

from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from faults import failpoints
from serving.net.internal_net import ClearNet, InternalNet
from serving.net.refusals import Cause
from serving.release import Protocol, protocol_of, version_mismatch
from worker.load import Report
from worker_base.messages import MalformedMessage, failed_message
from worker_base.outbox import Outbox
from worker_base.overdue import Overdue, overdue, peers_to_avoid

if TYPE_CHECKING:
    from decode_service.service import DecodeService
    from fetch_service.fetching import FetchService
    from fetch_service.holding import HoldService
    from prefill_service.pooling import PoolService
    from prefill_service.service import PrefillService
    from worker.peers import PeerPaths
    from worker.quiesce import QuiesceRelay
    from worker_base.adapters import AdapterService
    from worker_base.page_reports import PageReports
    from worker_base.roles import CurrentRole

    Context = grpc.aio.ServicerContext[worker_pb2.WorkRequest, worker_pb2.WorkResponse]

logger = logging.getLogger(__name__)

KEEPS_PEERS: Final = Protocol(1, 1)
"""Routers of this protocol on remember the peers of a report."""
KNOWS_NO_TOKEN: Final = Protocol(1, 2)
"""Routers of this protocol on know FAILURE_REASON_NO_TOKEN."""
REPORT_INTERVAL_S: Final = 0.1
"""Time between load reports. An expired leg is noticed this late at most."""
ATTACH_TIMEOUT_S: Final = 10.0
"""A new stream must attach within this time. Routers attach at once."""
MAX_ATTEMPTS: Final = 4096
"""Most legs under way at once, over all routers."""

_PREFILL: Final = worker_pb2.WORKER_ROLE_PREFILL
_DECODE: Final = worker_pb2.WORKER_ROLE_DECODE


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a worker that a router's messages reach."""

    prefill: PrefillService
    decode: DecodeService
    pooling: PoolService
    peers: PeerPaths
    relay: QuiesceRelay
    fetching: FetchService
    holding: HoldService
    pages: PageReports

    @property
    def active(self) -> int:
        """Legs under way, without those in quarantine."""
        return self.prefill.stats.active + self.decode.stats.active + self.pooling.active

    def lacking(self, role: worker_pb2.WorkerRole.ValueType) -> int:
        """Legs under way of which a worker of that role has none."""
        prompts = self.prefill.stats.active + self.pooling.active
        return (role == _DECODE) * prompts + (role == _PREFILL) * self.decode.stats.active

    def fail_lacking(
        self,
        role: worker_pb2.WorkerRole.ValueType,
        reason: worker_pb2.FailureReason.ValueType,
    ) -> None:
        """Fails these legs."""
        lacking = {_DECODE: (self.prefill, self.pooling), _PREFILL: (self.decode,)}
        for service in lacking.get(role, ()):
            service.fail_all(reason)

    def is_held(self, attempt_id: bytes) -> bool:
        """Whether the worker still has the attempt."""
        legs = self.prefill, self.decode, self.pooling
        return any(service.holds(attempt_id) for service in legs)

    def overdue(self) -> Overdue:
        """Counts the transfers that are overdue."""
        prefill, decode = self.prefill.stats, self.decode.stats
        quarantines = decode.quarantines() + self.fetching.quarantines()
        return overdue(quarantines, prefill.unended_sends() + self.holding.unended_sends())

    def peers_to_avoid(self) -> dict[str, str]:
        """Reasons by agent name, without those that lie in the path to a peer."""
        prefill, decode = self.prefill.stats, self.decode.stats
        quarantines = decode.quarantines() + self.fetching.quarantines()
        sends = prefill.unended_sends() + self.holding.unended_sends()
        return peers_to_avoid(quarantines, sends, decode.crowding_peers())

    def fail_all(self, reason: worker_pb2.FailureReason.ValueType) -> None:
        """Fails every leg."""
        for service in (self.prefill, self.decode, self.pooling):
            service.fail_all(reason)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """`WorkerService`. Belongs to the event loop."""

    def __init__(
        self,
        identity: worker_pb2.WorkerIdentity,
        services: Services,
        make_report: Callable[[], Report],
        net: InternalNet | None = None,
        role: CurrentRole | None = None,
        adapters: AdapterService | None = None,
    ) -> None:
        self.draining = False
        """Set by the owner: new work is refused."""
        self._identity = identity
        self._net = net or ClearNet()
        self._role = role
        self._adapters = adapters
        self._services = services
        self._make_report = make_report
        self._outboxes: set[Outbox] = set()
        self._balancing: dict[Outbox, str] = {}
        """Names of the routers that balance."""

    @property
    def streams(self) -> int:
        """Routers attached."""
        return len(self._outboxes)

    @property
    def balancer(self) -> str:
        """Name of the router that may change the role by itself; "" for none."""
        return min(self._balancing.values(), default="")

    async def Work(  # type: ignore[override]  # noqa: N802 - gRPC's name, in a form it takes
        self, request_iterator: AsyncIterator[worker_pb2.WorkRequest], context: Context
    ) -> None:
        """Serves one router for as long as it stays. Others learn nothing, not even who this is."""
        if why := self._net.not_a_router(context):
            self._net.refusals.refuse(Cause.NOT_A_ROUTER, why, peer=context.peer())
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        attach = await self._attach(request_iterator, context)
        router, overflowed = attach.router_id, asyncio.Event()
        protocol = protocol_of(attach) or Protocol(0, 0)
        outbox = Outbox(
            on_overflow=overflowed.set,
            keeps_peers=protocol >= KEEPS_PEERS,
            knows_no_token=protocol >= KNOWS_NO_TOKEN,
        )
        self._outboxes.add(outbox)
        if self._adapters is not None and (adapters := self._adapters.message()) is not None:
            outbox.send(adapters)
        if attach.balances:
            self._balancing[outbox] = router
        outbox.report(self._make_report().load, lambda _: True)
        tasks: list[asyncio.Task[object]] = [
            asyncio.create_task(self._read(request_iterator, outbox)),
            asyncio.create_task(_write(context, outbox)),
            asyncio.create_task(overflowed.wait()),
        ]
        logger.info("router attached", extra={"router": router})
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._end(outbox)
            if overflowed.is_set():
                logger.warning("router read too slowly and was given up", extra={"router": router})
            else:
                logger.info("router gone", extra={"router": router})
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def finish(self) -> None:
        """Ends every stream once its waiting messages are written."""
        for outbox in self._outboxes:
            outbox.finish()

    async def report_forever(self) -> None:
        """Sends load reports, expires legs and looks after peers. If one of these duties raises,
        the others still get their turn."""
        services = self._services
        expire = (each.expire for each in (services.prefill, services.decode, services.pooling))
        roles = () if self._role is None else (self._role.tick,)
        duties = (self.report, *expire, services.peers.tick, *roles)
        failing: set[Callable[[], None]] = set()
        while True:
            for duty in duties:
                try:
                    duty()
                    failing.discard(duty)
                except Exception:
                    if duty not in failing:
                        logger.exception("a duty failed")
                    failing.add(duty)
            await asyncio.sleep(REPORT_INTERVAL_S)

    def report(self) -> None:
        """Sends a load report to every router."""
        made, is_held = self._make_report(), self._services.is_held
        for outbox in self._outboxes:
            outbox.report(made.load, lambda one: one in made.requests or not is_held(one))

    def send_to_routers(self, message: worker_pb2.WorkResponse) -> None:
        """Sends every router a message that belongs to no leg."""
        for outbox in self._outboxes:
            outbox.send(message)

    async def _attach(
        self, requests: AsyncIterator[worker_pb2.WorkRequest], context: Context
    ) -> worker_pb2.Attach:
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no attach came")
        if first is None or not first.HasField("attach"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is attach")
        router = first.attach.router_id
        if why := version_mismatch(f"router {router}", first.attach):
            logger.warning("router refused", extra={"router": router, "cause": why})
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        attached = worker_pb2.Attached(worker=self._identity)
        await context.write(worker_pb2.WorkResponse(attached=attached))
        return first.attach

    async def _read(self, requests: AsyncIterator[worker_pb2.WorkRequest], outbox: Outbox) -> None:
        async for request in requests:
            try:
                self._receive(request, outbox)
            except Exception:
                logger.exception("a message broke its handler")
                raise

    def _receive(self, request: worker_pb2.WorkRequest, outbox: Outbox) -> None:
        services = self._services
        failpoints.hit("worker.received", request.WhichOneof("message"))
        match request.WhichOneof("message"):
            case "submit":
                self._submit(request.submit, outbox)
            case "grant":
                services.prefill.grant(request.grant, outbox)
            case "cancel":
                services.prefill.cancel(request.cancel.attempt_id, outbox)
                services.decode.cancel(request.cancel.attempt_id, outbox)
                services.pooling.cancel(request.cancel.attempt_id, outbox)
            case "abort":
                services.decode.abort(request.abort.attempt_id, outbox)
            case "meet":
                services.peers.meet(request.meet.worker, outbox)
            case "part":
                part = request.part
                services.peers.part(part.agent_name, part.proven_dead, outbox)
            case "quiesce":
                services.relay.asked(request.quiesce)
            case "quiesced":
                services.relay.answered(request.quiesced)
            case "fetch":
                services.holding.asked(request.fetch, outbox)
            case "fetch_refused":
                services.fetching.refused(request.fetch_refused)
            case "pages_wanted":
                services.pages.wanted(request.pages_wanted, outbox)
            case "load_adapter" if self._adapters is not None:
                self._adapters.load(request.load_adapter, outbox)
            case "unload_adapter" if self._adapters is not None:
                self._adapters.unload(request.unload_adapter, outbox)
            case "set_role" if self._role is not None:
                self._role.set(request.set_role.role)
            case _:
                logger.warning("a router sent a message that this version does not know")

    def _submit(self, submit: worker_pb2.Submit, outbox: Outbox) -> None:
        outbox.submitted(submit.attempt_id)
        reason = self._reason_to_refuse(submit)
        if reason is not None:
            outbox.send(failed_message(submit.attempt_id, reason))
            return
        services = self._services
        submit_to = {
            worker_pb2.WORK_MODE_PREFILL: services.prefill.submit,
            worker_pb2.WORK_MODE_POOL: services.pooling.submit,
        }
        try:
            submit_to.get(submit.mode, services.decode.submit)(submit, outbox)
        except MalformedMessage:
            logger.error("a router sent malformed work")
            reason = worker_pb2.FAILURE_REASON_INTERNAL
            outbox.send(failed_message(submit.attempt_id, reason))

    def _reason_to_refuse(
        self, submit: worker_pb2.Submit
    ) -> worker_pb2.FailureReason.ValueType | None:
        if self.draining:
            return worker_pb2.FAILURE_REASON_DRAINING
        if self._services.active >= MAX_ATTEMPTS:
            return worker_pb2.FAILURE_REASON_QUEUE_FULL
        has_peer = bool(submit.peer_agent_name)
        wants_peer = has_peer or submit.mode == worker_pb2.WORK_MODE_DECODE
        if wants_peer and not self._services.peers.is_usable(submit.peer_agent_name):
            return worker_pb2.FAILURE_REASON_BAD_PEER
        return None

    def _end(self, outbox: Outbox) -> None:
        outbox.close()
        self._outboxes.discard(outbox)
        self._balancing.pop(outbox, None)
        self._services.prefill.end_stream(outbox)
        self._services.decode.end_stream(outbox)
        self._services.pooling.end_stream(outbox)
        self._services.peers.end_stream(outbox)
        self._services.pages.end_stream(outbox)


async def _write(context: Context, outbox: Outbox) -> None:
    while (message := await outbox.get()) is not None:
        await context.write(message)
        failpoints.hit("worker.wrote", message.WhichOneof("message"))
