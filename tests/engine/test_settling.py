"""What a step's end does first: tokens are told before the pages of who ended are given back."""

from __future__ import annotations

from test_planning import planned
from test_scheduler_property import Bench

from engine.types import Event, NewTokens, SequenceEnded


def test_tokens_do_not_wait_for_the_pages_of_who_ended() -> None:
    bench = Bench(num_pages=60, slots=4)
    scheduler = bench.scheduler
    told: list[tuple[list[Event], int]] = []

    def hand_out() -> None:
        events = [event for _, event in scheduler.requests.take_events()]
        told.append((events, scheduler.blocks.available))

    bench.submit(range(100, 140), max_tokens=3)
    bench.submit(range(200, 220), max_tokens=9)
    free = scheduler.blocks.available
    while not any(isinstance(event, SequenceEnded) for events, _ in told for event in events):
        plan = planned(bench)
        assert plan is not None
        held = free - scheduler.blocks.available
        told.clear()
        scheduler.settler.settle(plan, bench.device.launch(plan).result(), hand_out)
    scheduler.check_invariants()
    (events, available) = told[-1]
    assert any(isinstance(event, NewTokens) for event in events)
    assert free - available == held, "given back before anybody was told"
    assert free - scheduler.blocks.available < held
    while (plan := planned(bench)) is not None:
        scheduler.settler.settle(plan, bench.device.launch(plan).result(), hand_out)
    assert scheduler.blocks.available == free


def test_what_has_settled_is_told_from_what_is_launched() -> None:
    bench = Bench(num_pages=60, slots=4)
    scheduler, slots = bench.scheduler, bench.scheduler.batch.slots
    bench.submit(range(100, 103), max_tokens=9)
    plans = [planned(bench) for _ in range(2)]
    rows = slots.running()
    for settled, plan in zip((3, 4), plans, strict=True):
        assert plan is not None
        scheduler.settler.settle(plan, bench.device.launch(plan).result())
        assert slots.settled_kv(rows).tolist() == [settled]
        assert slots.kv_len[rows].tolist() == slots.least_kv(rows).tolist() == [4]
