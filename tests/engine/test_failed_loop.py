"""An error in the step loop's own thread fails requests; nobody waits for ever."""

from __future__ import annotations

import numpy as np
from timed_device import PAGE_TOKENS, PAGES, SLOTS, TimedExecutor
from waiting import wait_until

from engine.bounds import Bounds
from engine.loop.step_loop import StepLoop
from engine.pages.blocks import BlockManager
from engine.sampling import Sampler
from engine.schedule.scheduler import Scheduler
from engine.types import FailureReason, Request, RequestFailed, SamplingParams, StopRules


def test_requests_fail_when_the_loop_does_and_so_do_those_that_come_later() -> None:
    config = Bounds(
        max_sequences=2, max_step_tokens=64, max_context_tokens=PAGES * PAGE_TOKENS,
        page_size=PAGE_TOKENS, eos_token_ids=frozenset(),
    )  # fmt: skip
    executor = TimedExecutor()
    loop = StepLoop(Scheduler(config, BlockManager(PAGES), Sampler(SLOTS, 97, "cpu", [])), executor)
    lost: list[None] = []
    failed: dict[bytes, FailureReason] = {}

    def submit(number: int) -> None:
        stop = StopRules(500, ignore_eos=True)
        ids = np.full(5, number, np.int32)
        request = Request(bytes([number]) * 16, ids, SamplingParams(temperature=0.0), stop)

        def hear(events) -> None:
            for event in events:
                if isinstance(event, RequestFailed):
                    failed[event.request_id] = event.reason

        loop.submit(request, hear)

    loop.start(on_lost=lambda: lost.append(None))
    for number in range(4):  # Two of them wait for a slot.
        submit(number)
    wait_until(lambda: len(executor.plans) > 3)
    loop._scheduler.planner.plan = None
    wait_until(lambda: len(failed) == 4)
    submit(4)
    wait_until(lambda: len(failed) == 5)
    assert set(failed.values()) == {FailureReason.INTERNAL}
    assert len(lost) == 1
    loop.stop()
    assert not loop._thread.is_alive()
