"""The processes of a block of runs: started, killed, frozen, started again at the same address.

A process is as the harness left it until `tend` sees that a failpoint killed or stopped it: then
it is started again, or woken, after the time that the fault gave it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
from cluster import END_S, Cluster, make_cluster
from fetching_policy import FETCHING
from prometheus_client.parser import text_string_to_metric_families

from chaos.plan import Topology
from worker.watchdog import EXIT_DEVICE_LOST

TEND_S: Final = 0.05
ADMIN_TIMEOUT_S: Final = 5.0
OPERATOR: Final = "operator"
ROLE_TRIES: Final = 100
"""Ten seconds: a worker that was killed meanwhile is back by then."""
READY_S: Final = 60.0
SHARED: Final = "/dev/shm"
GROUP_END_S: Final = 4.0
"""All of an expert group end so soon after one of them has, or was stopped for good."""
BUSY_S: Final = 3.0
"""What a busy machine may add."""
HOST_GIB: Final = 0.001
"""Fewer slots than a tight pool has pages."""
STORE_MODULE: Final = "engine.tiers.stores.child"
ASIDE_MODULE: Final = "router.aside.server"
FAILPOINTS: Final = "BATON_DEBUG_FAILPOINTS"
FIRED_BELOW: Final = re.compile(r"WARNING (?:faults\.failpoints: )?failpoint fires: (\S+)")
"""As ranks and stores log it; workers log JSON."""
Sample = tuple[str, tuple[tuple[str, str], ...]]


@dataclass
class Blow:
    """Something that a process suffered."""

    name: str
    kind: str
    """`killed` or `frozen`."""
    at_s: float
    """`time.monotonic`."""
    at_unix_s: float
    woken_s: float = 0.0
    code: int | None = None
    """Of a process that ended by itself."""
    in_group: bool = False
    """Whether it was in an expert group, and not on its way into one."""


@dataclass
class Care:
    """What becomes of a process that a fault has struck."""

    restart_after_s: float = 0.2
    wake_after_s: float = 0.5


@dataclass
class Arena:
    """A cluster, and what happened to it."""

    cluster: Cluster
    topology: Topology
    care: dict[str, Care] = field(default_factory=dict)
    blows: list[Blow] = field(default_factory=list)
    cuts: int = 0
    """Paths between workers that were cut."""
    restarts: int = 0
    """Starts of workers anew to arm or disarm what they start."""
    fired_before: dict[str, Counter[str]] = field(default_factory=dict)
    """For workers below which failpoints are armed: how often each had fired before."""
    frozen_by_us: set[str] = field(default_factory=set)
    seen_ranks: dict[psutil.Process, int] = field(default_factory=dict)
    """Processes of ranks, with the process of their worker."""
    late: list[str] = field(default_factory=list)
    """Workers that did not end in time with others of their group."""
    whole_s: float = 0.0
    """When all ran, served and were attached for the last time."""
    scratch: str = ""
    """Folder for temporary files."""
    shared_before: frozenset[str] = frozenset()
    """Files of shared memory that were there before it."""

    @classmethod
    def start(cls, topology: Topology, model: Path, logs: Path, certs: str = "") -> Arena:
        """Returns when the cluster serves, over TLS if there are certificates."""
        divided = "pp" if topology.stages else "tp"
        own: dict[str, dict[str, object]] = {
            name: {divided: topology.ranks_of(name), "flexible": topology.flexible}
            for name in topology.workers
        }
        tiers: dict[str, dict[str, object]] = {
            name: own[name]
            | {"kv_host_gib": HOST_GIB, "kv_store": f"disk:{logs}/{name}-kv?gib=0.05"}
            for name in topology.workers
        }
        local = "cached" if topology.fetching in ("", "any") else "never"
        singles = tiers if topology.tiers else own
        for name in topology.workers:
            if len(names := topology.group_of(name)) > 1:
                place = f"rank={names.index(name)}&ranks={len(names)}"
                singles[name] |= {"expert_group": f"{logs / name.partition('-')[0]}?{place}"}
        cluster = make_cluster(
            model,
            logs,
            own=singles,
            prefill=topology.prefill,
            decode=topology.decode,
            both=topology.both,
            num_pages=topology.num_pages,
            failpoints="live",
            poison_freed_pages=True,
            log_format="json",
            drain_s=2,
            local_prefill=local,
            operator_token=OPERATOR,
            certs=certs,
        )
        if topology.fetching:
            cluster.own = {**cluster.own, "router": {FETCHING: topology.fetching}}
        scratch = tempfile.mkdtemp(prefix="scratch-", dir=logs)
        cluster.environment = {**cluster.environment, "TMPDIR": scratch}
        if topology.tcp:
            cluster.environment = {**cluster.environment, "UCX_TLS": "tcp"}
        before = frozenset(os.listdir(SHARED))
        cluster.start_all()
        return cls(cluster, topology, scratch=scratch, shared_before=before)

    def stop(self) -> None:
        """Ends every process."""
        for process in self.cluster.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait(END_S)

    @property
    def names(self) -> list[str]:
        return list(self.cluster.processes)

    def pid(self, name: str) -> int:
        return self.cluster.processes[name].pid

    def is_alive(self, name: str) -> bool:
        return self.cluster.processes[name].poll() is None

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self._note(name, "killed")
        self.cluster.kill(name)

    async def restart(self, name: str) -> None:
        """SIGTERM: it drains and ends, and `tend` starts it again."""
        self._note(name, "killed")
        self.cluster.processes[name].terminate()
        await asyncio.to_thread(self.cluster.wait_gone, name)

    async def set_role(self, name: str, role: str) -> None:
        """As an operator does, until the worker has the role. A refusal is one: the worker is away,
        or the only one of its kind."""
        for _ in range(ROLE_TRIES):
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._ask_role, name, role)
                said = json.loads(await asyncio.to_thread(self._fetch, "router", "/roles", None))
                has = {one["worker"]: (one["role"], one["next_role"]) for one in said["workers"]}
                if has.get(name) == (role, None):
                    return
            await asyncio.sleep(0.1)

    def _ask_role(self, name: str, role: str) -> None:
        url = f"http://{self.cluster.admin_addresses['router']}/roles"
        body = json.dumps({"worker": name, "role": role}).encode()
        headers = {"authorization": f"Bearer {OPERATOR}"}
        request = urllib.request.Request(url, body, headers)
        urllib.request.urlopen(request, timeout=ADMIN_TIMEOUT_S).close()

    def start_armed(self, name: str, specification: str) -> None:
        """Starts a worker anew, and others of its group, with failpoints in the processes that it
        starts itself: only their environment reaches those. The next start has none of them. It is
        no blow."""
        self.restarts += 1
        self.cluster.kill(name)
        others = [other for other in self.topology.group_of(name) if other != name]
        for other in others:
            self.cluster.wait_gone(other)
        usual = self.cluster.own
        mine = usual[name] | {FAILPOINTS: f"live,{specification}" if specification else "live"}
        self.cluster.own = {**usual, name: mine}
        try:
            self.cluster.start(name)
        finally:
            self.cluster.own = usual
        for other in others:
            self.cluster.start(other)

    def fired_below(self, name: str) -> Counter[str]:
        """How often each failpoint has fired in processes that a worker started, in all its
        lives."""
        log = (self.cluster.logs / f"{name}.log").read_text(errors="replace")
        return Counter(FIRED_BELOW.findall(log))

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.frozen_by_us.add(name)
        self._note(name, "frozen")
        self.cluster.kill(name, signal.SIGSTOP)

    def wake(self, name: str) -> None:
        """SIGCONT."""
        self.frozen_by_us.discard(name)
        if self.is_alive(name):
            self.cluster.kill(name, signal.SIGCONT)
        self._is_awake(name)

    def _is_awake(self, name: str) -> None:
        for blow in self.blows:
            if blow.name == name and blow.kind == "frozen" and not blow.woken_s:
                blow.woken_s = time.monotonic()

    def other_ranks(self, name: str) -> list[psutil.Process]:
        """The processes of a worker's ranks but its own, as far as they live."""
        try:
            children = psutil.Process(self.pid(name)).children()
            found = [child for child in children if "engine.ranks" in child.cmdline()]
        except psutil.Error:
            return []
        self.seen_ranks |= {rank: self.pid(name) for rank in found}
        return found

    def orphans(self) -> list[str]:
        """Ranks whose worker is gone."""
        living = {process.pid for process in self.cluster.processes.values()}
        return [
            f"rank {rank.pid} outlives its worker {owner}"
            for rank, owner in self.seen_ranks.items()
            if owner not in living and rank.is_running()
        ]

    def leftovers(self) -> list[str]:
        """Files that nobody needs any more. A worker of ranks that was killed while it started has
        left a folder."""
        of_ranks = [name for name in self.topology.workers if self.topology.ranks_of(name) > 1]
        excused = sum(blow.kind == "killed" and blow.name in of_ranks for blow in self.blows)
        found = sorted(os.listdir(self.scratch))
        folders = [name for name in found if name.startswith("baton-ranks-")]
        left = [name for name in found if len(folders) > excused or name not in folders]
        left += sorted(set(os.listdir(SHARED)) - self.shared_before)
        return [f"{name} is left behind" for name in left]

    def freeze_rank(self, name: str, rank: psutil.Process) -> None:
        """SIGSTOP to one rank: then its worker does nothing, either."""
        self._note(name, "frozen")
        with contextlib.suppress(psutil.Error):
            rank.suspend()

    def wake_rank(self, name: str, rank: psutil.Process) -> None:
        """SIGCONT."""
        with contextlib.suppress(psutil.Error):
            rank.resume()
        self._is_awake(name)

    def signal_children(self, name: str, number: signal.Signals, module: str) -> None:
        """To the processes that a process has started to run a module, and that run now."""
        for child in psutil.Process(self.pid(name)).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in child.cmdline():
                    child.send_signal(number)

    async def tend(self) -> None:
        """Restarts the dead and wakes the stopped, for ever."""
        due: dict[str, float] = {}
        while True:
            now_s = time.monotonic()
            for name in self.names:
                trouble = self._trouble(name)
                if not trouble:
                    due.pop(name, None)
                elif name not in due:
                    due[name] = now_s + self._patience_s(name, trouble)
                elif now_s >= due[name]:
                    del due[name]
                    self.cluster.start(name) if trouble == "killed" else self.wake(name)
            self._look_at_groups(now_s)
            await asyncio.sleep(TEND_S)

    def _look_at_groups(self, now_s: float) -> None:
        """Whether others of a group have ended in time after the first."""
        for blow in self.blows:
            is_over = blow.woken_s and blow.woken_s < blow.at_s + GROUP_END_S
            if not blow.in_group or blow.code == EXIT_DEVICE_LOST or is_over:
                continue
            if now_s < blow.at_s + GROUP_END_S + BUSY_S:
                continue
            for name in self.topology.group_of(blow.name):
                is_there = self._born_s(name) < blow.at_s and self.is_alive(name)
                if is_there and name != blow.name and not self._trouble(name):
                    text = f"{name} has outlived its group since {blow.name} was {blow.kind}"
                    self.late += [text] * (text not in self.late)

    async def ready(self) -> None:
        """Until every process runs, serves and is attached. Raises AssertionError."""
        deadline_s = time.monotonic() + READY_S
        while not await self._is_whole():
            assert time.monotonic() < deadline_s, f"not whole again:\n{self.cluster.tail()}"
            await asyncio.sleep(TEND_S)
        self.whole_s = time.monotonic()
        if max(self.topology.ranks) > 1:
            for name in self.topology.workers:
                self.other_ranks(name)

    async def metrics(self, name: str) -> Mapping[Sample, float]:
        """Every sample of a process, by name and labels. Raises OSError."""
        text = await asyncio.to_thread(self._fetch, name, "/metrics", None)
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def arm(self, name: str, specification: str) -> None:
        """Arms failpoints of a process in place of those before. Raises OSError."""
        await asyncio.to_thread(self._fetch, name, "/failpoints", specification.encode())

    async def failpoints(self, name: str) -> str:
        """What was hit and what has fired, as JSON. Raises OSError."""
        return await asyncio.to_thread(self._fetch, name, "/failpoints", None)

    def victim(self) -> subprocess.Popen[str]:
        """A client process that reads for ever."""
        return subprocess.Popen(
            [sys.executable, "-m", "chaos.victim", self.cluster.door, self.cluster.plan.tls.ca],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _fetch(self, name: str, path: str, body: bytes | None) -> str:
        url = f"http://{self.cluster.admin_addresses[name]}{path}"
        try:
            with urllib.request.urlopen(url, body, timeout=ADMIN_TIMEOUT_S) as response:
                return response.read().decode()
        except http.client.HTTPException as error:  # It died in the middle of its answer.
            raise ConnectionError from error

    async def _is_whole(self) -> bool:
        if any(self._trouble(name) for name in self.names):
            return False
        try:
            found = await self.metrics("router")
            up = {dict(labels)["worker"] for (key, labels), value in found.items()
                  if key == "baton_worker_up" and value == 1}  # fmt: skip
            for name in self.topology.workers:
                await self.metrics(name)
        except OSError:
            return False
        return up == set(self.topology.workers)

    def _trouble(self, name: str) -> str:
        """What a process suffers from that nobody told us of, or what we did to it."""
        if not self.is_alive(name):
            if not any(b.name == name and b.kind == "killed" for b in self._unhealed(name)):
                self._note(name, "killed", self.cluster.processes[name].returncode)
            return "killed"
        if name in self.frozen_by_us:
            return ""
        try:
            state = Path(f"/proc/{self.pid(name)}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""
        if state != "T":
            return ""
        if not any(b.kind == "frozen" and not b.woken_s for b in self._unhealed(name)):
            self._note(name, "frozen")
        return "frozen"

    def _unhealed(self, name: str) -> list[Blow]:
        """Blows to the process that runs under this name now."""
        return [b for b in self.blows if b.name == name and b.at_s > self._born_s(name)]

    def _born_s(self, name: str) -> float:
        return self.cluster.started_s[name]

    def _patience_s(self, name: str, trouble: str) -> float:
        care = self.care.get(name, Care())
        return care.restart_after_s if trouble == "killed" else care.wake_after_s

    def _note(self, name: str, kind: str, code: int | None = None) -> None:
        group = self.topology.group_of(name)
        joined = len(group) > 1 and all(self._born_s(other) < self.whole_s for other in group)
        blow = Blow(name, kind, time.monotonic(), time.time(), code=code, in_group=joined)
        self.blows.append(blow)
