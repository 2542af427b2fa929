"""Membership: the workers, and the pairs that may exchange KV pages.

Life of a member:

1. Announced. The router opens a stream to it.
2. Attached. It is introduced to every worker with which it may exchange pages.
3. Lost. Its peers are notified.

The stream is the lease. A further announcement changes nothing while the stream lives, and
announcements that fail to arrive end no link.

Invariant: at most one link per start of a worker, and no two attached links of one `worker_id`.
Two starts of one name may live at once, by mistake or while one drains beside its successor. Both
keep their streams. The later one is listed with its epoch behind its name.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc

from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from router.deaths.probe import process_is_gone
from router.deaths.witness import Deaths
from router.split_names import SplitNames
from router.workers.between import Between, can_fetch
from router.workers.holdings import WorkerPages
from router.workers.link import LinkOwner, LinkState, Loss, WorkerLink, name_of
from router.workers.live_adapters import LiveAdapters
from router.workers.model_folders import AnyFolder, ModelFolders
from router.workers.roles import keep_roles
from serving.net.internal_net import ClearNet, InternalNet, agent_name
from serving.net.refusals import Cause
from serving.release import version_mismatch

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from router.settings import RouterSettings

logger = logging.getLogger(__name__)

PREFILLS: Final = frozenset({worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_BOTH})
DECODES: Final = frozenset({worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_ROLE_BOTH})
ROLES: Final = PREFILLS | DECODES
STARTS_KEPT: Final = 256
"""Most starts of workers that are remembered after their end. The oldest go."""
UNIT_ENDS_S: Final = 10.0
"""When a worker is lost, the others of its failure unit end within four seconds or so. Who has not
ended after this time lives: the loss was one of a connection."""

Key = tuple[str, int]
"""One start of a worker: id and epoch."""


class RegistryOwner(LinkOwner, Protocol):
    """Receives the events of workers, also of those that still load."""

    def loading(self, worker: worker_pb2.WorkerIdentity) -> None:
        """A worker loads its model. Called again and again while it does."""
        ...


class Registry:
    """Owns the links. Passes the messages of attached ones on to `owner`.

    Args:
        settings: the router's.
        owner: receives events.
        net: how workers are reached; in clear by default.
        folders: finds the folders of models.
    """

    def __init__(
        self,
        settings: RouterSettings,
        owner: RegistryOwner,
        net: InternalNet | None = None,
        folders: ModelFolders | None = None,
        pages: WorkerPages | None = None,
    ) -> None:
        self._settings = settings
        self._owner = owner
        self.net = net or ClearNet()
        self._folders = folders or AnyFolder()
        self.pages = pages or WorkerPages()
        self.adapters = LiveAdapters(lambda: self.members, SplitNames(settings.split_names).names)
        self.deaths = Deaths(self._proven)
        self._links: dict[Key, WorkerLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stalled: dict[Key, int] = {}
        """Last counters of workers that were lost as frozen."""
        self._between = Between(lambda: self.members, self.deaths)
        self._closed = False
        self._refused: deque[Key] = deque(maxlen=STARTS_KEPT)
        """Workers of other releases whose refusal is logged."""

    @property
    def members(self) -> list[WorkerLink]:
        """Attached workers."""
        return [link for link in self._links.values() if link.state is LinkState.ATTACHED]

    def announce(self, worker: worker_pb2.WorkerIdentity, server_name: str = "") -> bool:
        """Takes an announcement; returns whether the worker is attached.

        Args:
            worker: who it is. Its caller was found to be entitled to that name.
            server_name: the name that its port must show.

        An unknown epoch is a new start and gets a stream of its own. Older starts keep their
        streams: a start that is gone is lost by the end of its own stream.
        """
        key = _key(worker)
        if self._closed:
            return False
        if key not in self._links:
            self._links[key] = link = WorkerLink(
                worker,
                self._settings.name,
                self,
                stale_after_s=self._settings.debug.stale_after_s,
                attach_timeout_s=self._settings.debug.attach_timeout_s,
                known_progress=self._stalled.get(key, -1),
                net=self.net,
                server_name=server_name,
                balances=self._settings.balance != "off",
            )
            self._spawn(link.run())
        return self._links[key].state is LinkState.ATTACHED

    def announce_loading(self, worker: worker_pb2.WorkerIdentity) -> None:
        """Takes the announcement of a worker that still loads its model."""
        self._owner.loading(worker)

    def refused(self, worker: worker_pb2.WorkerIdentity, why: str) -> None:
        """Logs a refused worker, once for each of its starts."""
        if _key(worker) not in self._refused:
            self._refused.append(_key(worker))
            logger.warning("worker refused", extra={"worker": worker.worker_id, "cause": why})

    async def close(self) -> None:
        """Ends every link and attaches no more workers. Workers go on announcing themselves."""
        self._closed = True
        for link in list(self._links.values()):
            link.end(Loss.CLOSED)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.pages.close()

    def attached(self, link: WorkerLink) -> None:
        """Introduces the worker, and reports it to the owner."""
        for key in [key for key in self._stalled if key[0] == link.identity.worker_id]:
            del self._stalled[key]
        self.deaths.attached(link.identity)
        link.identity.model.path = self._folders.find(link.identity.model)
        others = [member for member in self.members if member is not link]
        if any(other.worker_id == link.worker_id for other in others):
            link.worker_id += f"~{link.identity.epoch & 0xFFFFFFFF:08x}"
            logger.warning(
                "another worker of this name is attached: give each its own --name",
                extra=_describe(link),
            )
        logger.info("worker attached", extra=_describe(link))
        for other in others:
            if may_exchange(link, other):
                _introduce(link, other)
        self.pages.attached(link)
        self._owner.attached(link)
        self.adapters.attached(link)

    def loaded(self, link: WorkerLink) -> None:
        """Passes a load report on to the owner."""
        self.pages.loaded(link)
        self._owner.loaded(link)

    def role_changed(self, link: WorkerLink) -> None:
        """Reports that to the owner. Its peers know it: a flexible worker meets all of them."""
        details = {"to": name_of(link.next_role)} if link.next_role else {}
        logger.info("role changes" if details else "role changed", extra=_describe(link) | details)
        keep_roles(self.members)
        self._owner.role_changed(link)

    def adapters_changed(self, link: WorkerLink) -> None:
        """Tells the owner, and those that load and unload them."""
        self.adapters.changed(link)
        self._owner.adapters_changed(link)

    def received(self, link: WorkerLink, message: worker_pb2.WorkResponse) -> None:
        """Passes a message on: to another worker if it is for that one, to the index if it is about
        pages, else to the owner."""
        if (kind := message.WhichOneof("message")) in ("page_events", "page_snapshot"):
            self.pages.received(link, message)
        elif kind == "adapter_done":
            self.adapters.answered(link, message.adapter_done)
        elif not self._between.passed_on(link, message):
            self._owner.received(link, message)

    def lost(self, link: WorkerLink, loss: Loss, was: LinkState) -> None:
        """Forgets the link. If it was attached, reports that to the owner and the peers."""
        self._links.pop(_key(link.identity), None)
        if loss is Loss.FROZEN and link.progress >= 0:
            self._stalled.pop(_key(link.identity), None)
            self._stalled[_key(link.identity)] = link.progress
            if len(self._stalled) > STARTS_KEPT:
                del self._stalled[next(iter(self._stalled))]
        details = _describe(link) | {"cause": loss.value}
        if loss is Loss.UNTRUSTED:
            why = "its port shows no valid certificate of that name"
            self.net.refusals.refuse(Cause.CERTIFICATE, why, **_describe(link))
        if was is not LinkState.ATTACHED:
            logger.info("worker did not attach", extra=details)
            return
        if link.left_in_order(loss):
            logger.info("worker left", extra=details)
        else:
            logger.warning("worker lost", extra=details)
        idle = link.left_in_order(loss) and not link.estimate.open_reservations
        if unit := link.identity.failure_unit:
            for other in self.members:
                if other.identity.failure_unit == unit:
                    other.doubt(UNIT_ENDS_S)
        self.pages.lost(link)
        self._owner.lost(link, loss, was)
        if loss is not Loss.CLOSED and link.agent_name:
            self._spawn(self._part(link, loss, idle=idle))

    async def _part(self, link: WorkerLink, loss: Loss, *, idle: bool) -> None:
        proven_dead = await self._is_gone(link, loss)
        members = self.members
        if any(member.agent_name == link.agent_name for member in members):
            return  # the same start is attached again on a new stream
        part = worker_pb2.Part(agent_name=link.agent_name, proven_dead=proven_dead)
        for member in members:
            if may_exchange(link, member):
                member.send(worker_pb2.WorkRequest(part=part))
        if proven_dead:
            self.deaths.ended(link.identity)
        else:
            self.deaths.lost(link.identity, idle=idle)

    def _proven(self, agent_name: str) -> None:
        """Tells all workers of a start that is gone. Those that never knew it drop that."""
        part = worker_pb2.Part(agent_name=agent_name, proven_dead=True)
        for member in self.members:
            member.send(worker_pb2.WorkRequest(part=part))

    async def _is_gone(self, link: WorkerLink, loss: Loss) -> bool:
        """Whether the worker is proven to be gone. Of several ranks, the end of the one that this
        router speaks with proves nothing of the others, so their peers must see for themselves."""
        if link.identity.endpoint.ranks:
            return False
        return await process_is_gone(link.identity.address, loss, self.net.hello())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RegistryServicer(worker_pb2_grpc.RegistryServiceServicer):
    """`RegistryService`, mounted on the internal port."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def Announce(  # noqa: N802 - gRPC's name
        self,
        request: worker_pb2.AnnounceRequest,
        context: grpc.aio.ServicerContext[worker_pb2.AnnounceRequest, worker_pb2.AnnounceResponse],
    ) -> worker_pb2.AnnounceResponse:
        """Takes an announcement."""
        worker = request.worker
        if why := version_mismatch(f"worker {worker.worker_id}", worker):
            self._registry.refused(worker, why)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        server_name = await self._admit(worker, context)
        if worker.role and worker.role not in ROLES:
            why = f"its role {worker.role} is unknown"
            await self._refuse(
                worker, Cause.ROLE, why, grpc.StatusCode.FAILED_PRECONDITION, context
            )
        if request.loading and worker.worker_id and worker.model.name:
            self._registry.announce_loading(worker)
            return worker_pb2.AnnounceResponse(attached=False)
        if not (worker.worker_id and worker.address and worker.role and worker.model.name):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "worker_id, address, role and model are needed"
            )
        attached = self._registry.announce(worker, server_name)
        return worker_pb2.AnnounceResponse(attached=attached)

    async def Witness(  # noqa: N802 - gRPC's name
        self,
        request: worker_pb2.WitnessRequest,
        context: grpc.aio.ServicerContext[worker_pb2.WitnessRequest, worker_pb2.WitnessResponse],
    ) -> worker_pb2.WitnessResponse:
        """Takes the word of a process that has a certificate of the lost worker's name."""
        await self._admit(worker_pb2.WorkerIdentity(worker_id=request.worker_id), context)
        wanted = self._registry.deaths.witness(request.worker_id, request.host, request.ended)
        return worker_pb2.WitnessResponse(wanted=wanted)

    async def _admit(self, worker: worker_pb2.WorkerIdentity, context: Any) -> str:
        """Returns the name that the worker's port must show. Aborts the call of an impostor."""
        refusal, server_name = self._registry.net.admit(context, worker.worker_id)
        wanted = agent_name(*_key(worker))
        agents = [worker.endpoint.agent_name, *(rank.agent_name for rank in worker.endpoint.ranks)]
        if server_name and (other := [agent for agent in agents if agent.find(wanted) and agent]):
            refusal = f"its agent calls itself {other[0]}"
        if refusal:
            code = grpc.StatusCode.PERMISSION_DENIED
            await self._refuse(worker, Cause.NAME, refusal, code, context)
        return server_name

    async def _refuse(
        self,
        worker: worker_pb2.WorkerIdentity,
        cause: Cause,
        why: str,
        code: grpc.StatusCode,
        context: Any,
    ) -> None:
        details = {"worker": worker.worker_id, "peer": context.peer()}
        self._registry.net.refusals.refuse(cause, why, **details)
        await context.abort(code, f"worker {worker.worker_id} refused: {why}")


def can_hand_off(prefill: WorkerLink, decode: WorkerLink) -> bool:
    """Whether KV pages may go from the first to the second: roles, transports and model agree."""
    return prefill.prefills and decode.decodes and _share_pages(prefill, decode)


def _share_pages(one: WorkerLink, other: WorkerLink) -> bool:
    return (
        one is not other
        and bool(one.agent_name and other.agent_name)
        and one.fingerprint == other.fingerprint
    )


def may_exchange(one: WorkerLink, other: WorkerLink) -> bool:
    """Whether KV pages may go between the two, in either direction, now or in other roles."""
    could = (one.flexible or other.flexible) and _share_pages(one, other)
    return could or can_hand_off(one, other) or can_hand_off(other, one) or can_fetch(one, other)


def _introduce(one: WorkerLink, other: WorkerLink) -> None:
    one.send(worker_pb2.WorkRequest(meet=worker_pb2.Meet(worker=other.identity)))
    other.send(worker_pb2.WorkRequest(meet=worker_pb2.Meet(worker=one.identity)))


def _key(worker: worker_pb2.WorkerIdentity) -> Key:
    return worker.worker_id, worker.epoch


def _describe(link: WorkerLink) -> dict[str, str]:
    return {"worker": link.worker_id, "role": link.role, "address": link.identity.address}
