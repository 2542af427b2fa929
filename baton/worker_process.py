"""One worker process: engine, KV pool, transfer thread and the services, mounted once.

Life of the process:

1. Loading: the model is read and the pool allocated. Routers are told so, nothing answers yet; a
   signal ends it at once.
2. Serving: the Work stream, health and metrics answer, and routers are told of the worker for ever.
3. SIGTERM or SIGINT. Draining: health says NOT_SERVING, routers are told of it no more, new
   attempts are refused, those under way and their transfers get `drain_s` seconds. A second signal
   ends the wait.
4. Stopping: what is left fails with DRAINING; streams, engine and transfer thread end.

Three threads do the work: the event loop all that is gRPC, the step loop the engine, and the
transfer thread the KV pages. They talk through queues, and the loop is woken once a batch.

The exit code is 0 where nothing had to be cut short. A step that hangs or a device that is lost
ends the process at any time (`baton.worker_watchdog`), with an exit code of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Final

import grpc.aio
import torch
from grpc_health.v1 import health, health_pb2

from baton.addresses import advertised, reachable
from baton.event_loop import EndSignals, loop_factory
from baton.gpu_slots import NoSlotError, claimed_for
from baton.grpc_options import server_options
from baton.grpc_services import add_health_and_reflection
from baton.settings import Role, WorkerSettings
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from baton.worker_announcer import announce_forever, announced_as_loading
from baton.worker_load import PrefillRoom, load_message
from baton.worker_loading import loading_progress, terminal
from baton.worker_outbox import LoopInbox
from baton.worker_peers import Peers
from baton.worker_quiesce import QuiesceRelay
from baton.worker_stream import Services, WorkerServicer
from baton.worker_watchdog import Watchdog, device_lost
from baton.worker_wire import endpoint_message, model_message
from decode_service.service import DecodeService
from engine.config import EngineConfig
from engine.engine import Engine, EngineError
from engine.model import ModelError
from kv_transfer.events import TransferEvent
from kv_transfer.factory import make_transport
from kv_transfer.thread import TransferThread
from kv_transfer.types import Endpoint, KvTransport, TransportError
from prefill_service.service import PrefillService
from telemetry import failpoints
from telemetry.admin import AdminServer
from telemetry.gpu import gpu_reader
from telemetry.logs import log_loop_errors, setup_logging
from telemetry.loop_lag import EventLoopLag
from telemetry.metrics import WorkerMetrics
from telemetry.names import Service
from telemetry.tracing import Tracing, setup_tracing

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 1e-4
"""Cuts the event loop's wake-up from 5 ms to 0.3 ms beside a busy step loop."""
LAST_WORDS_S: Final = 1.0
"""Time for what is already written to reach the routers."""
PUSHES_END_S: Final = 5.0
"""Pushes in progress at the end get this long: they cannot be taken back."""
SLOW_GPU_GIGABYTES_PER_S: Final = 1.0
"""Far below NVLink and RDMA: the bytes go through host memory, or over a common network."""
IDLE_POLL_S: Final = 0.05
PROFILE_STEPS: Final = 50
"""Of a profile that SIGUSR2 asks for, where no setting says how many."""
DECODE_MIXED_PREFILL_TOKENS: Final = 192
"""A decode worker computes so many prompt tokens in a step that decodes: nearly free there."""
FULL_STEP_TOKENS: Final = 1024
"""Where prompts are computed for others: an H200 computes 44,900 tokens a second in steps of so
many, 45,500 in longer ones, and the first of two prompts is done in half the time."""
SERVICE_NAME: Final = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

_ROLES: Final = {
    Role.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: worker_pb2.WORKER_ROLE_DECODE,
    Role.BOTH: worker_pb2.WORKER_ROLE_BOTH,
}
_SERVICES: Final = {
    Role.PREFILL: Service.PREFILL,
    Role.DECODE: Service.DECODE,
    Role.BOTH: Service.BOTH,
}


class Worker:
    """A worker around an engine that is built and not started. Belongs to the running loop."""

    def __init__(self, settings: WorkerSettings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.epoch = secrets.randbits(64) or 1
        self.identity = worker_pb2.WorkerIdentity(
            worker_id=settings.name,
            epoch=self.epoch,
            role=_ROLES[settings.role],
            model=model_message(engine.model),
        )
        """Complete once started."""
        self.agent_name = f"{settings.name}-{self.epoch:016x}"
        self.inbox = LoopInbox(asyncio.get_running_loop())
        self.transfer = TransferThread(self._make_transport, self.epoch, self._on_transfer)
        self.metrics = WorkerMetrics(
            engine.load, lambda: self.transfer.counters, lambda: self.servicer.streams
        )
        self._watch_gpu()
        self.services = self._make_services()
        self.services.peers.held_against = self.services.peers_to_avoid
        self.metrics.watch_overdue(self.services.overdue)
        self.servicer = WorkerServicer(self.identity, self.services, self.load)
        self.admin = AdminServer(settings.admin, self.metrics.registry, self._is_ready)
        self._server = grpc.aio.server(options=server_options())
        self._health: health.aio.HealthServicer
        self._lag = EventLoopLag(self.metrics.loop_lagged)
        self._announcers: list[asyncio.Task[None]] = []
        self._reporter: asyncio.Task[None] | None = None
        self._watchdog = Watchdog(
            engine.load, lambda: self.transfer.turns, self._stop_serving, settings.step_timeout_s
        )
        self._watching: asyncio.Task[None] | None = None

    def load(self) -> worker_pb2.Load:
        """How the worker stands now."""
        load = self.engine.load()
        prefill, decode = self.services.prefill, self.services.decode
        room = PrefillRoom(
            queued=prefill.queued_tokens + decode.queued_tokens,
            ungranted=prefill.ungranted_tokens,
            step=self.engine.max_step_tokens,
            page=self.engine.model.page_size_tokens,
        )
        draining, peers = self.servicer.draining, self.services.peers.health()
        return load_message(load, room, draining=draining, peers=peers)

    async def start(self) -> None:
        """Starts all threads, binds, serves, and begins to announce.

        Raises:
            TransportError: the transport cannot be built.
            RuntimeError: the address cannot be bound.
            OSError: the admin address cannot be bound.
        """
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self._server)
        self._health = await add_health_and_reflection(self._server, (SERVICE_NAME,))
        bound = self._bind()
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
        self._watching = asyncio.create_task(self._watchdog.watch())
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        self._announcers = [
            asyncio.create_task(announce_forever(router, self.identity))
            for router in self.settings.routers
        ]
        await asyncio.to_thread(self._write_address, bound)
        details = {"address": self.identity.address, "admin": self.admin.address}
        logger.info("worker serves", extra=details | {"transport": endpoint.transport})

    def profile(self) -> None:
        """Records the next steps that do any work."""
        steps = self.settings.profile or PROFILE_STEPS
        self.engine.profile(steps, self.settings.profile_dir)

    async def drain(self) -> None:
        """Refuses new work and returns when none is left."""
        self.metrics.draining()
        await self._stop_serving()
        while self.services.active:
            await asyncio.sleep(IDLE_POLL_S)

    async def stop(self) -> bool:
        """Ends everything; returns whether nothing had to be cut short."""
        clean = self.services.active == 0
        await self._stop_serving()
        self.services.fail_all(worker_pb2.FAILURE_REASON_DRAINING)
        self.servicer.finish()
        await self._server.stop(LAST_WORDS_S)
        await asyncio.to_thread(self.engine.stop)  # watched still: its last step may hang
        for task in (self._reporter, self._watching):
            if task is not None:
                task.cancel()
        left_nothing = await asyncio.to_thread(self.transfer.stop, PUSHES_END_S)
        self._lag.stop()
        await self.admin.stop()
        return clean and left_nothing

    def _watch_gpu(self) -> None:
        device = self.engine.pool.tensor.device
        if device.type == "cuda":
            uuid = torch.cuda.get_device_properties(device).uuid
            self.metrics.watch_gpu(gpu_reader(f"GPU-{uuid}"))

    def _make_transport(self) -> KvTransport:
        pool = self.engine.pool
        return make_transport(
            self.settings.transport, self.agent_name, pool.tensor, pool.page_bytes, pool.num_pages
        )

    def _make_services(self) -> Services:
        page_size_tokens = self.engine.model.page_size_tokens
        peers = Peers(self.identity, self.transfer, slow_gigabytes_per_s=self._slow_gigabytes_per_s)
        self.metrics.watch_peers(peers.paths)
        prefill = PrefillService(
            self.engine,
            self.transfer,
            self.inbox,
            self.metrics,
            page_size_tokens=page_size_tokens,
            path_to=peers.path_to,
        )
        decode = DecodeService(
            self.engine,
            self.transfer,
            self.inbox.hop,
            self.metrics,
            epoch=self.epoch,
            agent_name=self.agent_name,
            page_bytes=self.engine.pool.page_bytes,
            page_size_tokens=page_size_tokens,
            max_pages_per_peer=int(self.settings.max_granted_share * self.engine.pool.num_pages),
        )
        relay = QuiesceRelay(
            self.transfer,
            self.agent_name,
            self.epoch,
            lambda said: self.servicer.tell_routers(said),
        )
        return Services(prefill, decode, peers, relay)

    @property
    def _slow_gigabytes_per_s(self) -> float:
        floor = self.settings.slow_peer_gigabytes_per_s
        return floor if floor >= 0 else SLOW_GPU_GIGABYTES_PER_S * self.engine.pool.tensor.is_cuda

    def _on_transfer(self, event: TransferEvent) -> None:
        """On the transfer thread."""
        self.inbox.hop(partial(self._dispatch, event))

    def _dispatch(self, event: TransferEvent) -> None:
        self.services.peers.on_transfer(event)
        self.services.prefill.on_transfer(event)
        self.services.decode.on_transfer(event)
        self.services.relay.on_transfer(event)

    def _adopt(self, endpoint: Endpoint) -> None:
        """A transport that moves nothing is announced all the same: peers have to match."""
        self.identity.endpoint.CopyFrom(endpoint_message(endpoint))

    def _bind(self) -> str:
        """Binds the server; returns its address."""
        port = self._server.add_insecure_port(self.settings.listen)
        return f"{self.settings.listen.rpartition(':')[0]}:{port}"

    def _write_address(self, bound: str) -> None:
        """For those on this host."""
        if self.settings.address_file:
            address = reachable(bound, "127.0.0.1")
            Path(self.settings.address_file).write_text(f"{address}\n", encoding="utf-8")

    def _is_ready(self) -> bool:
        return not self.servicer.draining

    async def _stop_serving(self) -> None:
        """Nothing new: health says NOT_SERVING, and routers are told of the worker no more."""
        self.servicer.draining = True  # first: who sees NOT_SERVING is to be refused here, too
        self._stop_announcing()
        self.servicer.report()
        await self._health.enter_graceful_shutdown()

    def _stop_announcing(self) -> None:
        for announcer in self._announcers:
            announcer.cancel()


def engine_config(settings: WorkerSettings) -> EngineConfig:
    """What the settings say to the engine."""
    return EngineConfig(
        model=settings.model,
        name=settings.served_name,
        load_format=settings.load_format,
        dtype=settings.dtype,
        device=settings.device,
        attention=settings.attention,
        seed=settings.seed,
        page_size=settings.page_size_tokens,
        num_pages=settings.num_pages,
        kv_memory_bytes=int(settings.kv_memory_gib * (1 << 30)),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_sequences=settings.max_sequences,
        max_step_tokens=settings.max_step_tokens,
        mixed_prefill_tokens=_mixed_prefill_tokens(settings),
        full_step_tokens=0 if settings.role is Role.BOTH else FULL_STEP_TOKENS,
        max_context_tokens=settings.max_context_tokens,
        page_watermark=settings.page_watermark,
        scheduling=settings.scheduling,
        prefix_cache=settings.prefix_cache,
        eviction=settings.eviction,
        poison_freed_pages=settings.poison_freed_pages,
    )


def _identity_while_loading(settings: WorkerSettings) -> worker_pb2.WorkerIdentity:
    """What is known before the model is."""
    name = settings.served_name or Path(settings.model).name
    return worker_pb2.WorkerIdentity(
        worker_id=settings.name,
        role=_ROLES[settings.role],
        model=worker_pb2.ModelInfo(name=name),
    )


def _mixed_prefill_tokens(settings: WorkerSettings) -> int:
    """Most prompt tokens beside decode; 0 leaves it to the engine."""
    if settings.mixed_prefill_tokens or settings.role is not Role.DECODE:
        return settings.mixed_prefill_tokens
    return max(DECODE_MIXED_PREFILL_TOKENS, settings.page_size_tokens)


def main(settings: WorkerSettings) -> int:
    """Runs a worker process; returns its exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    service = _SERVICES[settings.role]
    setup_logging(service, settings.name, settings.log_level, settings.log_format)
    failpoints.arm(settings.failpoints)
    try:
        with claimed_for(settings.device, settings.gpu_slots_dir, settings.name) as gpu:
            if gpu:
                logger.info("GPU claimed", extra={"gpu": gpu})
            return _run(settings, service)
    except NoSlotError as error:
        logger.error("the worker cannot start: %s", error)
        return 1


def _run(settings: WorkerSettings, service: str) -> int:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        with (
            announced_as_loading(settings.routers, _identity_while_loading(settings)),
            loading_progress(terminal(settings.log_format)) as progress,
        ):
            engine = Engine.build(engine_config(settings), progress)
    except (EngineError, ModelError) as error:
        logger.error("the engine cannot be built: %s", error)
        return 1
    tracing = setup_tracing(service, settings.name, settings.otlp_endpoint)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(settings, engine, tracing))


async def _serve(settings: WorkerSettings, engine: Engine, tracing: Tracing | None) -> int:
    log_loop_errors(asyncio.get_running_loop())
    worker = Worker(settings, engine)
    if tracing is not None:
        worker.metrics.watch_spans(lambda: tracing.counts)
    signals = EndSignals()  # before anybody can see that the worker serves, and end it
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, worker.profile)
    try:
        await worker.start()
    except (TransportError, RuntimeError, OSError) as error:
        logger.error("the worker cannot start: %s", error)
        return 1
    if settings.profile:
        worker.profile()
    await signals.first.wait()
    logger.info("draining", extra={"attempts": worker.services.active})
    await signals.bound(worker.drain(), settings.drain_s)
    clean = await worker.stop()
    if tracing is not None:
        await asyncio.to_thread(tracing.shutdown)
    logger.info("worker ends", extra={"clean": clean})
    return 0 if clean else 1
