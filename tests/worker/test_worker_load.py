"""What a worker reports, and the credit it gives."""

from __future__ import annotations

from engine.types import EngineLoad
from worker.load import PrefillRoom, load_message, prefill_credit

IDLE = EngineLoad(total_pages=1000, free_pages=900, evictable_pages=100)


def room(queued: int = 0, ungranted: int = 0, step: int = 512) -> PrefillRoom:
    return PrefillRoom(queued=queued, ungranted=ungranted, step=step, page=16)


def test_credit_is_two_steps_of_work() -> None:
    assert prefill_credit(IDLE, room()) == 1024
    assert prefill_credit(IDLE, room(queued=1000)) == 24
    assert prefill_credit(IDLE, room(queued=5000)) < 0


def test_prompts_without_a_grant_may_fill_a_quarter_of_the_pool() -> None:
    assert prefill_credit(IDLE, room(ungranted=3900)) == 100
    assert prefill_credit(IDLE, room(ungranted=4000)) == 0


def test_no_credit_beyond_the_pages_there_are() -> None:
    busy = EngineLoad(total_pages=1000, free_pages=10, evictable_pages=5)
    assert prefill_credit(busy, room()) == 240
    assert prefill_credit(busy, room(queued=240)) == 0


def test_the_report_carries_the_engines_snapshot() -> None:
    load = EngineLoad(
        progress=7, running_sequences=3, long_step_ms=5000.0, quarantined_pages=2,
        prefill_tokens_per_s=30_000.0, prefill_rate_age_s=2.5, wanted_pages=4, wanted_sequences=1,
    )  # fmt: skip
    message = load_message(load, room(queued=5), draining=True)
    assert message.progress == 7
    assert message.running_sequences == 3
    assert message.long_step_ms == 5000.0
    assert message.quarantined_pages == 2
    assert (message.prefill_tokens_per_s, message.prefill_rate_age_s) == (30_000.0, 2.5)
    assert (message.wanted_pages, message.wanted_sequences) == (4, 1)
    assert message.queued_prefill_tokens == 5
    assert message.draining
