"""A router and its workers as processes of this machine: `baton up` and `baton demo`.

1. `plan` turns what was asked for into ports, devices, threads and command lines; it starts
   nothing.
2. `running` starts the processes and yields at once.
3. `wait_until_ready` returns when every worker says that it serves, and the router that each is
   attached and that it can run a model; a process that dies before that is an error, one that
   dies later is restarted.
4. Leaving `running` drains: the router first, for its requests need the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from baton.gpu_slots import visible_gpus
from baton.settings import Role
from baton.supervisor import ProcessSpec, Supervisor, Write

HOST: Final = "127.0.0.1"
GRPC_PORT: Final = 50051
HTTP_PORT: Final = 8000
INTERNAL_PORT: Final = 50050
ADMIN_PORT: Final = 9090
"""The router's; workers follow."""
PORTS_TRIED: Final = 100
ANY_PORT: Final = range(20_000, 32_768)
"""Where a port comes from that may be any: below those that the kernel hands out, which anybody
could be given before the process that is to listen there has started, or while it starts again."""
POLL_S: Final = 0.1
INFERENCE_SERVICE: Final = "baton.inference.v1.InferenceService"
"""Healthy while the router can run a model: workers enough for that are attached."""

Device = Literal["auto", "cpu", "cuda"]
_Flags = Mapping[str, str | float | None]


class UpError(Exception):
    """What was asked for cannot be run here, or did not start."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What to run. Ports of 0 mean any that is free; None means the usual or the next free one."""

    model: str
    """Folder of the model, resolved already."""
    prefill: int = 1
    decode: int = 1
    both: int = 0
    device: Device = "auto"
    trace: bool = True
    """Whether every process sends its spans to the router's trace store."""
    grpc_port: int | None = None
    http_port: int | None = None
    admin_port: int | None = None
    kv_memory_gib: float | None = None
    drain_s: float = 30.0
    """Seconds that running requests get when everything is stopped."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `running` needs, and what to tell the user."""

    specs: tuple[ProcessSpec, ...]
    router_address: str
    http_address: str
    admin_address: str
    worker_addresses: tuple[tuple[str, str], ...]
    """Name and address of each worker."""
    worker_admin_addresses: tuple[tuple[str, str], ...]
    """Name and admin address of each worker."""
    drain_s: float
    claims: tuple[socket.socket, ...] = ()
    """Of its ports, which nobody listens at before a worker has loaded its model; they hold for as
    long as the plan is kept."""


def plan(options: UpOptions) -> Plan:
    """Decides everything before anything is started.

    Raises:
        UpError: it cannot be run on this machine.
    """
    roles = _roles(options)
    gpus = [] if options.device == "cpu" else visible_gpus()
    if options.device == "cuda" and not gpus:
        raise UpError("there is no GPU here (--device cpu runs without one)")
    with _PortPicker() as ports:
        at = _RouterAddresses(
            grpc=ports.pick(options.grpc_port, GRPC_PORT),
            http=ports.pick(options.http_port, HTTP_PORT),
            internal=ports.pick(_like(options.grpc_port), INTERNAL_PORT),
            admin=ports.pick(options.admin_port, ADMIN_PORT),
        )
        workers = [
            _Worker(
                name=name,
                role=role,
                address=ports.pick(0, 0),
                admin=ports.pick(_like(options.admin_port), ADMIN_PORT + 1),
                gpu=gpus[index % len(gpus)] if gpus else "",
            )
            for index, (name, role) in enumerate(roles)
        ]
    threads = max(1, (os.cpu_count() or 1) // len(workers))
    return Plan(
        specs=(
            _router_spec(options, at),
            *(_worker_spec(options, at, worker, threads) for worker in workers),
        ),
        router_address=at.grpc,
        http_address=at.http,
        admin_address=at.admin,
        worker_addresses=tuple((worker.name, worker.address) for worker in workers),
        worker_admin_addresses=tuple((worker.name, worker.admin) for worker in workers),
        drain_s=options.drain_s,
        claims=tuple(ports.claims),
    )


class _RouterAddresses(NamedTuple):
    """Where the router is reached."""

    grpc: str
    http: str
    internal: str
    admin: str


class _Worker(NamedTuple):
    """One worker to be."""

    name: str
    role: Role
    address: str
    admin: str
    gpu: str
    """As `CUDA_VISIBLE_DEVICES` names it; "" for none."""


def _router_spec(options: UpOptions, at: _RouterAddresses) -> ProcessSpec:
    flags: _Flags = {
        "--name": "router",
        "--listen": at.grpc,
        "--internal-listen": at.internal,
        "--http-listen": at.http,
        "--admin": at.admin,
        "--drain-grace-s": 0,  # nobody balances load in front of it
        "--drain-s": options.drain_s,
        "--otlp-endpoint": _spans_to(options, at),
    }
    switches = ["--trace-store"] if options.trace else []
    return ProcessSpec(
        name="router",
        argv=[*_baton("router", flags), *switches],
        environment=_quiet(),
        essential=True,
    )


def _worker_spec(
    options: UpOptions, at: _RouterAddresses, worker: _Worker, threads: int
) -> ProcessSpec:
    flags: _Flags = {
        "--name": worker.name,
        "--role": worker.role.value,
        "--model": options.model,
        "--device": "cuda" if worker.gpu else "cpu",
        "--threads": threads,
        "--listen": worker.address,
        "--routers": at.internal,
        "--admin": worker.admin,
        "--drain-s": options.drain_s,
        "--kv-memory-gib": options.kv_memory_gib,
        "--otlp-endpoint": _spans_to(options, at),
    }
    device = {"CUDA_VISIBLE_DEVICES": worker.gpu} if worker.gpu else {}
    return ProcessSpec(
        name=worker.name,
        argv=_baton("worker", flags),
        environment={**_quiet(), **device, "OMP_NUM_THREADS": str(threads)},
        stop_rank=1,
    )


def _baton(command: str, flags: _Flags) -> list[str]:
    """A command line; flags of None are left to the process's other settings."""
    given = [(flag, str(value)) for flag, value in flags.items() if value is not None]
    return [sys.executable, "-m", "baton", command, *(word for pair in given for word in pair)]


def _spans_to(options: UpOptions, at: _RouterAddresses) -> str | None:
    return f"http://{at.internal}" if options.trace else None


def _quiet() -> dict[str, str]:
    """gRPC's own remarks on every connection that closes help nobody here."""
    return {"GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "error")}


def _roles(options: UpOptions) -> list[tuple[str, Role]]:
    counts = {
        Role.PREFILL: options.prefill,
        Role.DECODE: options.decode,
        Role.BOTH: options.both,
    }
    if options.prefill and not (options.decode or options.both):
        raise UpError("prefill workers need decode workers (--decode or --both)")
    roles = [(f"{role}-{i}", role) for role, count in counts.items() for i in range(count)]
    if not roles:
        raise UpError("there is no worker to run (--prefill, --decode, --both)")
    return roles


def _like(port: int | None) -> int | None:
    """Ports nobody chose: any free one beside another of that kind, else the usual one."""
    return 0 if port == 0 else None


class _PortPicker:
    """Picks free ports, all held until the last is picked so that none is picked twice, and claims
    them towards others that pick meanwhile or later."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self.claims: list[socket.socket] = []

    def __enter__(self) -> _PortPicker:
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.close()

    def pick(self, wanted: int | None, usual: int) -> str:
        """The wanted port, any for 0, or from the usual one upwards the first that is free."""
        match wanted:
            case None:
                ports: Sequence[int] = range(usual, usual + PORTS_TRIED)
            case 0:
                ports = [*random.SystemRandom().sample(ANY_PORT, PORTS_TRIED), 0]
            case _:
                ports = [wanted]
        for port in ports:
            holder = socket.socket()
            claim = socket.socket(socket.AF_UNIX)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((HOST, port))
                holder.listen(1)  # two sockets that do not listen may share a port
                port = holder.getsockname()[1]
                claim.bind(f"\0baton-up-port-{port}")
            except OSError:
                holder.close()
                claim.close()
                continue
            self._held.append(holder)
            self.claims.append(claim)
            return f"{HOST}:{port}"
        raise UpError(f"port {ports[0]} is taken")


@contextlib.asynccontextmanager
async def running(what: Plan, write: Write) -> AsyncIterator[Supervisor]:
    """Runs the plan's processes for as long as the context is open, then drains them."""
    supervisor = Supervisor(what.specs, write)
    supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop(what.drain_s)


async def wait_until_ready(
    what: Plan, supervisor: Supervisor, waiting_for: Callable[[str], None] = lambda names: None
) -> None:
    """Returns when every worker serves, is attached to the router, and that can run a model.

    Args:
        what: what is running.
        supervisor: who runs it.
        waiting_for: told the names of those that are not ready, whenever that changes.

    Raises:
        UpError: a process died first, or somebody stopped the supervisor.
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


async def _ready(what: Plan, waiting_for: Callable[[str], None]) -> None:
    missing = dict(what.worker_addresses)
    while missing:
        waiting_for(", ".join(missing))
        answers = await asyncio.gather(*map(_serves, missing.values()))
        missing = {
            name: address
            for (name, address), serves in zip(missing.items(), answers, strict=True)
            if not serves
        }
        await asyncio.sleep(POLL_S)
    waiting_for("router")
    workers = {name for name, _ in what.worker_addresses}
    while not (
        await _serves(what.router_address, INFERENCE_SERVICE)
        and workers <= await asyncio.to_thread(_attached, what.admin_address)
    ):
        await asyncio.sleep(POLL_S)


def _attached(admin_address: str) -> set[str]:
    """Names of the workers whose streams the router holds. Some can run a model without the others,
    which are to be there all the same."""
    try:
        with urllib.request.urlopen(f"http://{admin_address}/discovery", timeout=1.0) as answer:
            return {target["labels"]["worker"] for target in json.load(answer)}
    except (OSError, ValueError):
        return set()


async def _serves(address: str, service: str = "") -> bool:
    """Whether the process at the address calls the service, or itself, healthy."""
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
