"""A step is freed when it is settled. One that only a collection of garbage frees keeps its plan,
its result and their memory until then, and thousands of them make that collection long."""

from __future__ import annotations

import gc

from timed_device import TimedExecutor, running_loop, submit
from waiting import wait_until

STEPS = 200


def test_steps_leave_nothing_for_the_garbage_collector() -> None:
    executor = TimedExecutor()
    executor.step_s = 1e-4
    loop, _ = running_loop(executor)
    gc.collect()
    gc.disable()
    try:
        submit(loop, 0, output=STEPS)
        wait_until(lambda: loop.load.steps >= STEPS and not loop.load.requests)
        assert gc.collect() < STEPS / 2
    finally:
        gc.enable()
        loop.stop()
