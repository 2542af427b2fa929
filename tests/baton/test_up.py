"""A router and workers as processes: ready, drained, and failures before they are ready."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from waiting import until

from baton import up
from baton.supervisor import ProcessSpec

FAKE = str(Path(__file__).with_name("fake_process.py"))


class Discovery(BaseHTTPRequestHandler):
    """The router's page of attached workers: one more of them every time it is asked."""

    workers: tuple[str, ...] = ("prefill-0", "decode-0")
    asked = 0

    def do_GET(self) -> None:
        attached = self.workers[: Discovery.asked]
        Discovery.asked += 1
        self.send_response(200)
        self.end_headers()
        targets = [{"targets": [], "labels": {"worker": name}} for name in attached]
        self.wfile.write(json.dumps(targets).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def discovery() -> Iterator[str]:
    """Address of the page."""
    Discovery.asked = 0
    server = HTTPServer(("127.0.0.1", 0), Discovery)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, discovery: str) -> up.Plan:
    """A real plan whose processes are fakes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = up.plan(up.UpOptions(model="/m", grpc_port=0, http_port=0, admin_port=0, drain_s=10))
    addresses = {"router": plan.router_address, **dict(plan.worker_addresses)}
    specs = tuple(
        replace(spec, argv=[sys.executable, FAKE, addresses[spec.name]]) for spec in plan.specs
    )
    return replace(plan, specs=specs, admin_address=discovery)


async def test_up_waits_for_all_and_drains_the_router_first(plan: up.Plan) -> None:
    lines: list[tuple[str, str]] = []
    waited_for: list[str] = []
    async with up.running(plan, lambda *line: lines.append(line)) as supervisor:
        await up.wait_until_ready(plan, supervisor, waited_for.append)
        assert supervisor.settled
        assert Discovery.asked >= 3, "ready before every worker was attached"
        # They say so once they serve, and a pipe lies between.
        await until(lambda: said(lines, "serving") == set(supervisor.pids()))
    assert waited_for[0] == "prefill-0, decode-0"
    assert waited_for[-1] == "router"
    drained = [name for name, line in lines if line == "drained"]
    assert drained[0] == "router"
    assert sorted(drained) == ["decode-0", "prefill-0", "router"]


def said(lines: list[tuple[str, str]], what: str) -> set[str]:
    """Names of the processes that did."""
    return {name for name, line in lines if line == what}


async def test_a_worker_that_cannot_start_is_an_error_at_once(plan: up.Plan) -> None:
    broken = ProcessSpec("decode-0", [sys.executable, "-c", "raise SystemExit('no such model')"])
    plan = replace(plan, specs=(*plan.specs[:2], broken))
    lines: list[tuple[str, str]] = []
    with pytest.raises(up.UpError, match="decode-0 exited with status 1"):
        async with up.running(plan, lambda *line: lines.append(line)) as supervisor:
            await up.wait_until_ready(plan, supervisor)
    assert ("decode-0", "no such model") in lines
    assert supervisor.pids() == {}


def test_no_two_processes_get_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = up.plan(up.UpOptions(model="/m", prefill=2, decode=2))
    flags = ("--listen", "--internal-listen", "--http-listen", "--admin")
    taken = [
        value
        for spec in plan.specs
        for flag, value in zip(spec.argv, spec.argv[1:], strict=False)
        if flag in flags
    ]
    assert len(taken) == 4 + 2 * 4
    assert len(set(taken)) == len(taken)
