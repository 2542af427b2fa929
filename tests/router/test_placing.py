"""The rule that places prompts, and what a decode worker may take over by it."""

from __future__ import annotations

import pytest

from router.placement.placing import (
    FRESH_S,
    NO_LIMIT,
    MixedChunk,
    finish_s,
    pressure,
    rate_of_unmeasured,
    takeover_tokens,
)
from router.workers.load_estimate import Capacity


def capacity(queued: int = 0, rate: float = 40_000.0, age_s: float = 0.0) -> Capacity:
    return Capacity(
        queued_prefill_tokens=queued,
        prefill_credit_tokens=4096,
        prefill_tokens_per_s=rate,
        prefill_rate_age_s=age_s,
        running_sequences=16,
        max_sequences=64,
        free_pages=1000,
        total_pages=1000,
    )


def chosen(*capacities: Capacity, tokens: int = 1000) -> int:
    unmeasured = rate_of_unmeasured(capacities)
    finishes_s = [finish_s(one, tokens, unmeasured) for one in capacities]
    return finishes_s.index(min(finishes_s))


def takeover(prefill: Capacity, decode: Capacity, tokens: int) -> int:
    unmeasured = rate_of_unmeasured([prefill])
    seconds = finish_s(prefill, tokens, unmeasured)
    return takeover_tokens(decode, MixedChunk(), seconds, tokens, unmeasured)


def test_the_wait_and_the_prompt_itself_count() -> None:
    """4,000 queued tokens and 1,000 of its own at 40,000 a second: 125 ms."""
    assert finish_s(capacity(4000), 1000, 1.0) == pytest.approx(0.125)


def test_a_queue_counts_in_seconds_not_in_tokens() -> None:
    slow, fast = capacity(100, rate=1_000), capacity(3000, rate=40_000)
    assert chosen(slow, fast) == 1


def test_a_long_prompt_goes_to_the_faster_worker_and_a_short_one_to_the_nearer() -> None:
    far, near = capacity(4000, rate=40_000), capacity(0, rate=20_000)
    assert chosen(far, near, tokens=1000) == 1
    assert chosen(far, near, tokens=8000) == 0


def test_a_worker_without_a_rate_is_taken_to_be_as_fast_as_the_fastest() -> None:
    assert chosen(capacity(1000), capacity(900, rate=0.0)) == 1
    assert chosen(capacity(1000), capacity(1100, rate=0.0)) == 0


def test_a_rate_of_long_ago_counts_as_unknown() -> None:
    """A rate that was too low would keep its worker from ever showing a better one."""
    once_slow = capacity(0, rate=100.0, age_s=FRESH_S + 1)
    assert chosen(capacity(1000), once_slow) == 1
    assert chosen(capacity(1000), once_slow._replace(prefill_rate_age_s=1.0)) == 0


def test_where_no_rate_is_fresh_the_fastest_known_one_holds() -> None:
    old = [capacity(rate=rate, age_s=FRESH_S + 1) for rate in (10_000, 30_000)]
    assert rate_of_unmeasured(old) == 30_000
    assert rate_of_unmeasured([*old, capacity(rate=20_000)]) == 20_000


def test_where_no_rate_is_known_the_queues_decide() -> None:
    nobody_knows = [capacity(300, rate=0.0), capacity(200, rate=0.0)]
    assert chosen(*nobody_knows) == 1


def test_the_scarcer_of_slots_and_pages_is_the_pressure() -> None:
    least = capacity()._replace(running_sequences=1, max_sequences=10, total_pages=100)
    few_pages, few_slots = least._replace(free_pages=10), least._replace(running_sequences=8)
    neither = least._replace(running_sequences=5, free_pages=50)
    assert min([few_pages, few_slots, neither], key=pressure) is neither


def test_of_two_under_the_same_pressure_the_smaller_batch_is_less() -> None:
    large = capacity()._replace(running_sequences=10, max_sequences=20, free_pages=500)
    assert pressure(large._replace(running_sequences=5)) < pressure(large)


def test_a_decode_worker_may_compute_what_it_gets_done_before_the_prefill_worker() -> None:
    """(4,000 + 1,000) / 40,000 is 125 ms; in those it computes 2,500 at 20,000 a second."""
    assert takeover(capacity(4000), capacity(rate=20_000), 1000) == pytest.approx(2500, abs=1)


def test_what_the_decode_worker_has_to_do_already_counts_against_it() -> None:
    assert takeover(capacity(4000), capacity(1000, rate=20_000), 1000) == pytest.approx(1500, abs=1)
    assert takeover(capacity(), capacity(1000, rate=20_000), 1000) == 0


def test_of_two_idle_workers_the_decode_worker_may_compute_a_part_of_the_prompt() -> None:
    assert takeover(capacity(), capacity(rate=10_000), 1000) == pytest.approx(250, abs=1)


def test_a_takeover_without_rates_goes_by_the_queues() -> None:
    nothing = capacity(rate=0.0)
    assert takeover(nothing._replace(queued_prefill_tokens=50), nothing, 100) == pytest.approx(
        150, abs=1
    )


def test_a_takeover_fits_the_message() -> None:
    slow = capacity(1 << 30, rate=1.0)
    assert takeover(slow, capacity(rate=1e9), 1000) == NO_LIMIT
