"""A router and its workers as real processes, as `baton up` starts them, for tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from nursery import fork
from prometheus_client.parser import text_string_to_metric_families
from settings_kit import variables_of
from waiting import wait_until

from baton.client.channels import TLS_SCHEME
from baton.client.clients import Client
from baton.tls import TlsFiles
from baton.worker.v1 import worker_pb2 as worker
from baton.worker.v1 import worker_pb2_grpc as worker_grpc
from console import up
from console.supervisor import ProcessSpec
from serving.net.internal_net import InternalNet, routers_net
from serving.release import stamp

READY_S = 100.0
"""Interpreters that import torch and transformers at once took 60 on two cores that others use."""
BASELINE_S = 30.0
"""A transfer of a worker that was struck is given up after some seconds, its pages come back later.
"""
END_S = 40.0
"""After SIGTERM: a drain, and an interpreter that lets go of all it has imported."""
GENERATED_S = 120.0
"""Of a test's requests the longest take some seconds, and a machine that others use is ten times as
slow. One that nothing ends would be the router's to end, after ten minutes."""
SLOW_STEP_S = 0.025


class Process(Protocol):
    """What a cluster needs of `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Launch = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""Starts a command line in an environment; what it writes is appended to a file."""


def spawn(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """The command line in a new interpreter, as users start it."""
    with log.open("ab") as file:
        return subprocess.Popen(
            list(argv), env=dict(environment), stdout=file, stderr=subprocess.STDOUT
        )


@dataclass
class Cluster:
    """Processes of a plan, started and killed one by one."""

    plan: up.UpPlan
    logs: Path
    environment: Mapping[str, str]
    launch: Launch
    own: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment of single processes, by name."""
    processes: dict[str, Process] = field(default_factory=dict)
    baselines: dict[str, int] = field(default_factory=dict)
    started_s: dict[str, float] = field(default_factory=dict)
    """When the process that runs under a name was started, `time.monotonic`."""

    def start(self, name: str) -> None:
        spec = self._spec(name)
        self.started_s[name] = time.monotonic()
        environment = {
            **os.environ, **self.environment, **self.own.get(name, {}), **spec.environment
        }  # fmt: skip
        self.processes[name] = self.launch(spec.argv, environment, self.logs / f"{name}.log")

    def start_all(self) -> None:
        for spec in self.plan.specs:
            self.start(spec.name)
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        self.baselines = {name: self.available_pages(name) for name in self.workers}

    @contextmanager
    def started(self, *, ends_well: bool = False, killed: bool = False) -> Iterator[Self]:
        """Started, and stopped at the end. `ends_well`: every process then exits with 0, or with
        `killed` those that SIGKILL did not end."""
        try:
            self.start_all()
            yield self
        finally:
            codes = set(self.stop().values()) - ({-signal.SIGKILL} if killed else set())
        assert not ends_well or codes == {0}, self.tail()

    def strike(self, worker: str, moment: str, act: Callable[[int], object]) -> None:
        """Arms a kill, acts until the worker is gone, and starts it again. A busy machine may have
        the router prefer another worker for a while."""
        self.arm(worker, moment)
        for turn in range(100):
            act(turn)
            if self.processes[worker].poll() is not None:
                break
        assert self.processes[worker].poll() is not None, "nothing reached it"
        assert self.wait_gone(worker) < 0, "it was not killed"
        self.start(worker)
        self.wait_ready()
        self.wait_attached(worker)

    def wait_ready(self) -> None:
        """Until every worker serves and the routers can run a model."""

        async def ready() -> None:
            await asyncio.wait_for(up._ready(self.plan, lambda _: None), READY_S)

        try:
            asyncio.run(ready())
        except TimeoutError:
            raise AssertionError(f"not ready:\n{self.tail()}") from None

    @property
    def routers(self) -> list[str]:
        """Their names."""
        return [name for name, _ in self.plan.router_admin_addresses]

    @property
    def workers(self) -> dict[str, str]:
        """Addresses by name."""
        return dict(self.plan.worker_addresses)

    @property
    def admin_addresses(self) -> dict[str, str]:
        """Of every process, by name."""
        return dict(self.plan.router_admin_addresses + self.plan.worker_admin_addresses)

    def metric(self, name: str, process: str = "", **labels: str) -> float:
        """A figure that a process exports, the first router unless told otherwise, summed over the
        labels that are not given; 0 where it exports none."""
        process = process or self.routers[0]
        with urllib.request.urlopen(
            f"http://{self.admin_addresses[process]}/metrics", timeout=10
        ) as answer:
            lines = answer.read().decode().splitlines()
        own = "\n".join(line for line in lines if line.startswith(name))  # The rest costs a parse.
        return sum(
            sample.value
            for family in text_string_to_metric_families(own)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def arm(self, name: str, failpoints: str) -> None:
        """Arms failpoints in a process that was started with `failpoints="live"`."""
        url = f"http://{self.admin_addresses[name]}/failpoints"
        urllib.request.urlopen(url, data=failpoints.encode(), timeout=10).close()

    def fired(self, *names: str) -> list[str]:
        """Those of the processes in which a failpoint has fired since they were armed."""

        def counts(name: str) -> dict[str, tuple[int, int]]:
            url = f"http://{self.admin_addresses[name]}/failpoints"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)

        return [name for name in names if any(fired for _, fired in counts(name).values())]

    def slow_down(self, *names: str, step_s: float = SLOW_STEP_S) -> None:
        """Steps of these take so much longer until they are armed anew: what runs there is still
        running when the test gets to it, however long the machine lets it wait."""
        for name in names:
            self.arm(name, f"engine.step=sleep:{step_s}")

    def disarm(self) -> None:
        """No failpoint of a worker is armed any more."""
        for name in self.workers:
            if self.processes[name].poll() is None:
                self.arm(name, "")

    def wait_gone(self, name: str) -> int:
        """Until the process has ended by itself; its exit code."""
        return self.processes[name].wait(READY_S)

    def wait_attached(self, name: str) -> None:
        """Until the router holds a stream to the worker."""
        wait_until(lambda: self.metric("baton_worker_up", worker=name), READY_S, show=self.tail)

    def wait_measured(self, name: str, peer: str) -> None:
        """Until the self-test of the worker's path to the peer is over."""
        figure = "baton_kv_peer_bytes_per_second"
        wait_until(lambda: self.metric(figure, name, peer=peer), show=self.tail)

    def client(self, *, retries: bool = False) -> Client:
        """Without retries by itself, so that a test meets each status as it was sent."""
        return Client(self.door, retries=retries, timeout_s=GENERATED_S, tls_ca=self.plan.tls.ca)

    @property
    def door(self) -> str:
        """The address for gRPC clients, with the scheme that says whether it has TLS."""
        scheme = TLS_SCHEME if any(self.plan.tls) else ""
        return f"{scheme}{self.plan.router_address}"

    @property
    def door_files(self) -> TlsFiles:
        """What its clients trust."""
        return TlsFiles(ca=self.plan.tls.ca)

    @property
    def net(self) -> InternalNet:
        """How a router reaches the workers."""
        return routers_net(self.plan.tls)

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(signum)
        if signum in (signal.SIGKILL, signal.SIGTERM):
            self.processes[name].wait(30)

    def stop(self) -> dict[str, int]:
        """Drains everything: the routers first, then the workers at once. Exit codes by name."""
        routers = set(self.routers) & self.processes.keys()
        for names in (routers, self.processes.keys() - routers):
            self._drain([self.processes[name] for name in names])
        return {name: process.returncode for name, process in self.processes.items()}

    @staticmethod
    def _drain(processes: Sequence[Process]) -> None:
        running = [process for process in processes if process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_S)

    def load(self, name: str) -> worker.Load:
        """A load report, as a router that has just attached gets it."""
        return self._first(name, "load").load

    def identity(self, name: str) -> worker.WorkerIdentity:
        """Who a worker says it is."""
        return self._first(name, "attached").attached.worker

    def _first(self, name: str, kind: str) -> worker.WorkResponse:
        over = threading.Event()

        def say_hello() -> Iterator[worker.WorkRequest]:
            yield worker.WorkRequest(attach=stamp(worker.Attach(router_id="test")))
            over.wait(10)

        with self.net.open(self.workers[name], name.rpartition("-")[0]) as channel:
            try:
                for response in worker_grpc.WorkerServiceStub(channel).Work(
                    say_hello(), timeout=10
                ):
                    if response.HasField(kind):
                        return response
            finally:
                over.set()
        raise AssertionError(f"{name} sent no {kind}")

    def available_pages(self, name: str) -> int:
        load = self.load(name)
        return load.free_pages + load.evictable_pages

    def check_baseline(self) -> None:
        """Every worker's pages are free or evictable again, nothing granted or quarantined."""
        for name, baseline in self.baselines.items():
            wait_until(
                lambda: self.available_pages(name) == baseline,
                BASELINE_S,
                poll_s=0.05,
                show=lambda: f"{name} leaks: {self.load(name)}\n{self.tail()}",
            )

    def logged(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.logs.glob("*.log")))

    def tail(self, lines: int = 25) -> str:
        parts = []
        for path in sorted(self.logs.glob("*.log")):
            parts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)

    def _spec(self, name: str) -> ProcessSpec:
        return next(spec for spec in self.plan.specs if spec.name == name)


def make_cluster(
    model: Path,
    logs: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    both: int = 0,
    routers: int = 1,
    trace: bool = False,
    otlp_endpoint: str = "",
    device: str = "cpu",
    launch: Launch = fork,
    own: Mapping[str, Mapping[str, object]] | None = None,
    certs: str = "",
    drain_s: float = 10.0,
    **settings: object,
) -> Cluster:
    """A cluster that is not started. `settings` reach all of them as BATON_* variables, those in
    `own` the process of that name alone. `launch=spawn` is for what a fork would change: threads
    of the matrix products, a GPU, preloaded libraries, memory, how an interpreter ends."""
    options = up.UpOptions(
        model=str(model),
        prefill=prefill,
        decode=decode,
        both=both,
        routers=routers,
        device=device,
        trace=trace,
        grpc_port=0,
        http_port=0,
        admin_port=0,
        drain_s=drain_s,
        certs=certs,
    )
    settings = {"num_pages": 400, "max_step_tokens": 128, "max_sequences": 32, **settings}
    environment = variables_of(settings)
    if otlp_endpoint:
        environment["BATON_OTLP_ENDPOINT"] = otlp_endpoint
    logs.mkdir(parents=True, exist_ok=True)
    singles = {name: variables_of(of_one) for name, of_one in (own or {}).items()}
    return Cluster(up.plan(options), logs, environment, launch, singles)


@contextmanager
def running(
    model: Path, logs: Path, *, ends_well: bool = False, **options: Any
) -> Iterator[Cluster]:
    """A cluster that is started, and stopped at the end; `ends_well`: every process then exits
    with 0."""
    with make_cluster(model, logs, **options).started(ends_well=ends_well) as cluster:
        yield cluster


def add_model(cluster: Cluster, model: Path, **counts: int) -> None:
    """Adds workers of another model to a cluster that is not started; its name leads theirs."""
    options = up.UpOptions(
        str(model), **counts, device="cpu", trace=False, grpc_port=0, http_port=0, admin_port=0
    )
    more = up.plan(options)
    router = _flag(more.specs[0], "--internal-listen")
    ours = _flag(cluster.plan.specs[0], "--internal-listen")
    workers = [name for name, _ in more.worker_addresses]
    names = {router: ours} | {name: f"{model.name}-{name}" for name in workers}
    specs = [
        replace(spec, name=names[spec.name], argv=[names.get(word, word) for word in spec.argv])
        for spec in more.specs[1:]
    ]
    cluster.plan = replace(
        cluster.plan,
        specs=(*cluster.plan.specs, *specs),
        worker_addresses=cluster.plan.worker_addresses
        + tuple((names[name], address) for name, address in more.worker_addresses),
        worker_admin_addresses=cluster.plan.worker_admin_addresses
        + tuple((names[name], address) for name, address in more.worker_admin_addresses),
    )


def _flag(spec: ProcessSpec, name: str) -> str:
    return spec.argv[list(spec.argv).index(name) + 1]
