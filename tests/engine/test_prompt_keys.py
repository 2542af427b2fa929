"""Keys of a prompt's pages: made before the step loop has it, which only looks them up."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from timed_device import PAGE_TOKENS, running_loop
from waiting import wait_until

from engine.loop.step_loop import StepLoop
from engine.pages import prefix
from engine.types import Request, SamplingParams, StopRules, TokenIds

PAGES = 6
STOP = StopRules(3, ignore_eos=True)


def submit(loop: StepLoop, number: int, ids: TokenIds) -> list[object]:
    """Runs a request to its end; what was told of it."""
    events: list[object] = []
    request = Request(number.to_bytes(16, "big"), ids, SamplingParams(temperature=0.0), STOP)
    loop.submit(request, events.extend)
    wait_until(lambda: any(getattr(event, "last", False) for event in events))
    return events


def test_no_step_waits_for_the_keys_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    page_keys = prefix.page_keys

    def watched(
        token_ids: TokenIds, page_size: int, salt: bytes = b"", known: Sequence[bytes] = ()
    ) -> list[bytes]:
        keys = page_keys(token_ids, page_size, salt, known)
        if new := len(keys) - len(known):
            made.append((threading.current_thread().name, new))
        return keys

    monkeypatch.setattr(prefix, "page_keys", watched)
    loop, executor = running_loop()
    ids = np.arange(PAGES * PAGE_TOKENS + 1, dtype=np.int32) % 50
    submit(loop, 0, ids)
    assert made == [(threading.current_thread().name, PAGES)]
    computed = len(executor.plans)
    submit(loop, 1, ids)
    loop.stop()
    assert executor.plans[computed].num_tokens == 1, "they are those that the cache knows"
