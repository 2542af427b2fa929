"""Runs routers and their workers as processes of this machine, for `baton up` and `baton demo`.

1. `plan` turns options into ports, devices, threads and command lines. It starts nothing.
2. `running` starts the processes and yields at once.
3. `wait_until_ready` returns when every worker serves, is attached to every router, and every
   router can run a model. A process that dies before that is an error. One that dies later is
   restarted.
4. Leaving `running` drains the routers first, since their requests need the workers.
5. Several routers share the addresses for clients. All send their spans to the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

from baton.client.channels import TLS_SCHEME
from baton.tls import NO_FILES, TlsFiles, holders_files
from console.ports import PortPicker
from console.supervisor import ProcessSpec, Supervisor, Write
from console.up_options import Device as Device
from console.up_options import UpError as UpError
from console.up_options import UpOptions as UpOptions
from console.up_options import UpUseError as UpUseError
from serving.gpu_slots import NoSlotError, shared_out, visible_gpus
from worker.settings import Role

GRPC_PORT: Final = 50051
HTTP_PORT: Final = 8000
INTERNAL_PORT: Final = 50050
ADMIN_PORT: Final = 9090
"""Admin port of the first router. Other routers follow, then workers."""
POLL_S: Final = 0.1
"""So often it is asked whether processes are ready, whose start takes seconds."""

_Flags = Mapping[str, str | float | None]


@dataclass(frozen=True, slots=True)
class UpPlan:
    """The processes, and their addresses."""

    specs: tuple[ProcessSpec, ...]
    router_address: str
    """gRPC address for clients; all routers share it and `http_address`."""
    http_address: str
    router_admin_addresses: tuple[tuple[str, str], ...]
    """Name and admin address of each router; the first has the traces."""
    worker_addresses: tuple[tuple[str, str], ...]
    """Name and address of each worker."""
    worker_admin_addresses: tuple[tuple[str, str], ...]
    """Name and admin address of each worker."""
    workers_on: Mapping[str, int]
    """Workers of each GPU; of "" on the CPU."""
    drain_s: float
    asks_for_key: bool = False
    """Whether clients must show a key or a token."""
    tls: TlsFiles = NO_FILES
    """A router's certificate, by which every process lets itself be asked; none in clear."""
    experts_folder: str = ""
    """Where workers that share experts meet; it goes with the processes. "": none do."""
    claims: tuple[socket.socket, ...] = ()
    """Claims of its ports, at which nobody listens while models load. The plan holds them."""

    @property
    def admin_address(self) -> str:
        """Admin address of the first router."""
        return self.router_admin_addresses[0][1]


def plan(options: UpOptions) -> UpPlan:
    """Plans all processes, without starting one.

    Raises:
        UpError: they cannot run on this machine.
        PortTakenError, CannotListenError: a wanted port or host cannot be had.
    """
    roles = _roles(options)
    gpus = [] if options.device == "cpu" else visible_gpus()
    if options.device == "cuda" and not gpus:
        raise UpError("there is no GPU here (--device cpu runs without one)")
    try:
        shares = shared_out(gpus, [options.ranks_of(role) for _, role in roles])
    except NoSlotError as error:
        raise UpError(str(error)) from None
    with PortPicker() as ports:
        at = _ClientAddresses(
            grpc=ports.pick(options.grpc_port, GRPC_PORT, options.host),
            http=ports.pick(options.http_port, HTTP_PORT, options.http_host or options.host),
        )
        count = options.routers
        names = [f"router-{i}" for i in range(count)] if count > 1 else ["router"]
        admin_ports = [options.admin_port, *[_like(options.admin_port)] * (count - 1)]
        routers = [
            _Router(
                name=name,
                internal=ports.pick(_like(options.grpc_port), INTERNAL_PORT, never=(GRPC_PORT,)),
                admin=ports.pick(admin, ADMIN_PORT),
            )
            for name, admin in zip(names, admin_ports, strict=True)
        ]
        admin_port = _like(options.admin_port)
        workers = [
            _Worker(name, role, ports.pick(0, 0), ports.pick(admin_port, ADMIN_PORT + 1), own)
            for (name, role), own in zip(roles, shares, strict=True)
        ]
    folder = f"{tempfile.gettempdir()}/baton-{uuid4().hex[:16]}" if options.share_experts else ""
    workers = _sharing(workers, folder) if folder else workers
    threads = max(1, (os.cpu_count() or 1) // len(workers))
    on = Counter(gpu for worker in workers for gpu in worker.gpus or ("",))
    return UpPlan(
        specs=(
            *(_router_spec(options, at, router, routers) for router in routers),
            *(_worker_spec(options, routers, worker, threads, on) for worker in workers),
        ),
        router_address=at.grpc,
        http_address=at.http,
        router_admin_addresses=tuple((router.name, router.admin) for router in routers),
        worker_addresses=tuple((worker.name, worker.address) for worker in workers),
        worker_admin_addresses=tuple((worker.name, worker.admin) for worker in workers),
        workers_on=on,
        drain_s=options.drain_s,
        asks_for_key=options.asks_for_key,
        tls=holders_files(options.certs, "router"),
        experts_folder=folder,
        claims=tuple(ports.claims),
    )


class _ClientAddresses(NamedTuple):
    """Addresses of the routers for clients."""

    grpc: str
    http: str


class _Router(NamedTuple):
    """One planned router."""

    name: str
    internal: str
    admin: str


class _Worker(NamedTuple):
    """One planned worker."""

    name: str
    role: Role
    address: str
    admin: str
    gpus: tuple[str, ...]
    """Names of its ranks' GPUs in `CUDA_VISIBLE_DEVICES`; none: it runs on the CPU."""
    expert_group: str = ""
    """Its place among those that share experts; "": it has all experts."""


def _sharing(workers: Sequence[_Worker], folder: str) -> list[_Worker]:
    """Each with its place among those of its role, if there are several."""
    counts, ranks = Counter(worker.role for worker in workers), Counter[Role]()
    placed = []
    for worker in workers:
        role, count = worker.role, counts[worker.role]
        place = f"{folder}/{role.value}?rank={ranks[role]}&ranks={count}"
        ranks[role] += 1
        placed.append(worker._replace(expert_group=place) if count > 1 else worker)
    return placed


def _router_spec(
    options: UpOptions, at: _ClientAddresses, router: _Router, routers: Sequence[_Router]
) -> ProcessSpec:
    flags: _Flags = {
        "--name": router.name,
        "--listen": at.grpc,
        "--internal-listen": router.internal,
        "--http-listen": at.http,
        "--admin": router.admin,
        "--drain-s": options.drain_s,
        "--otlp-endpoint": _spans_to(options, routers),
        "--chat-template": options.chat_template,
    }
    switches = ["--reuse-port"] if len(routers) > 1 else []
    if options.trace and not options.otlp_endpoint and router is routers[0]:
        switches.append("--trace-store")
    own = _own(options, "router") | {"BATON_DEBUG_DRAIN_GRACE_S": "0"}  # No load balancer waits.
    if options.certs:
        _, cert, key, _ = holders_files(options.certs, "router")
        own |= {"BATON_TLS_DOOR_CERT": cert, "BATON_TLS_DOOR_KEY": key}
    if options.api_key:
        own["BATON_API_KEY"] = options.api_key
    return ProcessSpec(router.name, [*_baton("router", flags), *switches], own)


def _worker_spec(
    options: UpOptions, routers: Sequence[_Router], worker: _Worker, threads: int, on: Counter[str]
) -> ProcessSpec:
    """Plans a worker. `on`: the workers of each GPU."""
    sharing = max((on[gpu] for gpu in worker.gpus), default=1)
    share = round(options.gpu_memory_utilization / sharing, 4) if sharing > 1 else None
    stages, ranks = options.grid_of(worker.role)
    flags: _Flags = {
        "--name": worker.name,
        "--role": worker.role.value,
        "--model": options.model,
        "--served-name": options.served_name or None,
        "--device": "cuda" if worker.gpus else "cpu",
        "--tp": ranks if ranks > 1 else None,
        "--pp": stages if stages > 1 else None,
        "--expert-group": worker.expert_group or None,
        "--threads": threads,
        "--listen": worker.address,
        "--routers": ",".join(router.internal for router in routers),
        "--admin": worker.admin,
        "--drain-s": options.drain_s,
        "--kv-memory-gib": options.kv_memory_gib,
        "--gpu-memory-utilization": share,
        "--otlp-endpoint": _spans_to(options, routers),
    }
    device = {"CUDA_VISIBLE_DEVICES": ",".join(worker.gpus)} if worker.gpus else {}
    return ProcessSpec(
        name=worker.name,
        argv=_baton("worker", flags),
        environment={**_own(options, worker.role), **device, "OMP_NUM_THREADS": str(threads)},
        stop_rank=1,
    )


def _baton(command: str, flags: _Flags) -> list[str]:
    """A command line that imports nothing from the working directory, without flags of None."""
    given = [(flag, str(value)) for flag, value in flags.items() if value is not None]
    words = [word for pair in given for word in pair]
    return [sys.executable, "-P", "-m", "baton", command, *words]


def _spans_to(options: UpOptions, routers: Sequence[_Router]) -> str | None:
    scheme = "grpcs" if options.certs else "http"
    return options.otlp_endpoint or (f"{scheme}://{routers[0].internal}" if options.trace else None)


def _own(options: UpOptions, holder: str) -> dict[str, str]:
    """The holder's certificate, and silence of gRPC's log on closed connections."""
    tls = {"BATON_TLS_DIR": str(Path(options.certs).absolute() / holder)} if options.certs else {}
    return {**tls, "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "error")}


def _roles(options: UpOptions) -> list[tuple[str, Role]]:
    counts = {Role.PREFILL: options.prefill, Role.DECODE: options.decode, Role.BOTH: options.both}
    roles = [(f"{role}-{i}", role) for role, count in counts.items() for i in range(count)]
    if not roles:
        raise UpUseError("there is no worker to run (--prefill, --decode, --both)")
    return roles


def _like(port: int | None) -> int | None:
    """Chooses a further port: any free one if the given port is 0, else the usual one."""
    return 0 if port == 0 else None


@contextlib.asynccontextmanager
async def running(what: UpPlan, write: Write) -> AsyncIterator[Supervisor]:
    """Runs the plan's processes while the context is open, then drains them."""
    supervisor = Supervisor(what.specs, write)
    with _folder(what.experts_folder):
        supervisor.start()
        try:
            yield supervisor
        finally:
            await supervisor.stop(what.drain_s)


@contextlib.contextmanager
def _folder(name: str) -> Iterator[None]:
    """A folder of this user's own while the block runs; none if it has no name."""
    if name:
        Path(name).mkdir(mode=0o700)
    try:
        yield
    finally:
        if name:
            shutil.rmtree(name, ignore_errors=True)


async def wait_until_ready(
    what: UpPlan, supervisor: Supervisor, waiting_for: Callable[[str], None] = lambda names: None
) -> None:
    """Returns when all workers serve, are attached to all routers, and all routers run a model.

    Args:
        what: the running plan.
        supervisor: the supervisor of its processes.
        waiting_for: hears the names of processes that are not ready.

    Raises:
        UpError: a process died first, or the supervisor was stopped.
    """
    ready = asyncio.create_task(_ready(what, waiting_for))
    ended = asyncio.create_task(supervisor.ended.wait())
    try:
        await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise UpError(supervisor.failed or "stopped before everything was ready")
        await ready
    finally:
        ready.cancel()
        ended.cancel()
    supervisor.settled = True


async def _ready(what: UpPlan, waiting_for: Callable[[str], None]) -> None:
    missing = dict(what.worker_addresses)
    while missing:
        waiting_for(", ".join(missing))
        answers = await asyncio.gather(*(_serves(one, what.tls) for one in missing.values()))
        missing = {
            name: address
            for (name, address), serves in zip(missing.items(), answers, strict=True)
            if not serves
        }
        await asyncio.sleep(POLL_S)
    workers = {name for name, _ in what.worker_addresses}
    for name, admin in what.router_admin_addresses:
        waiting_for(name)
        while not await asyncio.to_thread(_can_run_with, workers, admin):
            await asyncio.sleep(POLL_S)


def _can_run_with(workers: set[str], router_admin: str) -> bool:
    """Whether a router can run a model and has a stream to every worker, and not to some alone."""
    try:
        _get(f"http://{router_admin}/health/ready")
        attached = json.loads(_get(f"http://{router_admin}/discovery"))
    except (OSError, ValueError):
        return False
    return workers <= {target["labels"]["worker"] for target in attached}


def _get(url: str) -> bytes:
    """Reads a URL. Raises OSError if the status is an error."""
    with urllib.request.urlopen(url, timeout=1.0) as answer:
        return bytes(answer.read())


async def _serves(address: str, tls: TlsFiles) -> bool:
    """Whether the health check of the process at the address succeeds."""
    from console.health import SERVING, check

    scheme = TLS_SCHEME if any(tls) else ""
    return await asyncio.to_thread(check, f"{scheme}{address}", "", 1.0, tls) == SERVING
