"""`baton up` as people run it, with two routers: processes that end are started again."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import urllib.request

import psutil
import pytest
from settings_kit import variables_of
from tiny_models import write_tiny_model
from waiting import wait_until

from baton.client.clients import Client
from baton.errors import BatonError
from telemetry.names import FINGERPRINT
from worker.watchdog import EXIT_HUNG

WAIT_S = 100.0
FOREIGN = ("jinja2", "tokenizers", "torch", "safetensors", "grpc", "xxhash", "local")
"""Modules in the working directory of `baton up` that are not what its processes mean."""
SMALL = ("--prefill", "0", "--decode", "0", "--both", "1")
"""Of workers one, which is soon there."""


def command(model, *options: str) -> list[str]:
    """`baton up` at free ports."""
    ports = [word for name in ("--port", "--http-port", "--admin-port") for word in (name, "0")]
    shared = ["--model", str(model), "--device", "cpu", *ports]
    return [sys.executable, "-P", "-m", "baton", "up", *shared, *options]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """The process and its log. At the end its terminal is closed, which ends everything."""
    tmp_path = tmp_path_factory.mktemp("up")
    settings = {"failpoints": "live", "step_timeout_s": 4, "num_pages": 200}
    environment = {**os.environ, **variables_of(settings)}
    model = write_tiny_model(tmp_path / "model")
    log = tmp_path / "log"
    (foreign := tmp_path / "foreign").mkdir()
    for name in FOREIGN:
        (foreign / f"{name}.py").write_text("open(__file__ + '.ran', 'w').close()\nexit(3)\n")
    ours, terminal = os.openpty()
    process = subprocess.Popen(
        command(model, "--routers", "2"),
        cwd=foreign,
        env=environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=_owns_terminal,
    )
    os.close(terminal)
    stopped, stop = os.pipe()
    log.touch()
    reader = threading.Thread(target=_copy, args=(ours, log, stopped))
    reader.start()
    yield process, log
    children = psutil.Process(process.pid).children(recursive=True)
    os.close(stop)
    reader.join()
    os.close(ours)
    assert process.wait(60) == 0, log.read_text()
    assert len(children) >= 4
    assert not psutil.wait_procs(children, 10)[1], "a parent that is busy reaps late"


def _copy(terminal: int, log, stopped: int) -> None:
    """Copies the lines of a terminal without colours, until the pipe's other end is closed."""
    rest = b""
    with log.open("ab", buffering=0) as file:
        while stopped not in select.select([terminal, stopped], [], [])[0]:
            *lines, rest = (rest + os.read(terminal, 1 << 16)).split(b"\n")
            file.write(b"".join(re.sub(rb"\x1b\[\d*m", b"", line) + b"\n" for line in lines))
    os.close(stopped)


def _owns_terminal() -> None:
    """Makes the process a session leader with its standard input as terminal.

    It takes a hang-up as usual, even if these tests run under nohup.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def until(condition, log) -> None:
    wait_until(condition, WAIT_S, poll_s=0.1, show=log.read_text)


def said(log, pattern: str) -> str:
    """What the pattern's group matches in the log."""
    found = re.search(pattern, log.read_text())
    assert found, log.read_text()
    return found[1]


def answers(client) -> bool:
    options = {"max_tokens": 4, "ignore_eos": True, "timeout_s": 20}
    try:
        return len(client.generate(token_ids=[5, 6, 7], **options).token_ids) == 4
    except BatonError:
        return False


@pytest.mark.timeout(300)
def test_a_router_that_dies_is_started_again_and_meanwhile_the_other_serves(running):
    process, log = running
    until(lambda: "Ctrl-C" in log.read_text(), log)
    lines = {child.pid: child.cmdline() for child in psutil.Process(process.pid).children()}
    (router,) = (pid for pid, line in lines.items() if "router-0" in line)
    os.kill(router, signal.SIGKILL)
    with Client(said(log, r"gRPC +(\S+)"), retries=False) as client:
        until(lambda: "router-0 │ was ended by SIGKILL; starts again" in log.read_text(), log)
        assert answers(client)
    until(lambda: serves_again(log), log)


def test_nobody_imports_from_the_working_directory(running):
    _, log = running
    foreign = log.parent / "foreign"
    until(lambda: "Ctrl-C" in log.read_text() or list(foreign.glob("*.ran")), log)
    assert not list(foreign.glob("*.ran"))
    assert len(list(foreign.iterdir())) == len(FOREIGN)


def serves_again(log) -> bool:
    """The first router is there for a second time."""
    return len(re.findall(r"router-0 │ .* router serves", log.read_text())) == 2


@pytest.mark.timeout(300)
def test_a_worker_whose_step_hangs_is_started_again(running):
    process, log = running
    until(lambda: "Ctrl-C" in log.read_text(), log)
    router = said(log, r"gRPC +(\S+)")
    admin = said(log, r"baton trace --admin (\S+)")
    with Client(router, retries=False) as client:
        until(lambda: answers(client), log)
        with urllib.request.urlopen(f"http://{admin}/discovery", timeout=10) as page:
            found = json.load(page)
        admins = {one["labels"]["worker"]: one["targets"][0] for one in found}
        assert len({one["labels"][FINGERPRINT] for one in found}) == 1
        url = f"http://{admins['decode-0']}/failpoints"
        urllib.request.urlopen(url, data=b"engine.step=hang@1", timeout=10).close()
        restarted = f"exited with status {EXIT_HUNG}; starts again in"
        answers(client)  # may end well: another attempt, elsewhere
        until(lambda: restarted in log.read_text(), log)
        until(lambda: answers(client), log)
        assert process.poll() is None
        assert log.read_text().count(restarted) == 1


@pytest.mark.parametrize("stderr_too", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_log_that_nobody_reads_any_more_ends_everything(tmp_path, stderr_too):
    """`baton up | head -2` and `baton up 2>&1 | head -2`."""
    model = write_tiny_model(tmp_path / "model")
    told = subprocess.STDOUT if stderr_too else subprocess.DEVNULL
    process = subprocess.Popen(command(model, *SMALL), stdout=subprocess.PIPE, stderr=told)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    process.stdout.close()
    process.wait(40)
    assert not psutil.wait_procs(children, 10)[1], "a parent that is busy reaps late"
