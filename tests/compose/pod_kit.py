"""Pods of a release, as Linux runs containers: what `helm template` prints, with a network, a root
and a user of their own.

Stood in for is what a cluster gives: addresses, the name server by /etc/hosts, volumes by folders,
the image by this tree and its environment, the secrets that cert-manager fills, with the names that
it is told, and the kubelet, which asks the probes, waits for preStop and sends SIGTERM.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from certificate_kit import authority
from chart_kit import AGENT, pods
from compose_kit import COMPOSE, ROOT
from debian import program
from waiting import wait_until

from serving.net.certificates import issue

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
USER = 10001
READY_S = 200.0
NAMES = Path("/etc/netns")


@cache
def check_rights() -> None:
    """Skips where namespaces cannot be made, or a pod's own /tmp would hide this tree."""
    program("ip")
    if COMPOSE.is_relative_to("/tmp"):
        pytest.skip("this tree lies in /tmp, which each pod has for itself")
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "t", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")


def image_environment() -> dict[str, str]:
    """What the image sets, with this tree's programs."""
    (block,) = re.findall(r"AS base\nENV ((?:.*\\\n)*.*)\n", (COMPOSE / "Dockerfile").read_text())
    found = dict(one.split("=", 1) for one in re.findall(r"\S+=\S+", block))
    found["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return found


def run_in(network: str, *command: str) -> str:
    """What a program says in a network."""
    done = subprocess.run(
        ["ip", "netns", "exec", network, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def within(network: str, act: Callable[[], T]) -> T:
    """Does something on a thread that is in the network; sockets made there stay in it."""
    found: list[T] = []

    def enter() -> None:
        with open(f"/run/netns/{network}") as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        found.append(act())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


@dataclass
class Pod:
    """A pod with one container."""

    name: str
    ip: str
    network: str
    template: Mapping[str, Any]
    """What its Deployment or StatefulSet makes."""
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def spec(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.template["spec"]
        return found

    @property
    def labels(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.template["metadata"]["labels"]
        return found

    @property
    def container(self) -> Mapping[str, Any]:
        (found,) = self.spec["containers"]
        return dict(found)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self, mounts: list[str], more: Mapping[str, str]) -> None:
        """Runs the container.

        Args:
            mounts: of the pod and the tree.
            more: variables in place of its own.
        """
        security = dict(self.container["securityContext"])
        assert security.pop("capabilities")["drop"] == ["ALL"]
        assert security == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
        assert self.spec["securityContext"]["runAsUser"] == USER
        assert self.spec["securityContext"]["runAsNonRoot"]
        (self.folder / "root").mkdir()
        (self.folder / "mounts").write_text("".join(f"{line}\n" for line in mounts))
        script = Path(__file__).with_name("pod.sh")
        command = ["ip", "netns", "exec", self.network, "unshare", "--mount", "--pid", "--ipc"]
        command += ["--uts", "--fork", "--kill-child", "--propagation", "private", str(script)]
        command += [self.name, str(self.folder / "root"), str(self.folder / "mounts"), "baton"]
        given = {**image_environment(), **self._environment(), **more}
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *self.container["args"]], env=given, stdout=log, stderr=log
            )

    def _environment(self) -> dict[str, str]:
        """As the kubelet makes it."""
        group = "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"
        fields = {"metadata.name": self.name, "status.podIP": self.ip, group: "0"}
        found = dict[str, str]()
        for one in self.container["env"]:
            if "valueFrom" in one:
                found[one["name"]] = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                value = re.sub(r"\$\((\w+)\)", lambda word: found[word[1]], str(one["value"]))
                found[one["name"]] = value
        return found

    def port(self, name: str) -> int:
        """Of the container, by its name."""
        (found,) = (one["containerPort"] for one in self.container["ports"] if one["name"] == name)
        return int(found)

    def probe(self, name: str, node: str) -> int:
        """What a probe is answered, or 0; asked from the node."""
        get = self.container[name]["httpGet"]
        url = f"http://{self.ip}:{self.port(get['port'])}{get['path']}"

        def ask() -> int:
            try:
                with urllib.request.urlopen(
                    url, timeout=self.container[name]["timeoutSeconds"]
                ) as told:
                    return int(told.status)
            except urllib.error.HTTPError as error:
                return error.code
            except OSError:
                return 0

        return within(node, ask)

    def wait_ready(self, node: str) -> None:
        process = self.process
        assert process is not None
        wait_until(
            lambda: self.probe("readinessProbe", node) == 200 or process.poll() is not None,
            READY_S,
            poll_s=0.2,
            show=lambda: self.log,
        )
        assert process.poll() is None, self.log

    def stop(self) -> tuple[int, float]:
        """As the kubelet does: preStop, SIGTERM, and no more than the grace. Code and seconds."""
        process, began = self.process, time.monotonic()
        assert process is not None
        grace_s = self.spec["terminationGracePeriodSeconds"]
        if (hook := self.container.get("lifecycle")) is not None:
            time.sleep(hook["preStop"]["sleep"]["seconds"])
        (inner,) = _children(process.pid)
        os.kill(inner, signal.SIGTERM)
        try:
            process.wait(grace_s - (time.monotonic() - began))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} outlived its grace:\n{self.log}") from None
        return process.returncode, time.monotonic() - began

    def wait_ended(self, within_s: float) -> int:
        """Its code, where others ended it."""
        assert self.process is not None
        return self.process.wait(within_s)

    def kill(self) -> None:
        """Ends the first process of its namespace, and so all. They would outlive `unshare`, since
        they have changed their user."""
        if self.process is not None and self.process.poll() is None:
            for inner in _children(self.process.pid) or [self.process.pid]:
                os.kill(inner, signal.SIGKILL)
            self.process.wait(10)

    def sockets(self, *what: str) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
        """Local and peer address and port of what `ss` shows."""
        for line in run_in(self.network, "ss", "-Hn", *what).splitlines():
            local, peer = [word for word in line.split() if re.search(r":(\d+|\*)$", word)][-2:]
            yield _address(local), _address(peer)


def _address(word: str) -> tuple[str, int]:
    host, _, port = word.rpartition(":")
    host = host.partition("%")[0].strip("[]").removeprefix("::ffff:")
    return host, 0 if port == "*" else int(port)


def _children(pid: int) -> list[int]:
    """Processes that a process started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Cluster:
    """One node, and what runs on it.

    Args:
        folder: an empty one, for volumes and logs.
        made: manifests of the release.
        outside: names of hosts beside the release, each with a network of its own.
    """

    def __init__(self, folder: Path, made: list[dict[str, Any]], *outside: str) -> None:
        check_rights()
        self._folder, self._made = folder, made
        self._keepers = dict(pods(made))
        self._id = f"kt{os.getpid()}"
        self._networks: list[str] = []
        self.node = self._network("node", "")
        self.pods: list[Pod] = []
        self.addresses = {
            name: f"10.77.0.{number + 10}" for number, name in enumerate([*self._keepers, *outside])
        }
        self.outside = {name: self._network(name, self.addresses[name]) for name in outside}
        for network in self.outside.values():  # `ip netns exec` mounts it.
            (NAMES / network).mkdir(parents=True)
            (NAMES / network / "hosts").write_text(self._hosts())
        for name in ("cache", "models"):
            (folder / name).mkdir(parents=True)
        os.chown(folder / "cache", 0, USER)
        (folder / "cache").chmod(0o2775)

    def _network(self, name: str, ip: str) -> str:
        number = len(self._networks)
        made = f"{self._id}-{number}"
        self._networks.append(made)
        ip_tool("netns", "add", made)
        ip_tool("-n", made, "link", "set", "lo", "up")
        if not ip:
            ip_tool("-n", made, "link", "add", "bridge", "type", "bridge")
            ip_tool("-n", made, "addr", "add", "10.77.0.1/24", "dev", "bridge")
            ip_tool("-n", made, "link", "set", "bridge", "up")
            return made
        ends = ("type", "veth", "peer", "name", f"v{number}", "netns", self.node)
        ip_tool("-n", made, "link", "add", "eth0", *ends)
        ip_tool("-n", self.node, "link", "set", f"v{number}", "master", "bridge", "up")
        ip_tool("-n", made, "addr", "add", f"{ip}/24", "dev", "eth0")
        ip_tool("-n", made, "link", "set", "eth0", "up")
        return made

    def up(self, keeper: str, **variables: str) -> Pod:
        """Starts a Deployment's or StatefulSet's first pod, or one of a LeaderWorkerSet's first."""
        template, ip, name = self._keepers[keeper], self.addresses[keeper], f"{keeper}-0"
        pool, is_agent, _ = keeper.partition(AGENT)
        if is_agent:
            name = f"{pool}-0-1"
        if f"{pool}{AGENT}" in self._keepers:  # As LeaderWorkerSet does.
            variables |= {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1" if is_agent else "0"}
            variables["LWS_LEADER_ADDRESS"] = f"{pool}-0.{pool}.default"
        own = self._folder / name
        own.mkdir()
        pod = Pod(name, ip, self._network(name, ip), template, own)
        self.pods.append(pod)
        pod.start(self._mounts(pod, own), variables)
        return pod

    def _hosts(self) -> str:
        names = (
            f"{ip} {name} {name}s {name}-0.{name}.default\n" for name, ip in self.addresses.items()
        )
        return f"127.0.0.1 localhost\n{''.join(names)}"

    def _mounts(self, pod: Pod, own: Path) -> list[str]:
        """What the container sees: its volumes, the tree, Python, and the names of others."""
        (own / "hosts").write_text(self._hosts())
        found = [f"ro {path} {path}" for path in (ROOT, sys.base_prefix, sys.prefix)]
        found.append(f"ro {own / 'hosts'} /etc/hosts")
        volumes = {one["name"]: one for one in pod.spec["volumes"]}
        for mount in pod.container["volumeMounts"]:
            kind, source = self._volume(volumes[mount["name"]], own)
            rights = "ro" if mount.get("readOnly") and kind == "rw" else kind
            found.append(f"{rights} {source} {mount['mountPath']}")
        return found

    def _volume(self, volume: Mapping[str, Any], own: Path) -> tuple[str, str]:
        if "secret" in volume:
            self._fill_secret(volume["secret"], own / "certs")
            return "rw", str(own / "certs")
        if claim := volume.get("persistentVolumeClaim"):
            name = "models" if claim.get("readOnly") else "cache"
            return "rw", str(self._folder / name)
        if volume["emptyDir"].get("medium") == "Memory":
            return "memory", volume["emptyDir"]["sizeLimit"].removesuffix("i")
        made = own / volume["name"]
        made.mkdir()
        made.chmod(0o777)
        return "rw", str(made)

    def _fill_secret(self, secret: Mapping[str, Any], folder: Path) -> None:
        """As cert-manager and the kubelet do: links lead to files that are put there at once."""
        (spec,) = (
            one["spec"]
            for one in self._made
            if one["kind"] == "Certificate" and one["spec"]["secretName"] == secret["secretName"]
        )
        made = issue(authority(), spec["dnsNames"] + spec.get("uris", []))
        contents = {"ca.crt": authority().pem, "tls.crt": made.cert, "tls.key": made.key}
        number = len(list(folder.glob("..of-*")))
        (now := folder / f"..of-{number}").mkdir(parents=True)
        for name, content in contents.items():
            (now / name).write_bytes(content)
            (now / name).chmod(secret["defaultMode"])
            os.chown(now / name, 0, USER)
            if number == 0:
                (folder / name).symlink_to(f"..data/{name}")
        (folder / "..new").symlink_to(now.name)
        (folder / "..new").rename(folder / "..data")

    def renew(self, pod: Pod) -> None:
        """A new certificate comes into the pod's secret."""
        (volume,) = (one for one in pod.spec["volumes"] if "secret" in one)
        self._fill_secret(volume["secret"], pod.folder / "certs")

    def down(self) -> None:
        for pod in self.pods:
            pod.kill()
        for network in reversed(self._networks):
            with suppress(AssertionError):
                ip_tool("netns", "del", network)
            shutil.rmtree(NAMES / network, ignore_errors=True)


def ip_tool(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
