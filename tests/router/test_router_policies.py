"""Who gets the work: estimates, policies and the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from baton.worker.v1 import worker_pb2
from router.dispatch.queue import MAX_RETRY_AFTER_S, AdmissionQueue
from router.errors import RouterError
from router.placement.policies import LeastWork, RoundRobin
from router.workers.load_estimate import Capacity, LoadEstimate, Reservation

A, B = b"a", b"b"


def load(**fields: Any) -> worker_pb2.Load:
    defaults = {"total_pages": 100, "free_pages": 100, "max_sequences": 8}
    return worker_pb2.Load(**(defaults | {"prefill_credit_tokens": 100} | fields))


def test_a_burst_is_counted_before_the_next_report() -> None:
    estimate = LoadEstimate()
    estimate.report(load())
    for attempt in (A, B):
        estimate.reserve(attempt, Reservation(60, 4, 1))
    capacity = estimate.capacity()
    assert (capacity.queued_prefill_tokens, capacity.prefill_credit_tokens) == (120, -20)
    assert (capacity.running_sequences, capacity.free_pages) == (2, 92)


CONTAINS_A = {
    "known_attempts": [A],
    "queued_prefill_tokens": 60,
    "prefill_credit_tokens": 40,
    "running_sequences": 1,
    "free_pages": 96,
}


def test_a_report_is_not_counted_twice() -> None:
    estimate = LoadEstimate()
    estimate.reserve(A, Reservation(60, 4, 1))
    estimate.report(load(**CONTAINS_A))
    capacity = estimate.capacity()
    assert (capacity.queued_prefill_tokens, capacity.prefill_credit_tokens) == (60, 40)
    assert (capacity.running_sequences, capacity.free_pages) == (1, 96)


def test_an_attempt_that_one_report_named_stays_known() -> None:
    estimate = LoadEstimate()
    estimate.reserve(A, Reservation(60, 4, 1))
    estimate.report(load(**CONTAINS_A))
    estimate.report(load(**(CONTAINS_A | {"known_attempts": []})))
    assert estimate.capacity().queued_prefill_tokens == 60


def test_a_report_that_crossed_the_submit_does_not_hide_it() -> None:
    estimate = LoadEstimate()
    estimate.reserve(A, Reservation(60))
    estimate.report(load())
    assert estimate.capacity().prefill_credit_tokens == 40


def test_of_two_attempts_a_report_contains_the_one_that_it_names() -> None:
    estimate = LoadEstimate()
    for attempt in (A, B):
        estimate.reserve(attempt, Reservation(60, 4, 1))
    estimate.report(load(**CONTAINS_A))
    capacity = estimate.capacity()
    assert (capacity.queued_prefill_tokens, capacity.prefill_credit_tokens) == (120, -20)
    assert (capacity.running_sequences, capacity.free_pages) == (2, 92)
    estimate.prefilled(A)
    estimate.release(A)
    capacity = estimate.capacity()
    assert (capacity.queued_prefill_tokens, capacity.prefill_credit_tokens) == (60, 40)
    assert (capacity.running_sequences, capacity.free_pages) == (1, 96)


def test_what_waits_in_the_workers_own_queue_is_taken() -> None:
    """It is known, and has no pages and no slot yet."""
    estimate = LoadEstimate()
    estimate.reserve(A, Reservation(60, 4, 1))
    estimate.report(load(known_attempts=[A], wanted_pages=4, wanted_sequences=1))
    capacity = estimate.capacity()
    assert (capacity.running_sequences, capacity.free_pages) == (1, 96)


def test_a_granted_slot_that_does_not_run_yet_is_taken() -> None:
    estimate = LoadEstimate()
    estimate.reserve(A, Reservation(0, 4, 3))
    estimate.report(load(known_attempts=[A], running_sequences=0))
    assert estimate.capacity().free_sequences == 5


@pytest.mark.parametrize("known", [False, True])
def test_every_release_restores_the_estimate(known: bool) -> None:
    """Prefilled then released, or released alone, or twice: the capacity is what it was."""
    for prefilled in (False, True):
        estimate = LoadEstimate()
        estimate.report(load())
        before = estimate.capacity()
        estimate.reserve(A, Reservation(60, 4, 2))
        if known:
            estimate.report(load(**(CONTAINS_A | {"running_sequences": 2})))
        if prefilled:
            estimate.prefilled(A)
            estimate.prefilled(A)
            assert estimate.capacity().prefill_credit_tokens == 100
        estimate.release(A)
        estimate.release(A)
        assert estimate.capacity() == before
        assert estimate.open_reservations == 0


@dataclass
class Worker:
    worker_id: str
    queued_prefill_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    running_sequences: int = 0
    free_pages: int = 100
    max_sequences: int = 10

    def capacity(self) -> Capacity:
        return Capacity(
            queued_prefill_tokens=self.queued_prefill_tokens,
            prefill_credit_tokens=100,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            prefill_rate_age_s=0.0,
            running_sequences=self.running_sequences,
            max_sequences=self.max_sequences,
            free_pages=self.free_pages,
            total_pages=100,
        )


def test_least_work_counts_seconds_not_tokens() -> None:
    slow = Worker("p0", queued_prefill_tokens=100, prefill_tokens_per_s=10)
    fast = Worker("p1", queued_prefill_tokens=200, prefill_tokens_per_s=100)
    assert LeastWork().prefill([slow, fast], 10) == 1


def test_least_work_tries_a_worker_of_unknown_speed() -> None:
    known = Worker("p0", queued_prefill_tokens=100, prefill_tokens_per_s=100)
    unknown = Worker("p1", queued_prefill_tokens=50)
    assert LeastWork().prefill([known, unknown], 10) == 1


def test_least_work_looks_at_the_scarcer_of_slots_and_pages() -> None:
    few_pages = Worker("d0", running_sequences=1, free_pages=10)
    few_slots = Worker("d1", running_sequences=8, free_pages=90)
    neither = Worker("d2", running_sequences=5, free_pages=50)
    assert LeastWork().decode([few_pages, few_slots, neither]) == 2


def test_least_work_prefers_the_smaller_batch_of_equals() -> None:
    large = Worker("d0", running_sequences=10, max_sequences=20, free_pages=50)
    small = Worker("d1", running_sequences=5, max_sequences=20, free_pages=50)
    assert LeastWork().decode([large, small]) == 1


def test_round_robin_goes_on_when_workers_come_and_go() -> None:
    policy = RoundRobin()
    workers = [Worker("p0"), Worker("p1"), Worker("p2")]
    assert [policy.prefill(workers, 10) for _ in range(4)] == [0, 1, 2, 0]
    assert policy.decode(workers) == 0  # the legs take turns apart
    assert policy.prefill(workers[1:], 10) == 0
    assert policy.prefill(workers, 10) == 2


@dataclass(eq=False)
class Waiting:
    model: str = "m"
    tokens: int = 10
    order: tuple[bool, int] = (True, 0)


def drained(queue: AdmissionQueue[Waiting]) -> list[Waiting]:
    order = []
    while len(queue):
        head = queue.heads()[0]
        queue.take(head, 0.0)
        order.append(head)
    return order


def test_queue_order() -> None:
    """Resumed work first, then the higher priority, then the earlier arrival."""
    queue: AdmissionQueue[Waiting] = AdmissionQueue(10, 1_000)
    first, second = Waiting(), Waiting()
    urgent, resumed = Waiting(order=(True, -5)), Waiting(order=(False, 0))
    for entry in (first, second, urgent, resumed):
        queue.push(entry, 0.0)
    assert drained(queue) == [resumed, urgent, first, second]
    assert queue.tokens == 0


def test_lanes_do_not_hold_each_other_up() -> None:
    queue: AdmissionQueue[Waiting] = AdmissionQueue(10, 1_000)
    entries = [Waiting("a"), Waiting("b"), Waiting("a")]
    for entry in entries:
        queue.push(entry, 0.0)
    assert queue.heads() == entries[:2]


def test_a_swamped_lane_is_full_and_slow_for_its_own_only() -> None:
    queue: AdmissionQueue[Waiting] = AdmissionQueue(2, 100)
    swamped = [Waiting("a", tokens=50), Waiting("a", tokens=50)]
    for entry in swamped:
        queue.push(entry, 0.0)
    with pytest.raises(RouterError, match="QUEUE_FULL") as refused:
        queue.push(Waiting("a"), 0.0)
    assert refused.value.metadata["queued_requests"] == "2"
    assert queue.wait_s("b", 0.0) == 0.0
    queue.push(Waiting("b", tokens=90), 0.0)
    queue.take(swamped[0], 10.0)
    assert queue.wait_s("a", 10.0) == pytest.approx(10, rel=0.6)
    assert queue.wait_s("b", 10.0) is None
    assert queue.ahead("a") == (1, 50)
    assert (len(queue), queue.tokens) == (2, 140)


def test_queue_is_bounded_by_entries_and_by_tokens() -> None:
    queue: AdmissionQueue[Waiting] = AdmissionQueue(2, 100)
    queue.push(Waiting(tokens=90), 0.0)
    with pytest.raises(RouterError, match="QUEUE_FULL"):
        queue.push(Waiting(tokens=11), 0.0)
    queue.push(Waiting(tokens=10), 0.0)
    with pytest.raises(RouterError, match="QUEUE_FULL"):
        queue.push(Waiting(tokens=0), 0.0)
    queue.push(Waiting(), 0.0, bounded=False)
    assert len(queue) == 3


def test_the_empty_queue_takes_the_largest_prompt() -> None:
    queue: AdmissionQueue[Waiting] = AdmissionQueue(2, 100)
    queue.push(Waiting(tokens=1_000), 0.0)
    assert queue.tokens == 1_000


def test_retry_after_is_the_backlog_over_the_measured_rate() -> None:
    queue: AdmissionQueue[Waiting] = AdmissionQueue(1_000, 10_000)
    waiting = [Waiting(tokens=10) for _ in range(60)]
    for entry in waiting:
        queue.push(entry, 0.0)
    assert queue.retry_after_s("m", 0.0) == MAX_RETRY_AFTER_S  # nothing measured yet
    for second, entry in enumerate(waiting[:40], start=1):
        queue.take(entry, float(second))
    assert queue.wait_s("m", 40.0) == pytest.approx(200 / 10, rel=0.1)


def test_a_short_prompt_says_nothing_about_how_fast_long_ones_drain() -> None:
    """From nine tokens that waited for a moment a crowd was told that it had to wait a minute."""
    queue: AdmissionQueue[Waiting] = AdmissionQueue(100, 100_000)
    short, *crowd = [Waiting(tokens=9), *(Waiting(tokens=1000) for _ in range(24))]
    queue.push(short, 0.0)
    queue.push(crowd[0], 0.001)
    queue.take(short, 0.005)
    for entry in crowd[1:]:
        queue.push(entry, 0.1)
    assert queue.wait_s("m", 0.1) is None
    queue.take(crowd[0], 0.25)
    assert queue.wait_s("m", 0.25) == pytest.approx(23 * 0.25, rel=0.1)


def test_idle_time_and_unhindered_work_say_nothing_about_draining() -> None:
    """A quiet minute must not make the next backlog look hopeless."""
    queue: AdmissionQueue[Waiting] = AdmissionQueue(10, 1_000)
    for second in range(60):
        entry = Waiting(tokens=1)
        queue.push(entry, float(second))
        queue.take(entry, float(second))
    queue.push(Waiting(), 100.0)
    assert queue.wait_s("m", 100.0) is None
