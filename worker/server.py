"""A worker: engine, KV pool, transfer thread and both services.

Life: made around an engine that is built -> `start` -> it serves, and announces itself to routers
-> `drain` -> `stop`. `worker.process` takes it through that.

Three threads do the work. The event loop does gRPC and runs the services, the step loop runs the
engine, and the transfer thread moves KV pages. They talk through queues. The event loop is woken
once for each batch of events.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import grpc.aio
import torch
from grpc_health.v1 import health, health_pb2

from baton.addresses import advertised, reachable
from baton.grpc_options import server_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from decode_service.service import DecodeService
from engine.engine import Engine
from engine.groups.spec import State, Window
from engine.ranks.groups import device_of
from fetch_service.fetching import FetchService
from fetch_service.holding import HoldService
from fetch_service.outcomes import RANKS, TRANSPORT
from kv_transfer.events import TransferEvent
from kv_transfer.ranks.build import Others, group_transport
from kv_transfer.thread import TransferThread
from kv_transfer.transports.factory import FETCHED_BY
from kv_transfer.types import Endpoint, KvTransport, PageGroup
from prefill_service.pooling import PoolService
from prefill_service.service import PrefillService
from serving.admin import AdminServer
from serving.grpc_services import add_health_and_reflection
from serving.net.internal_net import ClearNet, InternalNet, agent_name
from serving.net.refusals import Callers
from serving.release import stamp
from telemetry.metrics.gpu import gpu_reader
from telemetry.metrics.loop_lag import EventLoopLag
from telemetry.metrics.worker import WorkerMetrics
from worker.announcer import ROLES, announce_forever
from worker.engine_config import prompt_limits
from worker.load import PrefillRoom, Report, load_message
from worker.peers import PeerPaths
from worker.quiesce import QuiesceRelay
from worker.router_addresses import RouterAddresses
from worker.settings import Role, WorkerSettings
from worker.stream import Services, WorkerServicer
from worker.watchdog import Watchdog, device_lost
from worker_base.adapters import AdapterService
from worker_base.legs import WorkerLeg
from worker_base.messages import endpoint_message, model_message
from worker_base.outbox import LoopInbox
from worker_base.page_layout import PageLayout
from worker_base.page_reports import PageReports
from worker_base.roles import CurrentRole

logger = logging.getLogger(__name__)

LAST_WORDS_S: Final = 1.0
"""Messages that are written get this long to reach the routers."""
PUSHES_END_S: Final = 5.0
"""Pushes in progress get this long at the end, because they cannot be taken back."""
SLOW_GPU_GIGABYTES_PER_S: Final = 1.0
"""This is far below NVLink and RDMA: the bytes go through host memory or a common network."""
IDLE_POLL_S: Final = 0.05
PROFILE_STEPS: Final = 50
"""Steps of a profile that SIGUSR2 asks for, if no setting gives the number."""
SERVICE_NAME: Final = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


class Worker:
    """A worker around an engine that is built and not started. Belongs to the running loop."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        routers: RouterAddresses,
        net: InternalNet | None = None,
    ) -> None:
        self.settings = settings
        self._net = net or ClearNet()
        self.engine = engine
        self.epoch = secrets.randbits(64) or 1
        self.identity = stamp(
            worker_pb2.WorkerIdentity(
                worker_id=settings.name,
                epoch=self.epoch,
                role=ROLES[settings.role],
                flexible=settings.flexible,
                failure_unit=engine.ranks.unit,
                model=model_message(engine.model),
            )
        )
        """Complete once started."""
        self.layout = _layout_of(engine)
        self.agent_name = agent_name(settings.name, self.epoch)
        self.inbox = LoopInbox(asyncio.get_running_loop())
        self.transfer = TransferThread(self._make_transport, self.epoch, self._on_transfer)
        self.metrics = WorkerMetrics(
            engine.load, lambda: self.transfer.counters, lambda: self.servicer.streams
        )
        self.metrics.watch_refusals(lambda: self._net.refusals.counts)
        self._watch_parts()
        self.services = self._make_services()
        self.services.peers.held_against = self.services.peers_to_avoid
        self.metrics.watch_overdue(self.services.overdue)
        self.role = self._make_role()
        self.servicer = WorkerServicer(
            self.identity,
            self.services,
            self.report,
            self._net,
            self.role,
            self._make_adapters(engine),
        )
        self.admin = AdminServer(
            settings.admin,
            self.metrics.registry,
            self._is_ready,
            operator_token=settings.operator_token,
        )
        self._server = grpc.aio.server(
            interceptors=[Callers(self._net.refusals)], options=server_options()
        )
        self._health: health.aio.HealthServicer
        self._lag = EventLoopLag(self.metrics.loop_lagged)
        self._routers = routers
        self._announcer: asyncio.Task[None] | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._page_reporter: asyncio.Task[None] | None = None
        self._watchdog = Watchdog(
            engine.load,
            lambda: self.transfer.turns,
            self._stop_serving,
            settings.debug.step_timeout_s,
        )
        self._watching: asyncio.Task[None] | None = None
        self._net_watch: asyncio.Task[None] | None = None

    def report(self) -> Report:
        """The load report of this moment, from one snapshot of the engine."""
        load = self.engine.load()
        room = PrefillRoom(
            queued=load.queued_prefill_tokens,
            ungranted=self.services.prefill.stats.ungranted_tokens,
            step=self.engine.max_step_tokens,
            page=self.engine.model.page_size_tokens,
        )
        message = load_message(
            load,
            room,
            draining=self.servicer.draining,
            peers=self.services.peers.health(),
            page_sequence=self.services.pages.sequence,
            fetch_latency_s=self.services.fetching.latency_s,
        )
        self.role.fill(message)
        message.balancer = self.servicer.balancer
        return Report(message, load.requests)

    async def start(self) -> None:
        """Starts all threads, binds, serves, and begins to announce.

        Raises:
            TransportError: the transport cannot be built.
            RuntimeError: the address cannot be bound.
            OSError: the admin address cannot be bound.
        """
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self._server)
        self._health = await add_health_and_reflection(self._server, (SERVICE_NAME,))
        bound = self._net.bind(self._server, self.settings.listen)
        advertise = self.settings.advertise
        self.identity.address = advertised(bound, advertise)
        endpoint = await asyncio.to_thread(self.transfer.start)
        self._adopt(endpoint)
        self.engine.start(self.metrics.stepped, device_lost)
        await self.admin.start()
        self.identity.admin_address = reachable(self.admin.address, advertise.rpartition(":")[0])
        self._lag.start()
        await self._server.start()
        self._reporter = asyncio.create_task(self.servicer.report_forever())
        self._page_reporter = asyncio.create_task(self.services.pages.report_forever())
        self._watching = asyncio.create_task(self._watchdog.watch())
        self._net_watch = asyncio.create_task(self._net.watch())
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        self._announcer = asyncio.create_task(
            announce_forever(self._routers, self.identity, self._net)
        )
        await asyncio.to_thread(self._write_address, bound)
        details = {"address": self.identity.address, "admin": self.admin.address}
        logger.info("worker serves", extra=details | {"transport": endpoint.transport})

    def profile(self) -> None:
        """Records the next steps that do any work."""
        steps = self.settings.debug.profile or PROFILE_STEPS
        self.engine.profile(steps, self.settings.debug.profile_dir)

    async def drain(self) -> None:
        """Refuses new work and returns when none is left."""
        self.metrics.draining()
        await self._stop_serving()
        while self.services.active:
            await asyncio.sleep(IDLE_POLL_S)

    async def stop(self) -> bool:
        """Ends everything.

        Returns:
            Whether nothing had to be cut short.
        """
        clean = self.services.active == 0
        await self._stop_serving()
        self.services.fail_all(worker_pb2.FAILURE_REASON_DRAINING)
        self.servicer.finish()
        await self._server.stop(LAST_WORDS_S)
        # The watchdog still runs: a step may hang. The ranks end with the engine, and their pushes
        # before.
        left_nothing = await asyncio.to_thread(self.transfer.stop, PUSHES_END_S)
        await asyncio.to_thread(self.engine.stop)
        for task in (self._reporter, self._page_reporter, self._watching, self._net_watch):
            if task is not None:
                task.cancel()
        self._lag.stop()
        await self.admin.stop()
        return clean and left_nothing

    def _make_adapters(self, engine: Engine) -> AdapterService:
        made = AdapterService(
            engine.adapters,
            self.settings.adapters_dir,
            lambda said: self.servicer.send_to_routers(said),
        )
        engine.adapters.on_gone = lambda: self.inbox.call_on_loop(made.report)
        return made

    def _watch_parts(self) -> None:
        """Exports the figures of what this engine has."""
        engine, settings = self.engine, self.settings
        self._watch_gpus()
        if engine.load().tiers is not None:
            self.metrics.watch_tiers(engine.load)
        if len(self.layout.groups) > 1:
            self.metrics.watch_groups(engine.load)
        if engine.load().hook_failures is not None:
            self.metrics.watch_hooks(engine.load)
        if engine.load().adapters is not None:
            self.metrics.watch_adapters(engine.load)
        if engine.load().speculation is not None:
            self.metrics.watch_drafts(engine.load)
        if settings.ranks > 1 or settings.expert_group:
            self.metrics.watch_ranks(engine.ranks)

    def _watch_gpus(self) -> None:
        device = self.engine.pool.device
        if device.type == "cuda":
            shared = self.settings.device.startswith("cuda:")
            ranks = range(1, 1 if shared else self.settings.ranks_here)
            gpus = [device, *(device_of(device.type, rank) for rank in ranks)]
            uuids = [torch.cuda.get_device_properties(gpu).uuid for gpu in gpus]
            self.metrics.watch_gpus([gpu_reader(f"GPU-{uuid}") for uuid in uuids])

    def _make_transport(self) -> KvTransport:
        engine = self.engine
        return group_transport(
            self.settings.debug.transport,
            self.agent_name,
            engine.pools,
            [group.units for group in self.layout.groups] + engine.pools.draft_units,
            Others(engine.ranks.beside, lambda: engine.lost),
            self.settings.pp,
        )

    def _make_role(self) -> CurrentRole:
        settings = self.settings
        limits = {ROLES[role]: prompt_limits(settings, role) for role in Role}
        return CurrentRole(
            self.identity,
            self.services,
            limits if settings.flexible else {},
            self.engine.limit_prompts,
            lambda: self.servicer.report(),
            settings.drain_s,
        )

    def _make_services(self) -> Services:
        peers = PeerPaths(
            self.identity, self.transfer, slow_gigabytes_per_s=self._slow_gigabytes_per_s
        )
        self.metrics.watch_peers(peers.paths)
        prefill = PrefillService(
            self.engine,
            self.transfer,
            self.inbox,
            self.metrics,
            layout=self.layout,
            path_to=peers.path_to,
            shares_drafts=peers.shares_drafts,
        )
        decode = DecodeService(
            self.engine,
            self.transfer,
            self.inbox.call_on_loop,
            self.metrics,
            epoch=self.epoch,
            agent_name=self.agent_name,
            layout=self.layout,
            drafts_cause=peers.drafts_cause if self.engine.pools.drafts else None,
            max_bytes_per_peer=int(self.settings.debug.max_granted_share * self.layout.pool_bytes),
        )
        relay = QuiesceRelay(
            self.transfer,
            self.agent_name,
            self.epoch,
            lambda said: self.servicer.send_to_routers(said),
        )
        pooling = PoolService(self.engine, self.inbox)

        def leg_of(attempt_id: bytes) -> WorkerLeg | None:
            found = (each.leg(attempt_id) for each in (prefill, decode, pooling))
            return next((leg for leg in found if leg is not None), None)

        fetching, holding = self._make_fetch_services(peers, leg_of)
        pages = PageReports(self.engine.report_pages)
        return Services(prefill, decode, pooling, peers, relay, fetching, holding, pages)

    def _make_fetch_services(
        self, peers: PeerPaths, leg_of: Callable[[bytes], WorkerLeg | None]
    ) -> tuple[FetchService, HoldService]:
        port, on_loop = self.engine.fetching, self.inbox.call_on_loop
        fetching = FetchService(
            port,
            self.transfer,
            on_loop,
            self.metrics,
            peers,
            epoch=self.epoch,
            agent_name=self.agent_name,
            layout=self.layout,
            leg_of=leg_of,
            why_not=self._why_no_fetch,
        )
        holding = HoldService(
            port,
            self.transfer,
            on_loop,
            self.metrics,
            peers,
            layout=self.layout,
            why_not=self._why_no_fetch,
        )
        return fetching, holding

    @property
    def _why_no_fetch(self) -> str:
        """Why this worker neither gets pages from others nor gives them; empty if it does."""
        if self.settings.ranks > 1:
            return RANKS
        return "" if self.settings.debug.transport in FETCHED_BY else TRANSPORT

    @property
    def _slow_gigabytes_per_s(self) -> float:
        floor = self.settings.debug.slow_peer_gigabytes_per_s
        return floor if floor >= 0 else SLOW_GPU_GIGABYTES_PER_S * self.engine.pool.data.is_cuda

    def _on_transfer(self, event: TransferEvent) -> None:
        """On the transfer thread."""
        self.inbox.call_on_loop(partial(self._dispatch, event))

    def _dispatch(self, event: TransferEvent) -> None:
        self.services.peers.on_transfer(event)
        self.services.prefill.on_transfer(event)
        self.services.decode.on_transfer(event)
        self.services.relay.on_transfer(event)
        self.services.fetching.on_transfer(event)
        self.services.holding.on_transfer(event)

    def _adopt(self, endpoint: Endpoint) -> None:
        """Announces the endpoint, even if it moves nothing: peers compare their transports."""
        self.identity.endpoint.CopyFrom(endpoint_message(endpoint))

    def _write_address(self, bound: str) -> None:
        """Writes the address file for processes on this host."""
        if self.settings.debug.address_file:
            address = reachable(bound, "127.0.0.1")
            Path(self.settings.debug.address_file).write_text(f"{address}\n", encoding="utf-8")

    def _is_ready(self) -> bool:
        return not self.servicer.draining

    async def _stop_serving(self) -> None:
        """Takes nothing new: health says NOT_SERVING, and the worker announces itself no more."""
        self.servicer.draining = True  # First: NOT_SERVING implies that work is refused.
        self._stop_announcing()
        self.servicer.report()
        await self._health.enter_graceful_shutdown()

    def _stop_announcing(self) -> None:
        if self._announcer is not None:
            self._announcer.cancel()


def _layout_of(engine: Engine) -> PageLayout:
    """The whole pages of a worker, of which a rank has a part."""
    groups = tuple(
        PageGroup(spec.page_bytes, pool.num_pages, spec.units)
        for spec, pool in zip(engine.pools.specs, engine.pools, strict=True)
    )
    kinds = [spec.kind for spec in engine.pools.specs]
    windows = tuple(kind.tokens if isinstance(kind, Window) else None for kind in kinds)
    states = frozenset(group for group, kind in enumerate(kinds) if isinstance(kind, State))
    return PageLayout(engine.model.page_size_tokens, groups, windows, states)
