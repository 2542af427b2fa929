"""When a worker is taken for hung, and when it only slept."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Iterator

from engine.types import EngineLoad
from worker.watchdog import EXIT_DEVICE_LOST, EXIT_HUNG, LOOK_EVERY_S, STUCK_AFTER, Watchdog


class Loop:
    """A step loop and a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.load = EngineLoad(progress=1)
        self.turns: Iterator[int] = itertools.count()
        """Of the transfer thread, at each look."""
        self.watchdog = Watchdog(
            lambda: self.load, lambda: next(self.turns), self._stop, 5.0, lambda: self.now_s
        )

    async def _stop(self) -> None:
        raise AssertionError("nobody asked for it")

    def look_for(self, seconds: float) -> str:
        """Looks as often as it does; what was hung at any time."""
        hung = ""
        for _ in range(round(seconds / LOOK_EVERY_S)):
            self.now_s += LOOK_EVERY_S
            hung = hung or self.watchdog.hung()
        return hung

    def step(self, **load: float) -> None:
        self.load = EngineLoad(progress=self.load.progress + 1, **load)


def test_a_counter_that_stands_still_is_a_hung_step() -> None:
    loop = Loop()
    assert not loop.look_for(4.5)
    loop.step()
    assert not loop.look_for(5.0)
    assert loop.look_for(0.5) == "a step"


def test_a_transfer_thread_that_stands_still_is_hung_however_long_a_step_may_be() -> None:
    loop = Loop()
    loop.turns = itertools.repeat(7)
    loop.step(long_step_ms=20_000.0)
    assert not loop.look_for(5.0)
    assert loop.look_for(0.5) == "the transfer thread"


def test_an_announced_step_gets_its_time() -> None:
    loop = Loop()
    loop.step(long_step_ms=20_000.0)
    assert not loop.look_for(24.5)
    assert loop.look_for(1.0)


def test_a_process_that_was_stopped_is_not_hung_when_it_wakes() -> None:
    """Its step had no more of a chance than its watchdog; it gets what it had left."""
    loop = Loop()
    loop.watchdog.hung()
    assert not loop.look_for(3.0)
    loop.now_s += 600.0
    assert not loop.watchdog.hung()
    assert not loop.look_for(1.5)
    assert loop.look_for(1.0)


def run_worker_like(
    body: str, stuck_after: float = STUCK_AFTER
) -> subprocess.CompletedProcess[str]:
    """Runs the body in a process that is watched.

    Args:
        stuck_after: so many step timeouts, 0.5 s each, until the interpreter's timer goes off; late
            where the watch is to be the first on a machine that stands still for a second.
    """
    script = f"""
    import asyncio, ctypes, itertools, time
    from engine.types import EngineLoad
    from worker import watchdog as worker_watchdog
    from worker.watchdog import Watchdog, device_lost

    worker_watchdog.STUCK_AFTER = {stuck_after}
    load = EngineLoad(progress=1)

    async def stop_serving():
        print("not serving", flush=True)

    async def main():
        watchdog = Watchdog(lambda: load, itertools.count().__next__, stop_serving, 0.5)
        watching = asyncio.create_task(watchdog.watch())
        await asyncio.sleep(0.1)
    """
    script = textwrap.dedent(script) + textwrap.indent(textwrap.dedent(body), "    ")
    script += "\nasyncio.run(main())\n"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_hung_step_ends_the_process_with_every_stack_in_its_log() -> None:
    ended = run_worker_like("await asyncio.sleep(60)", stuck_after=40.0)
    assert ended.returncode == EXIT_HUNG, ended.stderr
    assert ended.stdout == "not serving\n"
    assert "most recent call first" in ended.stderr
    assert "dump_and_exit" in ended.stderr


def test_a_hung_event_loop_ends_the_process_too() -> None:
    ended = run_worker_like("time.sleep(60)")
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "in main" in ended.stderr


def test_last_words_that_do_not_come_to_an_end_hold_nothing_up() -> None:
    ended = run_worker_like("""
        watchdog._stop_serving = asyncio.Event().wait
        await asyncio.sleep(60)
    """)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr


def test_a_held_gil_ends_the_process_too() -> None:
    """No thread of Python's runs any more: the interpreter's timer needs none."""
    ended = run_worker_like("ctypes.PyDLL(None).sleep(60)")
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr


def test_a_lost_device_ends_the_process_at_once() -> None:
    ended = run_worker_like("device_lost()")
    assert ended.returncode == EXIT_DEVICE_LOST
