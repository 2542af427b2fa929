"""`baton trace` where there is no trace to be had: one line, whatever answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from console.cli import FAILED, app
from console.tracing import traces


@pytest.fixture
def no_http() -> Iterator[str]:
    """Answers, but not in HTTP: as a gRPC port does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"\0\0\6\4\0\0\0\0\0\0\5\0\0\x40\0\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(5)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def run(*arguments: str) -> str:
    """What is said of the error."""
    result = CliRunner().invoke(app, ["trace", *arguments])
    assert result.exit_code == FAILED, result.exception
    assert not result.stdout
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


@pytest.fixture(autouse=True)
def no_jaeger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(traces.JAEGER_URL, raising=False)


def test_nobody_is_there() -> None:
    assert "does not answer" in run("--admin", free_address())


def test_somebody_else_is_there(no_http: str) -> None:
    assert "does not answer" in run("--admin", no_http)


def test_what_is_no_address() -> None:
    assert "does not answer" in run("--admin", "a b:1")


def test_an_id_that_is_none() -> None:
    assert "/traces/a%20b%2Fc" in run("a b/c", "--admin", free_address())


def test_an_id_of_openais_api_names_its_trace() -> None:
    assert "/traces/0af7 " in run("chatcmpl-0af7", "--admin", free_address())
