"""A step that may take long is announced for as long as it is in flight, and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from engine_fakes import VOCAB, HashExecutor
from waiting import wait_until

from engine.bounds import Bounds
from engine.loop.rates import UNKNOWN_STEP_S
from engine.loop.step_loop import StepLoop
from engine.pages.blocks import BlockManager
from engine.sampling import Sampler
from engine.schedule.scheduler import Scheduler
from engine.types import Request, SamplingParams, StopRules

PAGES, PAGE, SLOTS, CHUNK = 64, 16, 4, 128
TURNS_S = 0.1
"""The loop goes on to where it waits for the device."""


class Device(HashExecutor):
    """Steps end when the test says so."""

    @property
    def in_flight(self) -> int:
        assert self.deferred is not None
        return len(self.deferred)


@pytest.fixture
def device() -> Device:
    return Device(PAGES, PAGE, SLOTS, deferred=True)


@pytest.fixture
def loop(device: Device) -> Iterator[StepLoop]:
    config = Bounds(
        max_sequences=SLOTS, max_step_tokens=CHUNK, mixed_prefill_tokens=CHUNK,
        max_context_tokens=PAGES * PAGE, page_size=PAGE, eos_token_ids=frozenset(),
    )  # fmt: skip
    sampler = Sampler(SLOTS, VOCAB, "cpu", [])
    loop = StepLoop(Scheduler(config, BlockManager(PAGES), sampler), device)
    loop.start()
    yield loop
    loop._stopping = True
    while loop._thread.is_alive():
        if device.in_flight:
            device.finish()
        time.sleep(0.001)
    loop.stop()


def submit(loop: StepLoop, prompt_tokens: int) -> None:
    ids = np.arange(prompt_tokens, dtype=np.int32) % VOCAB
    stop = StopRules(50, ignore_eos=True)
    request = Request(bytes(16), ids, SamplingParams(temperature=0.0), stop)
    loop.post(lambda scheduler: scheduler.requests.submit(request, lambda _: None))


def stays(condition: Callable[[], bool]) -> None:
    """It becomes true, and is not overwritten as the loop goes on."""
    wait_until(condition)
    time.sleep(TURNS_S)
    assert condition()


def test_the_last_step_of_a_prompt_is_announced_while_the_loop_waits_for_it(
    loop: StepLoop, device: Device
) -> None:
    submit(loop, CHUNK)
    wait_until(lambda: device.in_flight == 2)  # the prompt, and behind it the first decode
    stays(lambda: loop.load.long_step_ms == 1e3 * UNKNOWN_STEP_S)
    device.finish()
    wait_until(lambda: loop.load.long_step_ms == 0)
    assert device.in_flight, "the decode step, which is not long"


def test_what_follows_a_long_step_does_not_hide_it(loop: StepLoop, device: Device) -> None:
    submit(loop, 2 * CHUNK)
    wait_until(lambda: device.in_flight == 2)
    stays(lambda: loop.load.long_step_ms == 1e3 * UNKNOWN_STEP_S)
    time.sleep(1)
    device.finish()  # Now a chunk is known to take more than a second.
    wait_until(lambda: device.in_flight == 2)
    # The second chunk, with slack.
    stays(lambda: 2_000 <= loop.load.long_step_ms < 1e3 * UNKNOWN_STEP_S)
    device.finish()
    wait_until(lambda: loop.load.long_step_ms == 0)


def test_the_end_waits_for_a_step_that_hangs_no_longer_than_so_long(
    loop: StepLoop,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("engine.loop.step_loop.STOP_S", 0.05)
    monkeypatch.setattr(device, "shutdown", lambda: pytest.fail("it would wait, too"))
    submit(loop, CHUNK)
    wait_until(lambda: device.in_flight == 2)
    loop.stop()
    assert "left behind" in caplog.text
    monkeypatch.undo()  # Once it goes on after all, it ends.
