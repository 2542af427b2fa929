"""A release's pods run: probes, an answer over a hand-off with its trace, sockets beside network
policies, what a container may write, and how pods stop."""

from __future__ import annotations

import json
import re
import shlex
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chart_kit import CHART, KUBERNETES, RELEASE, manifests, pods, run_helm
from pod_kit import Cluster, Pod, image_environment, run_in, within
from policy_kit import Peer, admits, named_ports
from tiny_models import write_tiny_model
from waiting import wait_until

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
ROUTER = f"{RELEASE}-router"
CLIENT, PROMETHEUS = Peer({"app": "shop"}, is_near=False), Peer({"app": "prometheus"})


@dataclass
class Running:
    """A release that serves."""

    cluster: Cluster
    made: list[dict[str, Any]]
    before: dict[str, tuple[int, int]]
    """Liveness and readiness of the router while no worker was there."""

    @property
    def policies(self) -> list[dict[str, Any]]:
        return [one for one in self.made if one["kind"] == "NetworkPolicy"]

    @property
    def pods(self) -> dict[str, Pod]:
        return {pod.name: pod for pod in self.cluster.pods}

    @property
    def leaders(self) -> dict[str, Pod]:
        """Without pods of further hosts of a worker."""
        return {name: pod for name, pod in self.pods.items() if "ports" in pod.container}

    def ask(self, tokens: int) -> subprocess.Popen[str]:
        """From a pod of another namespace."""
        ca = self.pods[f"{ROUTER}-0"].folder / "certs" / "ca.crt"
        command = [
            "ip",
            "netns",
            "exec",
            self.cluster.outside["shop"],
            "baton",
            "generate",
            "Hello",
        ]
        command += ["--router", f"grpcs://{ROUTER}:50051"]
        command += ["--tls-ca", str(ca), "--max-tokens", str(tokens), "--raw", "--json"]
        path = {"PATH": f"{image_environment()['PATH']}:/usr/sbin:/sbin"}
        return subprocess.Popen(command, env=path, stdout=-1, stderr=-2, text=True)


LAPTOP = ("laptop-cpu", ["models.claim=weights"])
NIC = "env.UCX_NET_DEVICES=eth0"
SPREAD = (
    "two-hosts",
    [f"pools[{pool}].{one}" for pool in (0, 1) for one in ("gpus=0", "rdma=", NIC)]
    + ["pools[0].fabric=trusted:10.77.0.0/24"]
    + [f"pools[1].{one}" for one in ("fabric=", "nodes=1", "pp=1")]
    + ["router.replicas=1", "monitor.enabled=false"],
)
"""Prefill over two hosts, decode on a third, without GPUs."""


@pytest.fixture(scope="module", params=[LAPTOP, SPREAD], ids=["one-host", "two-hosts"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("node") / "cluster"
    name, sets = request.param
    values = KUBERNETES / "values" / f"{name}.yaml"
    made = manifests(values, *(f"--set={one}" for one in sets))
    cluster = Cluster(folder, made, "shop")
    write_tiny_model(folder / "models" / "tiny")
    for path in (folder / "models" / "tiny").iterdir():
        path.chmod(0o644)
    small = {"BATON_MODEL": "/models/tiny", "BATON_KV_MEMORY_GIB": "0.02"}
    try:
        router = cluster.up(ROUTER)
        while router.probe("livenessProbe", cluster.node) != 200:
            assert router.process is not None
            assert router.process.poll() is None, router.log
            time.sleep(0.2)
        before = {router.name: (200, router.probe("readinessProbe", cluster.node))}
        workers = [cluster.up(keeper, **small) for keeper, _ in pods(made) if keeper != ROUTER]
        for pod in (*workers, router):
            if "readinessProbe" in pod.container:
                pod.wait_ready(cluster.node)
        yield Running(cluster, made, before)
    finally:
        cluster.down()


def test_probes_say_what_is_so(running: Running) -> None:
    assert running.before == {f"{ROUTER}-0": (200, 503)}
    for pod in running.leaders.values():
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert pod.probe(name, running.cluster.node) == 200


def test_what_helm_says_leads_to_an_answer_and_its_trace(running: Running) -> None:
    """`kubectl port-forward` connects within the pod's network."""
    router = running.pods[f"{ROUTER}-0"]
    command = next(
        line for line in notes().splitlines() if line.strip().startswith("baton generate")
    )
    ca = str(router.folder / "certs" / "ca.crt")
    words = [ca if word == "ca.pem" else word for word in shlex.split(command)]
    said = run_in(router.network, str(Path(sys.executable).with_name("baton")), *words[1:])
    for name in ("router.queue", "prefill.compute", "kv.send", "kv.receive", "decode.generate"):
        assert name in said
    assert f"{RELEASE}-prefill-0" in said


def notes() -> str:
    """What helm prints at the end."""
    values = KUBERNETES / "values" / "laptop-cpu.yaml"
    # Only `install` prints them, and needs no cluster for that.
    done = run_helm("install", RELEASE, CHART, "--values", values, "--dry-run=client")
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_sockets_are_those_of_the_policies(running: Running) -> None:
    running.ask(5).communicate(timeout=60)
    pods = running.pods
    by_ip = {pod.ip: pod for pod in pods.values()}
    listened = {name: listening(pod) for name, pod in pods.items()}
    near = {name: Peer(pod.labels) for name, pod in pods.items()}
    workers = {name for name, pod in pods.items() if pod.container["name"] == "worker"}
    for name, pod in pods.items():
        if name in running.leaders:
            declared = {one["containerPort"] for one in pod.container["ports"]}
            assert named_ports(running.policies, pod.labels) == declared <= listened[name]
        for port in listened[name]:
            may = {
                who
                for who, peer in near.items()
                if admits(running.policies, pod.labels, peer, port)
            }
            others = [
                admits(running.policies, pod.labels, one, port) for one in (CLIENT, PROMETHEUS)
            ]
            if port in (50051, 8000):
                assert others == [True, True]
            elif port == 9090:
                assert others == [False, True]
            else:
                assert others == [False, False]
                assert may == (set(pods) if port == 50060 else workers)
    assert listened[f"{ROUTER}-0"] == {50050, 50051, 8000, 9090}
    seen = set()
    for name, pod in pods.items():
        for local, (host, port) in pod.sockets("-ta", "state", "connected"):
            if local[1] in listened[name] or host not in by_ip or host == pod.ip:
                continue  # It came in, or goes elsewhere, or to the pod itself, which all may.
            there = by_ip[host]
            assert admits(running.policies, there.labels, near[name], port), (
                name,
                there.name,
                port,
            )
            seen.add((name, there.name, port if port in (50050, 50060, 50070) else 0))
    prefill, decode = f"{RELEASE}-prefill-0", f"{RELEASE}-decode-0"
    assert {(prefill, f"{ROUTER}-0", 50050), (decode, f"{ROUTER}-0", 50050)} <= seen
    assert {(f"{ROUTER}-0", prefill, 50060), (f"{ROUTER}-0", decode, 50060)} <= seen
    assert {(prefill, decode, 0), (decode, prefill, 0)} & seen, "KV"
    for agent in set(pods) - set(running.leaders):
        assert (agent, prefill, 50070) in seen


def listening(pod: Pod) -> set[int]:
    """Ports at which others reach the pod."""
    found = {local for local, _ in pod.sockets("-tl")}
    return {port for host, port in found if not host.startswith(("127.", "::1"))}


def test_a_renewed_certificate_is_taken_without_a_restart(running: Running) -> None:
    router = running.pods[f"{ROUTER}-0"]

    def shown() -> str:
        address = (router.ip, 50051)
        return within(running.cluster.outside["shop"], lambda: ssl.get_server_certificate(address))

    before = shown()
    running.cluster.renew(router)
    wait_until(lambda: shown() != before, 20, poll_s=0.5)
    for pod in running.pods.values():
        running.cluster.renew(pod)
    asked = running.ask(5)
    assert (asked.communicate(timeout=60), asked.returncode)[1] == 0


def test_caches_of_the_image_lie_on_the_claim(running: Running) -> None:
    found = image_environment()
    mounts = {
        one["name"]: one["mountPath"] for one in running.cluster.pods[0].container["volumeMounts"]
    }
    for name in ("BATON_CACHE", "TRITON_CACHE_DIR", "HF_HOME"):
        assert found[name].startswith(mounts["cache"])
    assert found["HOME"] == mounts["tmp"]


def test_pods_drain_and_stop_within_their_grace(running: Running) -> None:
    """A decode worker that stops ends the answer that it is giving. All end with 0."""
    asked = running.ask(400)
    pods = running.pods
    decode = pods.pop(f"{RELEASE}-decode-0")
    wait_until(lambda: running_sequences(decode, running.cluster.node) > 0)
    code, _ = decode.stop()
    said, _ = asked.communicate(timeout=60)
    assert (code, asked.returncode) == (0, 0), (said, decode.log)
    assert json.loads(said)["usage"]["output_tokens"] == 400
    router = pods[f"{ROUTER}-0"]
    code, took_s = router.stop()
    assert code == 0, router.log
    assert took_s >= router.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    # Whoever of a worker's hosts stops, all of them drain and end.
    *agents, last = sorted(pods.values(), key=lambda pod: pod is pods[f"{RELEASE}-prefill-0"])
    agents.remove(router)
    code, _ = (agents or [last])[0].stop()
    assert (code, last.wait_ended(30)) == (0, 0), last.log


def running_sequences(pod: Pod, node: str) -> float:
    """What its metrics say."""

    def look() -> str:
        with urllib.request.urlopen(f"http://{pod.ip}:9090/metrics", timeout=5) as told:
            return str(told.read().decode())

    (found,) = re.findall(
        r"^baton_running_sequences(?:{.*})? (\S+)$", within(node, look), re.MULTILINE
    )
    return float(found)
