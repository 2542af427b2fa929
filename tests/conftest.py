"""What every test can use: `--slow`, reasons for skipping, the demo model, names of hosts.

`suite_plugins` measures runs, and orders those that have only some minutes (`--minutes`).
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hard_end import HardEnd
from hypothesis import HealthCheck, settings
from nursery import ranks_here
from stand_in_names import Names, lookup
from suite_plugins import Files, Progress, Turn, this_turn

from serving.garbage import set_apart
from serving.models import demo_model as demo

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""`make test` has one process a core: threads that wait for each other took most of its CPU time.
Torch reads it when it is imported."""

# An example may take long on a machine that stands still for a moment. Where `CI` is set examples
# are the same every time.
for name, examples in (("baton", 200), ("slow", 2000)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ,
        database=None if "CI" in os.environ else settings.default.database,
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")
    parser.addoption("--clients", action="store_true", help="run clients of others, too")
    parser.addoption("--minutes", type=float, help="begin no test after these; see suite_plugins")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # As in the background of a shell.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.load_profile("slow" if config.getoption("--slow") else "baton")
    config.pluginmanager.register(Files())
    config.pluginmanager.register(HardEnd())
    if (minutes := config.getoption("--minutes")) is not None:
        config.pluginmanager.register(Turn(this_turn(), minutes))


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal and (config.getoption("--slow") or config.getoption("--clients")):
        is_whole = config.getoption("--minutes") is None
        config.pluginmanager.register(Progress(terminal, is_whole=is_whole))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("matrix"):
            item.add_marker(pytest.mark.slow)
    if not config.getoption("--slow"):
        _skip(items, "slow", "takes minutes: run with --slow")
    if not config.getoption("--clients"):
        _skip(items, "clients", "a client of others: run with --clients")
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        _skip(items, "gpu", "needs a CUDA device, and there is none here")


def pytest_collection_finish() -> None:
    set_apart()  # What was imported, or each full collection takes a second of some test's time.


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch = sys.modules.get("torch")
    if item.get_closest_marker("gpu") and torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception as error:  # Its kind differs between releases of torch.
            pytest.skip(f"an earlier test has lost the device of this process: {type(error)}")


def _has_gpu() -> bool:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return False
    asked = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked() -> Iterator[None]:
    """But for those that a process starts that a test has started."""
    with ranks_here():
        yield


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, from the cache or fetched now."""
    try:
        return demo.ensure()
    except demo.DemoModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo model cannot be had here: {error}")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Of hosts, with the addresses that they stand for in this process; the test changes them."""
    table: Names = {}
    monkeypatch.setattr(socket, "getaddrinfo", lookup(lambda: table, socket.getaddrinfo))
    return table
