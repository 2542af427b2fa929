"""The supervisor with trivial children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from console import supervisor as module
from console.supervisor import ProcessSpec, Supervisor

STOPPABLE = """
import os, signal, sys, time
def stop(*_):
    os.write(1, b'draining\\n')  # print may be under way
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print('up', flush=True)
while True:
    time.sleep(60)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
time.sleep(60)
"""


class Log:
    """Collects lines and lets a test wait for one."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._changed.set()

    async def wait_for(self, *wanted: tuple[str, str], within_s: float = 30) -> None:
        async with asyncio.timeout(within_s):
            while not all(line in self.lines for line in wanted):
                self._changed.clear()
                await self._changed.wait()


def spec(name: str, code: str, **options: object) -> ProcessSpec:
    return ProcessSpec(name, [sys.executable, "-c", code], **options)


async def test_lines_come_with_their_names_and_ranks_stop_in_order() -> None:
    log = Log()
    supervisor = Supervisor(
        [spec("worker", STOPPABLE, stop_rank=1), spec("router", STOPPABLE, stop_rank=0)], log
    )
    supervisor.start()
    await log.wait_for(("worker", "up"), ("router", "up"))
    await supervisor.stop(drain_s=20)
    assert log.lines[-2:] == [("router", "draining"), ("worker", "draining")]
    assert supervisor.pids() == {}
    assert supervisor.failed == ""


async def test_a_child_that_does_not_drain_is_killed() -> None:
    log = Log()
    supervisor = Supervisor([spec("deaf", STUBBORN)], log)
    supervisor.start()
    await log.wait_for(("deaf", "up"))
    await supervisor.stop(drain_s=0.1)
    assert "killed" in log.lines[-1][1]


async def test_kill_ends_a_running_stop() -> None:
    log = Log()
    supervisor = Supervisor([spec("deaf", STUBBORN)], log)
    supervisor.start()
    await log.wait_for(("deaf", "up"))
    stopping = asyncio.create_task(supervisor.stop(drain_s=60))
    await asyncio.sleep(0)
    supervisor.kill()
    await asyncio.wait_for(stopping, 30)


async def test_a_worker_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.01)
    log = Log()
    supervisor = Supervisor([spec("worker", STOPPABLE), spec("router", STOPPABLE)], log)
    supervisor.start()
    supervisor.settled = True
    await log.wait_for(("worker", "up"), ("router", "up"))
    os.kill(supervisor.pids()["worker"], signal.SIGKILL)
    await log.wait_for(("worker", "was ended by SIGKILL; starts again in 0.01 s"))
    async with asyncio.timeout(30):
        while log.lines.count(("worker", "up")) < 2:
            await asyncio.sleep(0.01)
    assert not supervisor.ended.is_set()
    await supervisor.stop(drain_s=20)


async def test_a_death_before_everything_works_ends_everything() -> None:
    log = Log()
    dying = spec("router", "import sys; sys.exit(3)")
    supervisor = Supervisor([dying, spec("worker", STOPPABLE)], log)
    supervisor.start()
    await asyncio.wait_for(supervisor.ended.wait(), 30)
    await supervisor.stop(drain_s=20)
    assert supervisor.failed == "router exited with status 3"


async def test_a_program_that_does_not_exist_is_reported() -> None:
    log = Log()
    supervisor = Supervisor([ProcessSpec("ghost", ["/nonexistent/program"])], log)
    supervisor.start()
    await asyncio.wait_for(supervisor.ended.wait(), 30)
    await supervisor.stop(drain_s=1)
    assert ("ghost", "cannot be started: No such file or directory") in log.lines


async def test_output_may_be_long_and_broken() -> None:
    log = Log()
    code = (
        "import os; os.write(1, b'x' * (3 << 20) + b'\\n' + b'\\xff\\n' + b'end\\n'); " + STOPPABLE
    )
    supervisor = Supervisor([spec("loud", code)], log)
    supervisor.start()
    await log.wait_for(("loud", "end"), ("loud", "up"))
    await supervisor.stop(drain_s=20)


def test_children_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = (
        "import os, time; from console.supervisor import end_with_parent; end_with_parent(); "
        f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    code = f"""
import asyncio, sys
from console.supervisor import ProcessSpec, Supervisor
async def main():
    Supervisor([ProcessSpec('child', [sys.executable, '-c', {child!r}])], print).start()
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: note.exists() and note.read_text())
    finally:
        parent.kill()
        parent.wait()
    pid = int(note.read_text())
    wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("gone", [BrokenPipeError(), OSError(5, "gone"), SystemExit(1)])
async def test_without_a_reader_everything_ends_in_order(gone: BaseException, tmp_path) -> None:
    """As in `baton up | head -2`: rich ends the process that writes into a closed pipe."""
    drained = tmp_path / "drained"
    code = STOPPABLE.replace("os.write(1, b'draining\\n')", f"open({str(drained)!r}, 'w')")
    written = []

    def write(name: str, line: str) -> None:
        written.append(line)
        raise gone

    supervisor = Supervisor([spec("router", code)], write)
    supervisor.start()
    async with asyncio.timeout(30):
        await supervisor.ended.wait()
    assert written == ["up"]
    await supervisor.stop(drain_s=20)
    assert drained.exists()
    assert supervisor.pids() == {}
    assert supervisor.failed == ""
