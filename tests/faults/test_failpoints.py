"""Failpoints: what a specification arms, and what a hit then does, in processes of their own."""

from __future__ import annotations

import ast
import json
import logging
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from waiting import wait_until

from faults import failpoints
from faults.failpoints import FailpointError, FailpointsError
from router.settings import RouterDebug, RouterSettings
from serving.admin import AdminServer
from serving.settings import resolve
from worker.settings import WorkerDebug, WorkerSettings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def child(code: str) -> subprocess.Popen[str]:
    setup = "from faults import failpoints; from faults.failpoints import *; import time\n"
    return subprocess.Popen(
        [sys.executable, "-c", setup + code], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )


def test_nothing_happens_where_nothing_is_armed() -> None:
    failpoints.hit("decode.before_grant")
    failpoints.hit("of no process")  # not even looked up
    assert failpoints.counts() == {}


def test_the_nth_hit_fires_once() -> None:
    failpoints.arm("decode.before_grant=raise@3")
    failpoints.hit("decode.before_grant")
    failpoints.hit("decode.before_grant")
    with pytest.raises(FailpointError):
        failpoints.hit("decode.before_grant")
    failpoints.hit("decode.before_grant")
    assert failpoints.counts()["decode.before_grant"] == (4, 1)


def test_a_wait_is_cut_short_where_it_is_asked_for_and_nowhere_else() -> None:
    failpoints.arm("decode.grant_timeout=raise@2")
    waits_s = [failpoints.wait_s("decode.grant_timeout", 30.0) for _ in range(3)]
    assert waits_s == [30.0, 0.1, 30.0]


def test_without_a_number_every_hit_fires_and_the_place_chooses_the_error() -> None:
    failpoints.arm("transfer.before_push=raise")
    for _ in range(2):
        with pytest.raises(KeyError):
            failpoints.hit("transfer.before_push", error=KeyError)


def test_only_hits_with_the_key_count() -> None:
    failpoints.arm("prefill.submitted=raise~137@2")
    for tokens in (5, 137, 5):
        failpoints.hit("prefill.submitted", tokens)
    with pytest.raises(FailpointError):
        failpoints.hit("prefill.submitted", 137)


def test_arming_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        failpoints.arm("decode.tokens=sleep:0.01@1")
        failpoints.hit("decode.tokens")
    assert "ARMED" in caplog.text
    assert "fires" in caplog.text


@pytest.mark.parametrize(
    "specification",
    [
        "decode.nowhere=kill",
        "decode.tokens=explode",
        "decode.tokens=sleep",
        "decode.tokens=kill:3",
        "decode.tokens=kill@0",
        "decode.tokens",
    ],
)
def test_a_specification_that_says_nothing_sensible_is_refused(specification: str) -> None:
    with pytest.raises(FailpointsError):
        failpoints.arm(specification)
    with pytest.raises(ValidationError):
        WorkerDebug(failpoints=specification)
    with pytest.raises(ValidationError):
        RouterDebug(failpoints=specification)


def test_the_environment_arms_them_through_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_DEBUG_FAILPOINTS", "engine.step=hang@2")
    for kind, table in ((WorkerSettings, "worker"), (RouterSettings, "router")):
        assert resolve(kind, table, {}).settings.debug.failpoints == "engine.step=hang@2"


def test_kill_ends_the_process_there_and_then() -> None:
    process = child("arm('decode.tokens=kill'); hit('decode.tokens'); print('alive')")
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == -signal.SIGKILL


def test_a_stopped_process_goes_on_when_told() -> None:
    process = child("arm('decode.tokens=stop'); hit('decode.tokens'); print('on')")
    state = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=30)[0] == "on\n"


def test_a_held_gil_stops_every_thread_and_a_sleep_only_its_own() -> None:
    """A thread that ticks every 10 ms shows the gap. A machine that stands still shows one, too,
    but not every time."""
    process = child("""
import threading
def longest_gap(action):
    arm(f"engine.turn={action}@1")
    over, ticks = threading.Event(), [time.monotonic()]
    def tick():
        while not over.wait(0.01):
            ticks.append(time.monotonic())
    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.1)
    hit("engine.turn")
    over.set(); thread.join()
    ticks.append(time.monotonic())
    return max(after - before for before, after in zip(ticks, ticks[1:]))
assert longest_gap("gil:1") > 0.9
assert any(longest_gap("sleep:1") < 0.9 for _ in range(5))
""")
    assert process.wait(60) == 0


async def test_live_failpoints_are_armed_over_the_admin_port() -> None:
    import asyncio

    def post(address: str, body: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://{address}/failpoints", data=body.encode())
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    closed = AdminServer("127.0.0.1:0", CollectorRegistry())
    failpoints.arm("live")
    opened = AdminServer("127.0.0.1:0", CollectorRegistry())
    await closed.start()
    await opened.start()
    try:
        failpoints.hit("decode.tokens")
        assert failpoints.counts()["decode.tokens"] == (1, 0)
        assert (await asyncio.to_thread(post, closed.address, "engine.step=kill"))[0] == 404
        assert (await asyncio.to_thread(post, opened.address, "nonsense"))[0] == 400
        status, told = await asyncio.to_thread(post, opened.address, "engine.step=raise@1")
        assert status == 200
        assert json.loads(told)["engine.step"] == [0, 0]
        with pytest.raises(FailpointError):
            failpoints.hit("engine.step")
        assert failpoints.is_live()
    finally:
        await closed.stop()
        await opened.stop()


PASSING = ("failpoints.hit", "failpoints.wait_s")


def test_the_table_is_the_failpoints_in_the_code() -> None:
    """Each is passed somewhere, and nothing is passed that the table does not know."""
    passed: Counter[str] = Counter()
    for room in (
        "baton",
        "router",
        "worker",
        "worker_base",
        "prefill_service",
        "decode_service",
        "fetch_service",
        "engine",
        "kv_transfer",
    ):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in PASSING:
                    for part in ast.walk(node.args[0]):
                        if isinstance(part, ast.Constant):
                            passed[str(part.value)] += 1
    assert set(passed) == set(failpoints.POINTS)
