"""Clients reach a router behind TLS, with a certificate that they were told to trust."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from debian import program
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from baton.addresses import ask_loopback_directly
from baton.client.channels import check_address
from baton.client.clients import Client
from baton.grpc_options import server_options
from baton.inference.v1 import inference_pb2 as pb
from baton.inference.v1 import inference_pb2_grpc as pb_grpc

TRUST = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
"""gRPC reads it once a process, so that each case here has a process of its own."""
ASKS = """
import asyncio, sys
from baton.client.clients import AsyncClient, Client
from baton.errors import UnreachableError
from console.health import check

async def names(address):
    async with AsyncClient(address, retries=False) as client:
        return [model.name for model in await client.models()]

address = sys.argv[1]
print(check(address, timeout_s=10))
try:
    with Client(address, retries=False) as client:
        print([model.name for model in client.models()], asyncio.run(names(address)))
except UnreachableError:
    print("unreachable")
"""


class OneModel(pb_grpc.InferenceServiceServicer):
    """A router in as much as these tests need one."""

    def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="tiny")])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of localhost, signed by itself; its key lies beside it."""
    folder = tmp_path_factory.mktemp("tls")
    command = [program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder / "cert.pem"


@pytest.fixture(scope="module")
def port(certificate: Path) -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(2), options=server_options())
    pb_grpc.add_InferenceServiceServicer_to_server(OneModel(), server)
    healthy = health.HealthServicer()
    healthy.set("", HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    pair = ((certificate.parent / "key.pem").read_bytes(), certificate.read_bytes())
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield port
    server.stop(None).wait(5)


def asks(address: str, **environment: str) -> list[str]:
    """What the clients saw: health, then models."""
    env = {name: value for name, value in os.environ.items() if name != TRUST} | environment
    command = [sys.executable, "-c", ASKS, address]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split("\n")[:2]


def test_tls_with_a_trusted_certificate(port: int, certificate: Path) -> None:
    seen = asks(f"grpcs://localhost:{port}", **{TRUST: str(certificate)})
    assert seen == ["SERVING", "['tiny'] ['tiny']"]


def test_no_proxy_stands_before_this_machine(certificate: Path, port: int) -> None:
    """It may be a company's, which reaches no loopback address."""
    dead = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:1")
    seen = asks(f"grpcs://localhost:{port}", **{TRUST: str(certificate)}, **dead)
    assert seen == ["SERVING", "['tiny'] ['tiny']"]


def test_commands_ask_this_machine_without_a_proxy() -> None:
    for given, exempt in (
        ({}, None),
        ({"HTTP_PROXY": "http://p"}, "localhost,127.0.0.1,::1"),
        ({"http_proxy": "http://p", "no_proxy": "a,::1"}, "a,::1,localhost,127.0.0.1"),
    ):
        ask_loopback_directly(given)
        assert given.get("no_proxy") == given.get("NO_PROXY") == exempt


def test_neither_without_trust_nor_in_clear(port: int) -> None:
    assert asks(f"grpcs://localhost:{port}") == ["UNAVAILABLE", "unreachable"]
    assert asks(f"localhost:{port}") == ["UNAVAILABLE", "unreachable"]


@pytest.mark.parametrize(
    "address",
    ["host:1", "host:65535", "[::1]:50051", "grpcs://host:443", "unix:/run/s", "dns:///host:1"],
)
def test_what_is_an_address(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "grpcs://host", "http://host:1"],
)
def test_what_is_none(address: str) -> None:
    """gRPC would go to port 443, or to another one than was named."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        Client(address)
