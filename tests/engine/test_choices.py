"""Choices of one prompt: what they share, and what is copied for each."""

from __future__ import annotations

import pytest
from test_scheduler_property import Bench, deliver

from engine.step.plan import StepPlan
from engine.types import Mode

PAGE, CHOICES, OUTPUT = 4, 4, 9


def started(length: int, mode: Mode) -> tuple[Bench, list[StepPlan]]:
    """Runs a prompt with four choices until all decode. The steps that were planned."""
    bench, plans = Bench(num_pages=80), []
    request_id = bench.submit([5] * length, OUTPUT, choices=CHOICES, mode=mode)
    while not (bench.scheduler.batch.slots.growth() > 0).any() or len(plans) < 4:
        bench.turn()
        if request_id in bench.reserved and not plans:
            deliver(bench, request_id)
        if bench.previous:
            plans.append(bench.previous[0])
    return bench, plans


@pytest.mark.parametrize("mode", [Mode.WHOLE, Mode.RECEIVE])
@pytest.mark.parametrize(("length", "full"), [(6, 1), (3, 0), (8, 2), (13, 3)])
def test_full_pages_are_shared_and_a_partial_one_is_copied_for_each_but_one(
    length: int, full: int, mode: Mode
) -> None:
    bench, plans = started(length, mode)
    sources = [page for plan in plans for page in plan.copy_source.tolist()]
    targets = [page for plan in plans for page in plan.copy_target.tolist()]
    copies = CHOICES - 1 if length % PAGE else 0
    assert len(sources) == len(targets) == copies
    assert len(set(sources)) == min(copies, 1)
    assert len({*sources, *targets}) == copies + (copies > 0)
    (active,) = bench.scheduler.requests.by_id.values()
    tables = [bench.scheduler.batch.slots.pages(one.slot).tolist() for one in active.sequences]
    assert len({tuple(pages[:full]) for pages in tables}) == 1, "shared"
    own = [page for pages in tables for page in pages[full:]]
    assert len(set(own)) == len(own), "each its own"
    bench.run()
    assert {choice for _, choice in bench.ends} == set(range(CHOICES))
    bench.check_baseline()
