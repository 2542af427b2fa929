"""When a decode worker computes a prompt sooner than the prefill workers' queue lets them."""

from __future__ import annotations

import pytest

from router.ledger import Room
from router.local_prefill import (
    NO_LIMIT,
    break_even_tokens,
    can_hurry,
    is_urgent,
    local_tokens_per_s,
)

FACTOR = 2.8


def room(**fields: float) -> Room:
    defaults = {
        "queued_prefill_tokens": 0,
        "prefill_credit_tokens": 4096,
        "prefill_tokens_per_s": 0.0,
        "mixed_prefill_tokens": 0,
        "mixed_prefill_tokens_per_s": 0.0,
        "late_prefill_tokens": 0,
        "late_prefill_tokens_per_s": 0.0,
        "step_ms": 8.0,
        "running_sequences": 16,
        "max_sequences": 64,
        "free_pages": 1000,
        "total_pages": 1000,
    }
    return Room(**(defaults | fields))


def prefill(queued: int = 0, rate: float = 40_000.0) -> Room:
    return room(queued_prefill_tokens=queued, prefill_tokens_per_s=rate)


def test_idle_prefill_workers_keep_everything() -> None:
    assert break_even_tokens([prefill()], room(mixed_prefill_tokens_per_s=20_000)) == 0


def test_level_where_both_are_done_at_once() -> None:
    """Queue 4,000 at 40,000/s: 100 ms. n at 20,000/s is 25 us a token more: 4,000 tokens."""
    decode = room(mixed_prefill_tokens_per_s=20_000)
    tokens = break_even_tokens([prefill(4000)], decode)
    assert tokens == pytest.approx(4000, abs=1)
    at_prefill_s = (4000 + tokens) / 40_000
    assert tokens / 20_000 == pytest.approx(at_prefill_s, abs=1e-4)


def test_what_a_decode_worker_took_on_counts_against_it() -> None:
    busy = room(mixed_prefill_tokens_per_s=20_000, queued_prefill_tokens=1000)
    assert break_even_tokens([prefill(4000)], busy) == pytest.approx(2000, abs=1)
    flooded = room(mixed_prefill_tokens_per_s=20_000, queued_prefill_tokens=2000)
    assert break_even_tokens([prefill(4000)], flooded) == 0


def test_the_shortest_queue_is_the_rival() -> None:
    decode = room(mixed_prefill_tokens_per_s=20_000)
    assert break_even_tokens([prefill(100_000), prefill()], decode) == 0
    slow_and_empty = prefill(400, rate=4000)
    assert break_even_tokens([prefill(4000), slow_and_empty], decode) == pytest.approx(4000, abs=1)


def test_a_decode_worker_loses_a_step_and_a_half() -> None:
    """Of 200 tokens at 20,000 a second: 15 ms, which are 600 tokens less."""
    decode = room(mixed_prefill_tokens_per_s=20_000, mixed_prefill_tokens=200)
    assert break_even_tokens([prefill(4000)], decode) == pytest.approx(3400, abs=1)
    alone = decode._replace(running_sequences=0, prefill_tokens_per_s=20_000.0)
    assert break_even_tokens([prefill(4000)], alone) == pytest.approx(4000, abs=1)


def test_a_queue_in_seconds_not_in_tokens() -> None:
    decode = room(mixed_prefill_tokens_per_s=5_000)
    fast, slow = prefill(4000, rate=40_000), prefill(4000, rate=10_000)
    assert break_even_tokens([fast], decode) < break_even_tokens([slow], decode)


def test_nothing_is_guessed_without_a_rate() -> None:
    assert break_even_tokens([prefill(9000, rate=0)], room()) == 0
    assert break_even_tokens([prefill(9000), prefill(0, rate=0)], room()) == 0
    assert break_even_tokens([], room()) == 0


def test_a_decode_worker_as_fast_as_prefill_is_limited_by_its_queue_alone() -> None:
    idle = room(running_sequences=0, prefill_tokens_per_s=40_000)
    assert break_even_tokens([prefill(1)], idle) == NO_LIMIT
    assert break_even_tokens([prefill()], idle) == 0
    queued = room(running_sequences=0, prefill_tokens_per_s=40_000, queued_prefill_tokens=5)
    assert break_even_tokens([prefill(5)], queued) == 0


def test_the_local_rate() -> None:
    assert local_tokens_per_s(room(mixed_prefill_tokens_per_s=17_000), 40_000) == 17_000
    # A chunk of 192 at 40,000/s takes 4.8 ms, beside a step of 8 ms.
    unknown = room(mixed_prefill_tokens=192)
    assert local_tokens_per_s(unknown, 40_000) == pytest.approx(192 / 12.8e-3)
    assert local_tokens_per_s(room(running_sequences=0), 40_000) == 40_000
    measured = room(running_sequences=0, prefill_tokens_per_s=30_000)
    assert local_tokens_per_s(measured, 40_000) == 30_000


def test_what_was_computed_since_the_last_report_counts() -> None:
    """The head, 2,000 tokens of which 500 are known to be computed, is 30 ms old: 1,200 are."""
    late = room(
        queued_prefill_tokens=3500, prefill_tokens_per_s=40_000.0,
        head_tokens=2000, head_computed_tokens=500, head_s=0.03,
    )  # fmt: skip
    assert late.wait_s(40_000) == pytest.approx((3500 - 700) / 40_000)
    assert late._replace(head_s=9.0).wait_s(40_000) == pytest.approx(2000 / 40_000), "all of it"
    assert late._replace(head_s=0.01).wait_s(40_000) == pytest.approx(3500 / 40_000)
    decode = room(mixed_prefill_tokens_per_s=20_000)
    assert break_even_tokens([late], decode) == pytest.approx(2800, abs=1)


def test_urgent_is_who_would_wait_long_wherever_it_is_computed() -> None:
    """8,000 tokens take 0.2 s."""
    decode = room(mixed_prefill_tokens_per_s=10_000)
    most_queued = int((FACTOR - 1) * 8000)
    assert not is_urgent([prefill(most_queued - 100)], [decode], 8000, 0.0, FACTOR)
    assert is_urgent([prefill(most_queued + 100)], [decode], 8000, 0.0, FACTOR)
    assert is_urgent([prefill(most_queued - 100)], [decode], 8000, 0.01, FACTOR), "it waited, too"
    faster = room(mixed_prefill_tokens_per_s=20_000)
    assert not is_urgent([prefill(most_queued + 100)], [faster], 8000, 0.0, FACTOR)
    assert not is_urgent([prefill(most_queued + 100), prefill()], [decode], 8000, 0.0, FACTOR)
    assert is_urgent([prefill(most_queued + 100)], [], 8000, 0.0, FACTOR)
    assert not is_urgent([prefill(most_queued + 100), prefill(rate=0)], [decode], 8000, 9.0, FACTOR)


def test_who_may_hurry_has_a_budget_for_all_that_is_queued_and_is_sooner_done() -> None:
    decode = room(queued_prefill_tokens=1000, late_prefill_tokens=9000)
    assert can_hurry([prefill(16_000)], decode, 8000)
    assert not can_hurry([prefill(16_000)], decode, 8001)
    assert not can_hurry([prefill(1000)], decode, 8000), "level at best, while no rate is known"
    slow = decode._replace(late_prefill_tokens_per_s=30_000)
    assert can_hurry([prefill(4100)], slow, 8000)
    assert not can_hurry([prefill(3900)], slow, 8000)
    assert not can_hurry([prefill(16_000), prefill()], slow, 8000)
