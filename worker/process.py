"""One worker process, from its settings to its exit code.

Life of the process:

1. Loading: the model is read and the pool is allocated. The worker reports that to routers and
   answers nothing yet. A signal ends the process at once.
2. Serving: the Work stream, health and metrics answer. The worker announces itself all the time.
3. Draining, after SIGTERM or SIGINT: health says NOT_SERVING, and the worker announces itself no
   more. It refuses new attempts. Legs under way and their transfers get `drain_s` seconds, which a
   second signal cuts short.
4. Stopping: all legs that are left fail with DRAINING. Streams, engine and transfer thread end.

The exit code is 0 if nothing had to be cut short, and `WRONG_USE` if the settings or the model are
wrong; then another start would do no better. A step that hangs or a lost device ends the
process at any time (`worker.watchdog`), with an exit code of its own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch

from baton.worker.v1 import worker_pb2
from engine.engine import Engine, EngineError, NotNowError
from engine.model import ModelError
from faults import failpoints
from kv_transfer.ranks.build import BESIDE
from kv_transfer.types import TransportError
from serving import garbage
from serving.event_loop import EndSignals, loop_factory, prepare_to_serve
from serving.gpu_slots import NoSlotError, claimed_for
from serving.net.internal_net import InternalNet, workers_net
from serving.net.spans import exporter_to_router
from serving.net.tls import TlsError
from serving.release import stamp
from serving.settings import WRONG_USE, SettingsError
from telemetry.logs import log_loop_errors, setup_logging
from telemetry.names import Service
from telemetry.tracing import Tracing, setup_tracing
from worker.announcer import ROLES, announced_as_loading
from worker.engine_config import engine_config
from worker.hosts.digest import model_digest
from worker.hosts.guard import Guard
from worker.hosts.interfaces import keep_data_plane_on
from worker.hosts.leader import Group, GroupError
from worker.hosts.place import Place
from worker.hosts.witness import looking
from worker.loading import loading_progress, terminal
from worker.router_addresses import RouterAddresses
from worker.server import Worker
from worker.settings import Role, WorkerSettings

logger = logging.getLogger(__name__)

_SERVICES: Final = {
    Role.PREFILL: Service.PREFILL,
    Role.DECODE: Service.DECODE,
    Role.BOTH: Service.BOTH,
}


def main(settings: WorkerSettings, leads: tuple[Place, Guard] | None = None) -> int:
    """Runs a worker process; returns its exit code. `leads`: the leader's, of several hosts."""
    begin_address_file(settings.debug.address_file)
    prepare_to_serve()
    service = Service.BOTH if settings.flexible else _SERVICES[settings.role]
    setup_logging(service, settings.name, settings.debug.log_level, settings.log_format)
    failpoints.arm(settings.debug.failpoints)
    if leads is not None:
        place, _ = leads
        keep_data_plane_on(place.interface)
    elif settings.is_local:
        keep_data_plane_on("lo")
    try:
        with (
            claimed_for(
                settings.device, settings.gpu_slots_dir, settings.name, settings.ranks_here
            ) as gpu,
            RouterAddresses(settings.routers) as routers,
        ):
            if gpu:
                logger.info("GPU claimed", extra={"gpu": gpu})
            return _run(settings, service, routers, leads)
    except (NoSlotError, TlsError, GroupError) as error:
        logger.error("the worker cannot start: %s", error)
        return 1


def begin_address_file(path: str) -> None:
    """Empties the file: probes shall not ask whoever had the address before.

    Raises:
        SettingsError: the file cannot be written.
    """
    if not path:
        return
    try:
        Path(path).write_text("", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"worker: `debug.address_file`: {path}: {error.strerror}") from None


def _run(
    settings: WorkerSettings,
    service: str,
    routers: RouterAddresses,
    leads: tuple[Place, Guard] | None,
) -> int:
    net = workers_net(settings.tls, settings.name)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    with ExitStack() as stack:
        group = None
        if leads is not None:
            place, guard = leads
            stack.enter_context(looking(settings.name, routers, net))
            group = Group(settings, place, net, model_digest(settings.model), guard)
            stack.callback(group.close)
        return _run_with(settings, service, routers, net, group)


def _run_with(
    settings: WorkerSettings,
    service: str,
    routers: RouterAddresses,
    net: InternalNet,
    group: Group | None,
) -> int:
    try:
        with (
            announced_as_loading(routers, _identity_while_loading(settings), net),
            loading_progress(terminal(settings.log_format)) as progress,
        ):
            if group is not None:
                group.form()
            engine = Engine.build(engine_config(settings), progress, BESIDE, group)
    except (EngineError, ModelError) as error:
        logger.error("the engine cannot be built: %s", error)
        return 1 if isinstance(error, NotNowError) else WRONG_USE
    endpoint = settings.otlp_endpoint
    exporter = exporter_to_router(net, endpoint)
    tracing = setup_tracing(service, settings.name, endpoint, exporter=exporter)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(settings, engine, tracing, routers, net))


async def _serve(
    settings: WorkerSettings,
    engine: Engine,
    tracing: Tracing | None,
    routers: RouterAddresses,
    net: InternalNet,
) -> int:
    log_loop_errors(asyncio.get_running_loop())
    worker = Worker(settings, engine, routers, net)
    if tracing is not None:
        worker.metrics.watch_spans(lambda: tracing.counts)
    signals = EndSignals()  # First: a worker that is seen to serve may be signalled.
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, worker.profile)
    try:
        await worker.start()
    except (TransportError, RuntimeError, OSError) as error:
        logger.error("the worker cannot start: %s", error)
        return 1
    garbage.set_apart()
    if settings.debug.profile:
        worker.profile()
    await signals.first.wait()
    logger.info("draining", extra={"attempts": worker.services.active})
    await signals.bound(worker.drain(), settings.drain_s)
    clean = await worker.stop()
    if tracing is not None:
        await asyncio.to_thread(tracing.shutdown)
    logger.info("worker ends", extra={"clean": clean})
    return 0 if clean else 1


def _identity_while_loading(settings: WorkerSettings) -> worker_pb2.WorkerIdentity:
    """The part of the worker's identity that is known before the model is read."""
    name = settings.served_name or Path(settings.model).name
    model = worker_pb2.ModelInfo(name=name)
    role = ROLES[settings.role]
    return stamp(worker_pb2.WorkerIdentity(worker_id=settings.name, role=role, model=model))
