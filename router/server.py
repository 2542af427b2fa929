"""One router process: front doors, dispatcher and registry, and the servers they are mounted on.

Life of the process:

1. The servers start: gRPC and HTTP for clients, internal gRPC for workers. A router that shares
   its client ports with other routers opens them only when it can run some model.
2. Serving. Health reports the process at once, and the API while the router can run some model.
3. Draining, after SIGTERM or SIGINT. Health says NOT_SERVING. The router serves on for
   `drain_grace_s` seconds, so that load balancers notice. Then it refuses new requests, and running
   ones get `drain_s` seconds. A second signal ends the wait. The router leaves shared ports at
   once: clients connect to another router for their next requests.
4. Stopping. Remaining requests end with DRAINING. The streams to the workers close.

The exit code is 0 if every request finished, and `WRONG_USE` if a file of the operator's is wrong.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from baton.addresses import host_of, is_loopback
from baton.grpc_options import public_server_options, server_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from faults import failpoints
from router.deaths.fence import fence_route
from router.dispatch.dispatcher import JobDispatcher
from router.doors.auth import TokensFileError, gate_of
from router.doors.batches.room import Room
from router.doors.batches.store import FileStore
from router.doors.database import Bounds, StoreError
from router.doors.frontdoor import SERVICE_NAME, InferenceService
from router.doors.http2.server import FastDoor
from router.doors.loads import endpoint_load_of, load_of
from router.doors.openai.server import OpenAiServer
from router.doors.responses.store import ResponseStore
from router.folders.templates import TemplateFileError, read_template
from router.placement.cost import Cost
from router.requests.bounds import UNREAD_GRACE_S, BodyShape, most_connections
from router.requests.tokenization import Tokenizers
from router.requests.validation import Limits
from router.split_names import SplitNames
from router.trace_store import TraceStore, add_trace_receiver, trace_routes
from router.workers.balance import Balance
from router.workers.discovery import discovery_route
from router.workers.holdings import WorkerPages
from router.workers.model_folders import AllowedFolders, AnyFolder, ModelFolders
from router.workers.registry import Registry, RegistryServicer
from router.workers.roles import Roles, balance_forever
from serving import garbage
from serving.admin import AdminServer, metrics_route
from serving.event_loop import EndSignals, loop_factory, prepare_to_serve
from serving.grpc_services import add_health_and_reflection
from serving.net.internal_net import routers_net
from serving.net.refusals import Callers
from serving.net.spans import exporter_to_router
from serving.net.tls import DoorCertificate, TlsError
from serving.settings import WRONG_USE
from telemetry.logs import log_loop_errors, setup_logging
from telemetry.metrics.loop_lag import EventLoopLag
from telemetry.metrics.router import RouterLoad, RouterMetrics
from telemetry.names import Service
from telemetry.rpc import ServerSpans
from telemetry.tracing import setup_tracing

if TYPE_CHECKING:
    from grpc_health.v1 import health

    from router.settings import RouterSettings

logger = logging.getLogger(__name__)

LAST_WORDS_S: Final = 1.0
"""Time for statuses to reach clients when the server stops."""
_REGISTRY_NAME: Final = worker_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class RouterServer:
    """The composition of a router process. Belongs to the event loop that started it."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self._gate = gate_of(settings.auth_tokens_file, settings.api_key)
        self.metrics = RouterMetrics(self._load)
        pages = WorkerPages()
        self.dispatcher = JobDispatcher(settings, self.metrics, Cost(pages))
        self._net = routers_net(settings.tls)
        self.metrics.watch_refusals(lambda: self._net.refusals.counts)
        self._door = DoorCertificate(settings.door_tls) if any(settings.door_tls) else None
        self.registry = Registry(settings, self.dispatcher, self._net, _folders(settings), pages)
        self.metrics.watch_pages(pages.load)
        self.metrics.watch_endpoint(partial(endpoint_load_of, self.dispatcher, self.registry))
        self.address = ""
        """The address for clients; "" before the router listens there."""
        self.internal_address = ""
        self.http_address = ""
        template = read_template(settings.chat_template)
        self._tokenizers = Tokenizers(settings.debug.tokenizer_threads, template)
        self._limits = _limits(settings)
        self._store, self._files = _responses(settings), _files(settings)
        self._http = OpenAiServer(
            settings.http_listen,
            self.dispatcher,
            self._tokenizers,
            self._limits,
            self.metrics,
            [metrics_route(self.metrics.registry)] if settings.debug.door_metrics else [],
            self._gate,
            allowed_origins=settings.allowed_origins,
            reuse_port=settings.reuse_port,
            tls=self._door.http if self._door else None,
            store=self._store,
            files=self._files,
            batch_requests=settings.debug.batch_requests,
            room=Room(lambda: self.registry.members, lambda: self.dispatcher.queued_jobs),
        )
        longest_s = settings.max_request_duration_s + 2 * UNREAD_GRACE_S
        most = most_connections().grpc // (1 + bool(settings.fast_listen))
        self._public = grpc.aio.server(
            interceptors=[ServerSpans()],
            options=public_server_options(most, longest_s, reuse_port=settings.reuse_port),
        )
        self.fast_door = self._make_fast_door(most, longest_s) if settings.fast_listen else None
        self._internal = grpc.aio.server(
            interceptors=[Callers(self._net.refusals)], options=server_options()
        )
        self._health: health.aio.HealthServicer
        self._members_task: asyncio.Task[None] | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._leaving: asyncio.Task[None] | None = None
        self._can_run = False
        """The router can run some model, and its doors are open."""
        self._traces = (
            TraceStore(settings.debug.max_stored_traces) if settings.trace_store else None
        )
        self._balance, self._roles = self._make_roles()
        self.admin = self._admin_server()
        self._tracing = setup_tracing(
            Service.ROUTER,
            settings.name,
            settings.otlp_endpoint,
            exporter=exporter_to_router(self._net, settings.otlp_endpoint),
        )
        if (tracing := self._tracing) is not None:
            self.metrics.watch_spans(lambda: tracing.counts)
        self._lag = EventLoopLag(self.metrics.loop_lagged)

    def _make_fast_door(self, most: int, longest_s: float) -> FastDoor:
        door = FastDoor(
            self.settings.fast_listen,
            BodyShape(self.dispatcher.models),
            most,
            longest_s,
            reuse_port=self.settings.reuse_port,
            tls=self._door.http2 if self._door else None,
        )
        self.metrics.watch_fast_door(door)
        return door

    def _make_roles(self) -> tuple[Balance | None, Roles]:
        settings = self.settings
        if settings.balance == "off":
            return None, Roles(lambda: self.registry.members, self.metrics)
        balance = Balance(settings.balance_thresholds, settings.name)
        self.metrics.watch_balance(balance.ratios)
        return balance, Roles(lambda: self.registry.members, self.metrics, balance.said)

    def _admin_server(self) -> AdminServer:
        routes = [discovery_route(lambda: self.registry.members), self._roles.route()]
        routes.append(fence_route(self.registry.deaths, lambda: self.registry.members))
        routes += self.registry.adapters.routes()
        if self._traces is not None:
            routes += trace_routes(self._traces)
        return AdminServer(
            self.settings.admin,
            self.metrics.registry,
            lambda: self._can_run,
            routes,
            self.settings.operator_token,
        )

    async def start(self) -> None:
        """Binds and serves.

        Raises:
            RuntimeError, OSError: an address cannot be bound.
        """
        service = InferenceService(
            self.dispatcher, self._tokenizers, self._limits, self.metrics, self._gate
        )
        service.add_to_server(self._public)
        if self.fast_door is not None:
            service.add_to_server(self.fast_door)
        self._health = await add_health_and_reflection(
            self._public, (SERVICE_NAME,), reflection=self.settings.debug.reflection
        )
        worker_pb2_grpc.add_RegistryServiceServicer_to_server(
            RegistryServicer(self.registry), self._internal
        )
        await add_health_and_reflection(self._internal, (_REGISTRY_NAME,))
        if self._traces is not None:
            add_trace_receiver(self._internal, self._traces)
        self.internal_address = self._net.bind(self._internal, self.settings.internal_listen)
        if not self.settings.reuse_port:
            await self._open_doors()
        await self._internal.start()
        await self.admin.start()
        self._lag.start()
        self._members_task = asyncio.create_task(self._follow_members())
        if self._balance is not None:
            dispatcher, registry = self.dispatcher, self.registry
            balancing = balance_forever(
                self._balance,
                self._roles,
                lambda: registry.members,
                dispatcher.queued_by_model,
            )
            self._watches.append(asyncio.create_task(balancing))
        watched = (self._net, self._door.now) if self._door else (self._net,)
        self._watches += [asyncio.create_task(one.watch()) for one in watched]

    async def _open_doors(self) -> None:
        """Opens the ports for clients."""
        self.address = self._bind_door(self.settings.listen)
        await self._public.start()
        await self._http.start()
        self.http_address = self._http.address
        if self.fast_door is not None:
            await self.fast_door.start()
        logger.info(
            "router serves",
            extra={
                "address": self.address,
                "http": self.http_address,
                "fast": self.fast_door.address if self.fast_door else "",
                "internal": self.internal_address,
            },
        )

    async def serve_until(self, end: asyncio.Event) -> None:
        """Returns when the event is set.

        Raises:
            RuntimeError, OSError: a shared address could not be bound.
        """
        assert self._members_task is not None
        ended = asyncio.create_task(end.wait())
        await asyncio.wait({ended, self._members_task}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if self._members_task.done():
            self._members_task.result()

    async def drain(self) -> None:
        """Announces the drain, then refuses new work. Returns when no work is left."""
        self.metrics.draining()
        await self._health.enter_graceful_shutdown()
        self._http.drain()
        if self.settings.reuse_port:
            self._leave_doors()
        await asyncio.sleep(self.settings.debug.drain_grace_s)
        self.dispatcher.drain()
        await self.dispatcher.idle()

    async def stop(self) -> bool:
        """Ends everything; returns whether every request had finished."""
        clean = self.dispatcher.active_jobs == 0
        for task in (self._members_task, *self._watches):
            if task is not None:
                task.cancel()
        await self._health.enter_graceful_shutdown()
        self.dispatcher.drain()
        self.dispatcher.fail_all()
        await asyncio.gather(self._stop_grpc(LAST_WORDS_S), self._http.stop())
        await self.registry.close()
        if self._tracing is not None:  # before the internal server, which may be its receiver
            await asyncio.to_thread(self._tracing.shutdown)
        await self._internal.stop(None)
        self._lag.stop()
        await self.admin.stop()
        self._tokenizers.close()
        for store in (self._store, self._files):
            if store is not None:
                store.close()
        return clean

    def _bind_door(self, address: str) -> str:
        credentials = self._door.grpc if self._door else None
        port = (
            self._public.add_secure_port(address, credentials)
            if credentials
            else self._public.add_insecure_port(address)
        )
        return f"{address.rpartition(':')[0]}:{port}"

    def _leave_doors(self) -> None:
        """Stops listening and asks clients to reconnect. Their requests go on."""
        if self._members_task is not None:
            self._members_task.cancel()  # else it would open them again
        grace_s = self.settings.debug.drain_grace_s + self.settings.drain_s
        self._http.leave_port(grace_s)
        self._leaving = asyncio.create_task(self._stop_grpc(grace_s))

    async def _stop_grpc(self, grace_s: float) -> None:
        stopping = [self._public.stop(grace_s)]
        if self.fast_door is not None:
            stopping.append(self.fast_door.stop(grace_s))
        await asyncio.gather(*stopping)

    def _load(self) -> RouterLoad:
        return load_of(self.dispatcher, self.registry, self._http.running_batches)

    async def _follow_members(self) -> None:
        """Keeps the health state current. Reads a model's tokenizer when its first worker attaches
        and before health reports the model, so that no request waits for it."""
        changed = self.dispatcher.membership_changed
        while True:
            changed.clear()
            await self._tokenizers.warm(self.dispatcher.attached_models())
            can_run = bool(self.dispatcher.models())
            await self._health.set(SERVICE_NAME, _SERVING if can_run else _NOT_SERVING)
            if can_run and not self.address:
                await self._open_doors()
            self._can_run = can_run
            await changed.wait()


async def serve(settings: RouterSettings) -> int:
    """Runs a router until it is told to stop; returns the process's exit code."""
    log_loop_errors(asyncio.get_running_loop())
    signals = EndSignals()  # before anybody sees the router serve and may end it
    server = RouterServer(settings)
    try:
        await server.start()
        garbage.set_apart()
        await server.serve_until(signals.first)
    except (RuntimeError, OSError):
        await server.stop()  # closes the ports that are bound already
        raise
    logger.info("draining", extra={"jobs": server.dispatcher.active_jobs})
    await signals.bound(server.drain(), settings.debug.drain_grace_s + settings.drain_s)
    return 0 if await server.stop() else 1


def main(settings: RouterSettings) -> int:
    """Runs a router process; returns its exit code."""
    prepare_to_serve()
    setup_logging(Service.ROUTER, settings.name, settings.debug.log_level, settings.log_format)
    failpoints.arm(settings.debug.failpoints)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve(settings))
    except (TokensFileError, TemplateFileError, TlsError, StoreError) as error:
        logger.error("the router cannot start: %s", error)
        return WRONG_USE if isinstance(error, TokensFileError | TemplateFileError) else 1


def _folders(settings: RouterSettings) -> ModelFolders:
    is_local = is_loopback(host_of(settings.internal_listen))
    if settings.model_dirs or not is_local:
        return AllowedFolders(settings.model_dirs)
    return AnyFolder()


def _responses(settings: RouterSettings) -> ResponseStore | None:
    debug = settings.debug
    bounds = Bounds(debug.responses_mib << 20, debug.responses_most, debug.responses_days)
    return ResponseStore(settings.responses_folder, bounds) if settings.responses_folder else None


def _files(settings: RouterSettings) -> FileStore | None:
    debug = settings.debug
    bounds = Bounds(debug.files_mib << 20, debug.files_most, debug.files_days)
    return FileStore(settings.batches_folder, bounds) if settings.batches_folder else None


def _limits(settings: RouterSettings) -> Limits:
    return Limits(
        default_max_tokens=settings.default_max_tokens,
        max_output_tokens=settings.max_output_tokens,
        max_choices=settings.debug.max_choices,
        max_request_duration_s=settings.max_request_duration_s,
        split_names=SplitNames(settings.split_names),
    )
