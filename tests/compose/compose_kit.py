"""Containers of compose/docker-compose.yml, as processes of the nursery.

What runs is what `docker-compose config` prints: command, environment, health check and grace
period, word for word. Stood in for is only what the container itself gives: its network namespace
by a loopback address of its own, the network's name server by a file of routers' addresses, its
mounts by folders, its host name by BATON_NAME.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from debian import program
from nursery import Child, fork
from stand_in_names import NAMES
from waiting import wait_until

from baton.client.clients import Client
from baton.client.generation import Generation

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE = ROOT / "compose"
HEALTHY_S = 200.0
GPUS = 4
MAX_TOKENS = 150
VARIABLES = {
    "BATON_MODEL": "/models/tiny",
    # No GPU here: slots are claimed all the same, and the model runs on the CPU.
    "BATON_DEVICE": "auto",
    "BATON_KV_MEMORY_GIB": "0.02",
    "BATON_THREADS": "1",
    "BATON_OTLP_ENDPOINT": "grpcs://router:50050",
    "BATON_RDMA_OTLP_ENDPOINT": "",
    "BATON_HOST_ADDRESS": "127.0.0.1",
}


def run_tool(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [program(command[0]), *command[1:]],
        cwd=COMPOSE,
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clean_environment() -> dict[str, str]:
    """The caller's, without what would reach the file's variables."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "COMPOSE_"))}


def services(**environment: str) -> dict[str, dict[str, Any]]:
    """Every service as docker-compose understands it, whatever its profile."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(
        run_tool("docker-compose", "config", **environment)
    )["services"]
    return found


def seconds(duration: str) -> float:
    """Of a duration such as 1m30s."""
    parts = re.findall(r"(\d+)([hms])", duration)
    assert parts, duration
    return float(sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts))


@dataclass
class Container:
    """One container."""

    name: str
    service: Mapping[str, Any]
    words: Mapping[str, str]
    """What stands for what in its command and environment."""
    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: Child | None = None

    @property
    def grace_s(self) -> float:
        return seconds(self.service["stop_grace_period"])

    def start(self) -> None:
        command = [sys.executable, "-m", "baton", *map(self._here, self.service["command"])]
        environment = self.service.get("environment", {})
        given = {key: self._here(str(v)) for key, v in environment.items()}
        given["BATON_NAME"] = self.name  # by default it holds the container's host name
        own = {**clean_environment(), **self.environment, **given}
        self._log.touch()
        self.process = fork(command, own, self._log)

    def is_healthy(self) -> bool:
        test = self.service["healthcheck"]["test"]
        assert test[:2] == ["CMD", "python"]
        command = [sys.executable, *map(self._here, test[2:])]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def wait_healthy(self) -> None:
        process = self.process
        assert process is not None
        wait_until(
            lambda: self.is_healthy() or process.poll() is not None,
            HEALTHY_S,
            show=lambda: self.log,
        )
        assert process.poll() is None, self.log

    def wait_logged(self, words: str) -> None:
        wait_until(lambda: words in self.log, HEALTHY_S, show=lambda: self.log)

    def stop(self) -> tuple[int, float]:
        """As `docker stop`: SIGTERM, and no longer than the grace period. Exit code and seconds."""
        assert self.process is not None
        began = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} outlived its grace period:\n{self.log}") from None
        return self.process.returncode, time.monotonic() - began

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def _log(self) -> Path:
        return self.logs / f"{self.name}.log"

    def _here(self, text: str) -> str:
        there = "|".join(re.escape(word) for word in self.words)
        return re.sub(there, lambda found: self.words[found[0]], text)


class Host:
    """A host that runs some of the services."""

    def __init__(self, folder: Path, gpus: int, **variables: str) -> None:
        self.folder = folder
        self.services = services(**variables)
        self.containers: list[Container] = []
        self.healthy_alone: bool | None = None
        """Whether the router was healthy before there was any worker."""
        self.network = f"127.{20 + os.getpid() % 200}.{os.getpid() // 200 % 250}"
        self.router_ip = f"{self.network}.1"
        self._names = folder / "names.json"
        self._name_routers([])
        self.environment = {
            NAMES: str(self._names),
            "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in range(gpus)),
            "OMP_NUM_THREADS": "1",
            "GRPC_VERBOSITY": "error",
        }
        for name in ("slots", "cache", "models", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.make_certificates()

    def up(self, service: str, **words: str) -> Container:
        """Starts one more container of a service; `words` are replaced, too."""
        number = len(self.containers) + 1
        spec = self.services[service]
        name = f"{service}-{number}"
        own = self.folder / name
        own.mkdir()
        on_host_network = spec.get("network_mode") == "host"
        ip = "127.0.0.1" if on_host_network else f"{self.network}.{number}"
        stands_for = {
            **words,
            "0.0.0.0": "0.0.0.0" if on_host_network else ip,
            "127.0.0.1:": f"{ip}:",
            # For spans, of which gRPC looks the receiver up.
            "grpcs://router:50050": f"grpcs://{self.router_ip}:50050",
            "/certs": str(self.folder / "certs"),
            "/var/cache/baton": str(self.folder / "cache"),
            "/run/baton/slots": str(self.folder / "slots"),
            "/models": str(self.folder / "models"),
            "/tmp": str(own),
        }
        cache = {"BATON_CACHE": str(self.folder / "cache")}  # the image's, for the mounted volume
        made = Container(
            name, spec, stands_for, self.folder / "logs", {**self.environment, **cache}
        )
        self.containers.append(made)
        if service == "router":
            self._name_routers([*self.router_ips, ip])
        made.start()
        return made

    def make_certificates(self) -> None:
        """What the service `certs` does."""
        certs = Container("certs", self.services["certs"], {"/certs": str(self.folder / "certs")},
                          self.folder / "logs", self.environment)  # fmt: skip
        certs.start()
        assert certs.process is not None
        assert certs.process.wait(60) == 0, certs.log

    @property
    def ca(self) -> str:
        """What clients trust."""
        return str(self.folder / "certs" / "router" / "ca.pem")

    def forget(self, router: Container) -> None:
        """Its name does not stand for this router any more, as when the container has ended."""
        self._name_routers([ip for ip in self.router_ips if ip != router.words["0.0.0.0"]])

    def client(self, ip: str = "") -> Client:
        """A client of the first router, unless told otherwise."""
        address = f"grpcs://{ip or self.router_ip}:50051"
        return Client(address, tls_ca=self.ca, tls_name="localhost")

    @property
    def router_ips(self) -> list[str]:
        """Those that the name `router` stands for."""
        ips: list[str] = json.loads(self._names.read_text())["router"]
        return ips

    def _name_routers(self, ips: list[str]) -> None:
        written = self._names.with_suffix(".new")
        written.write_text(json.dumps({"router": ips}))
        written.replace(self._names)

    def down(self) -> None:
        for container in self.containers:
            if container.process is not None and container.process.poll() is None:
                container.kill()


def ask(host: Host, text: str, max_tokens: int = MAX_TOKENS) -> Generation:
    with host.client() as client:
        return client.generate(text, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
