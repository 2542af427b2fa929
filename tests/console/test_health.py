"""The health check that probes run, against a real server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from typer.testing import CliRunner

from baton.addresses import advertised, reachable
from baton.grpc_options import server_options
from console.cli import app
from console.health import check, main


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2), options=server_options())
    servicer = health.HealthServicer()
    servicer.set("ready", HealthCheckResponse.SERVING)
    servicer.set("busy", HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(5)


@pytest.mark.parametrize(
    ("service", "status"),
    [("", "SERVING"), ("ready", "SERVING"), ("busy", "NOT_SERVING"), ("nobody", "NOT_FOUND")],
)
def test_the_status_of_a_service(address: str, service: str, status: str) -> None:
    assert check(address, service) == status
    assert main([address, "--service", service]) == (status != "SERVING")


def test_nobody_there(tmp_path: Path) -> None:
    assert check("127.0.0.1:1", timeout_s=1) in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert main([f"@{tmp_path / 'none'}"]) == 1
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    assert main([f"@{tmp_path / 'binary'}"]) == 1


@pytest.mark.parametrize("address", ["localhost", "http://localhost:8000"])
def test_what_is_no_address_is_wrong_use(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([address])
    assert ended.value.code == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_the_address_may_stand_in_a_file(address: str, tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text(f"{address}\n")
    assert main([f"@{file}"]) == 0


def test_both_commands_say_the_same(address: str) -> None:
    patient = [address, "--timeout", "30", "--service"]
    probe = [sys.executable, "-m", "console.health", *patient]
    for service, code in (("ready", 0), ("busy", 1)):
        probed = subprocess.run([*probe, service], capture_output=True, text=True, check=False)
        shown = CliRunner().invoke(app, ["health", *patient, service])
        assert (probed.returncode, probed.stdout) == (shown.exit_code, shown.output)
        assert probed.returncode == code


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("console.health", {"torch", "rich", "pydantic"}), ("console.cli", {"torch", "numpy"})],
)
def test_a_command_imports_nothing_heavy(module: str, heavy: set[str]) -> None:
    """Who installs a client, or a router, has no torch."""
    asked = f"import sys, {module}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    assert reachable("0.0.0.0:7") == "box:7"
    assert reachable("[::]:7", "10.0.0.1") == "10.0.0.1:7"
    assert reachable("127.0.0.1:7", "10.0.0.1") == "127.0.0.1:7"
    assert advertised("0.0.0.0:7", "") == "box:7"
    assert advertised("0.0.0.0:7", ":0") == "box:7"
    assert advertised("0.0.0.0:7", "nat:9") == "nat:9"
    assert advertised("10.0.0.1:7", "nat:0") == "nat:7"
