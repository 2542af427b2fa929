"""A prefill worker over two hosts beside a router and a decode worker, all as real processes."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from cluster import Cluster, make_cluster
from hosts_kit import Host, baton
from settings_kit import variables_of

from serving.net.certificates import write_set

LEADER_PORT = 50970
ROUTER_PORT = 50950
WORKER = "prefill-0"
PAIR = ("decode-0", WORKER)


@dataclass
class Group:
    """A worker of the cluster leads it; its agent is on `host`."""

    cluster: Cluster
    host: Host
    settings: Mapping[str, object]
    certs: Path
    logs: Path
    worker: str
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_agent(self, *, model: str = "", **changed: object) -> subprocess.Popen[bytes]:
        """Starts node 1 on the other host."""
        settings = {**self.settings, "node": 1, "tls_dir": str(self.certs / self.role), **changed}
        settings = {"device": "cpu", "name": self.worker, "role": self.role} | settings
        own = variables_of(settings) | {"UCX_TLS": "tcp"}
        argv, log = baton("worker", "--model", model or self.model), self.logs / "agent.log"
        self.agents.append(self.host.start(argv, own, log))
        return self.agents[-1]

    @property
    def role(self) -> str:
        return self.worker.partition("-")[0]

    @property
    def model(self) -> str:
        argv = list(self.cluster._spec(self.worker).argv)
        return argv[argv.index("--model") + 1]

    @property
    def agent(self) -> psutil.Process:
        """The agent itself, which is a child of its guard."""
        return psutil.Process(self.agents[-1].pid).children()[0].children()[0]

    @property
    def leader(self) -> psutil.Process:
        """Rank 0, which is a child of its guard."""
        guard = psutil.Process(self.cluster.processes[self.worker].pid)
        return next(one for one in guard.children() if "engine.ranks" not in one.cmdline())

    def restart(self) -> None:
        """Starts leader and agent again."""
        self.start_agent()
        self.cluster.start(self.worker)
        self.cluster.wait_ready()
        self.cluster.wait_attached(self.worker)
        self.cluster.wait_measured(*PAIR)

    def ranks(self) -> list[psutil.Process]:
        """All but rank 0, of both hosts."""
        return [*self.ranks_here(), *self.host.processes("engine.ranks")]

    def ranks_here(self) -> list[psutil.Process]:
        """Ranks of the leader's host, but for rank 0."""
        return [one for one in self.leader.children() if "engine.ranks" in one.cmdline()]

    def tail(self) -> str:
        return self.cluster.tail(60)


@contextmanager
def group(
    model: Path,
    folder: Path,
    host: Host,
    *,
    pp: int = 2,
    tp: int = 1,
    worker: str = WORKER,
    everywhere: Mapping[str, object] | None = None,
    **settings: object,
) -> Iterator[Group]:
    """A group that is not started: `started` does it. Ends with the block. `settings` are the
    group's, and those of `everywhere` of all workers."""
    shared = everywhere or {}
    certs, logs = folder / "certs", folder / "logs"
    write_set(certs, ("prefill", "decode"), (), days=30)
    router = f"{host.near}:{ROUTER_PORT}"
    of_group = {
        "nodes": 2,
        "leader": f"{host.near}:{LEADER_PORT}",
        "fabric": f"trusted:{host.network}",
        "pp": pp,
        "tp": tp,
        "num_pages": 400,
        "max_step_tokens": 128,
        "routers": router,
        "threads": 1,
        **shared,
        **settings,
    }
    (other,) = {*PAIR} - {worker}
    own = {worker: {**of_group, "node": 0}, other: {"routers": router, **shared}}
    cluster = make_cluster(model, logs, certs=str(certs), own=own, operator_token="token")
    cluster.own[other].update({"UCX_TLS": "tcp", "UCX_NET_DEVICES": host.interface})
    cluster.own[worker].update({"UCX_TLS": "tcp"})
    argv = list(cluster.plan.specs[0].argv)
    internal = argv[argv.index("--internal-listen") + 1]
    specs = [
        replace(spec, argv=[router if word == internal else word for word in spec.argv])
        for spec in cluster.plan.specs
    ]
    cluster.plan = replace(cluster.plan, specs=tuple(specs))
    made = Group(cluster, host, of_group, certs, logs, worker)
    try:
        yield made
    finally:
        cluster.stop()
        for agent in made.agents:
            for process in host.processes("baton"):
                process.kill()
            agent.wait(20)


def gone_within(processes: list[psutil.Process], within_s: float) -> float:
    """How long it took until none is left, seconds."""
    began_s = time.monotonic()
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    alive = [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not alive, alive
    return time.monotonic() - began_s


STRIKES = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
