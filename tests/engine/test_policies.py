"""In which order waiting requests are admitted, by each policy; one slot, so one after another."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_scheduler_property import Bench

from engine.schedule.policies import AGEING
from engine.types import Mode


def served(bench: Bench, ids: Sequence[bytes]) -> list[int]:
    """Runs all to their end. Positions in `ids`, in the order in which they ended."""
    bench.run()
    bench.check_baseline()
    return [ids.index(request_id) for request_id, _ in bench.ends if request_id in ids]


def busy(policy: str, slots: int = 1) -> Bench:
    """One slot, taken for a while, so that what is submitted now waits."""
    bench = Bench(num_pages=80, slots=slots, step_tokens=64, policy=policy, prefix_cache=False)
    bench.submit([9], 12)
    bench.turn()
    return bench


def test_first_come_first_served() -> None:
    bench = busy("fcfs")
    wanted = [([5] * 30, 0), ([5], 9), ([5] * 8, -3)]
    ids = [bench.submit(prompt, 2, priority=priority) for prompt, priority in wanted]
    assert served(bench, ids) == [0, 1, 2]


def test_higher_priority_first_and_ties_by_arrival() -> None:
    bench = busy("priority")
    ids = [bench.submit([5], 2, priority=priority) for priority in (0, 2, -1, 2, 1)]
    assert served(bench, ids) == [1, 3, 4, 0, 2]


def test_shortest_prompt_first() -> None:
    bench = busy("shortest")
    ids = [bench.submit([5] * length, 2) for length in (60, 5, 100, 30)]
    # Sixteen tokens are forgiven for each that came later: 12, -27, 84, 30.
    assert served(bench, ids) == [1, 0, 3, 2]


def test_tenants_take_turns() -> None:
    bench = busy("fair")
    ids = [bench.submit([5], 2, tenant=tenant) for tenant in "aaaabb"]
    assert served(bench, ids) == [0, 4, 1, 5, 2, 3]


@pytest.mark.parametrize("mode", [Mode.WHOLE, Mode.RECEIVE])
def test_what_a_tenant_has_in_slots_counts(mode: Mode) -> None:
    bench = busy("fair", slots=3)
    held = bench.submit([5], 40, tenant="a", mode=mode)
    bench.turn()
    ids = [bench.submit([5], 6, tenant=tenant) for tenant in "ab"]
    bench.turn()
    known, waiting = bench.scheduler.requests.by_id.values(), bench.scheduler.requests.waiting
    (admitted,) = [one for one in known if one.request.id in ids and one not in waiting]
    assert admitted.request.tenant == "b"
    bench.scheduler.requests.cancel(held)
    bench.scheduler.requests.release(held)
    assert served(bench, ids) == [1, 0]


def test_fairness_is_between_tenants_and_not_by_their_number_of_requests() -> None:
    """One tenant's flood does not make another's next request wait for all of it."""
    bench = busy("fair")
    flood = [bench.submit([5], 2, tenant="loud") for _ in range(30)]
    late = bench.submit([5], 2, tenant="quiet")
    order = served(bench, [*flood, late])
    assert order.index(30) <= 1


@pytest.mark.parametrize("policy", ["priority", "shortest"])
def test_nobody_starves(policy: str) -> None:
    """Less urgent than whatever comes later, for ever: its turn comes all the same."""
    bench = busy(policy)
    poor = bench.submit([5] * 120, 2, priority=-1)
    arrivals = 0
    while (poor, 0) not in bench.ends and arrivals < 300:
        bench.submit([5], 2)
        arrivals += 1
        for _ in range(3):
            bench.turn()
    bound = {"priority": AGEING, "shortest": 120 // 16}[policy]
    assert bound // 2 < arrivals < 2 * bound + 16
    bench.run()
    bench.check_baseline()
