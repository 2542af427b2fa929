"""What a router takes for the load of a worker, between its reports."""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton.worker.v1 import worker_pb2
from router.workers.load_estimate import LoadEstimate, Reservation

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


def test_sums_of_reservations_are_those_of_what_is_open() -> None:
    rng, estimate = random.Random(58), LoadEstimate()
    ids = [bytes([number]) * 16 for number in range(12)]
    for _ in range(600):
        act = rng.randrange(5)
        one, open_ones = rng.choice(ids), estimate._entries
        if act == 0 and one not in open_ones:
            estimate.reserve(one, Reservation(rng.randrange(99), rng.randrange(9), 1), "h")
        elif act == 1:
            estimate.report(load(known_attempts=rng.sample(ids, 4)))
        elif act == 2:
            estimate.charge(one, rng.randrange(99))
        else:
            (estimate.prefilled if act == 3 else estimate.release)(one)
        fresh = [entry.reservation for entry in open_ones.values() if not entry.known]
        assert estimate._fresh == Reservation(*map(sum, zip(Reservation(), *fresh, strict=True)))
        assert estimate._promised == len(open_ones) == estimate.held("h")


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
