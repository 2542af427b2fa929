"""Of many workers a few are looked at: those with capacity, and those that hold the prompt."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from baton.worker.v1 import worker_pb2
from bench.choose import MODEL, Known, links_of, load_of
from prefixes.index import Held
from router.dispatch.dispatcher import JobDispatcher
from router.jobs import Demand, ServedModel
from router.placement import routing
from router.placement.cost import Cost
from router.placement.few import DRAWN, few_of
from router.settings import RouterSettings
from router.workers.life import kind_of
from router.workers.link import WorkerLink

KEYS: Any = np.arange(64, dtype=np.uint64)
COUNT = 300


async def many(count: int = COUNT) -> list[WorkerLink]:
    return links_of(JobDispatcher(RouterSettings()), count)


def demand_of(keys: Any = KEYS, **fields: Any) -> Demand:
    fields = {"prompt_tokens": 1024, "max_tokens": 256, "choices": 1} | fields
    return Demand(ServedModel.of(MODEL), keys=keys, **fields)


def report(link: WorkerLink, number: int, *, full: bool) -> None:
    load = load_of(number, 0, time.monotonic_ns(), full=full)
    link._receive(worker_pb2.WorkResponse(load=load))


def choose(demand: Demand, links: list[WorkerLink], policy: Any) -> routing.Route | None:
    return routing.choose(demand, links, policy, routing.Failed(), "cached")


async def test_only_a_few_are_compared() -> None:
    links = await many()
    found = few_of(links, demand_of(), (), routing._has_credit, routing._has_room)
    assert sum(one.prefills for one in found) == sum(one.decodes for one in found) == DRAWN


async def test_the_only_ones_with_room_are_found() -> None:
    links = await many()
    for number, link in enumerate(links):
        report(link, number, full=number not in (100, 201))
    for _ in range(20):
        route = choose(demand_of(), links, Cost())
        assert route is not None
        assert (route.prefill, route.decode) == (links[100], links[201])
    report(links[100], 100, full=True)
    assert choose(demand_of(), links, Cost()) is None, "nobody decodes alone: it may wait"


async def test_who_holds_the_prompt_is_looked_at_wherever_it_is() -> None:
    links = await many()
    holdings = Known([])
    holdings._held = {links[40].worker_id: Held.all(64, 64)}
    for _ in range(20):
        route = choose(demand_of(), links, Cost(holdings))
        assert route is not None
        assert links[40] in (route.prefill, route.way.holder), "it is neither taken nor asked"


async def test_where_it_was_just_routed_counts_as_well() -> None:
    links = await many()
    policy, demand = Cost(Known([])), demand_of()
    report(links[40], 0, full=False)  # Nothing waits there.
    policy.routed(demand, links[40])
    for _ in range(20):
        route = choose(demand_of(), links, policy)
        assert route is not None
        assert route.prefill is links[40]


async def test_draws_reach_everyone() -> None:
    links = await many()
    found: set[WorkerLink] = set()
    for _ in range(400):
        found.update(few_of(links, demand_of(), (), routing._has_credit, routing._has_room))
    assert len(found) == COUNT


@pytest.mark.parametrize("seed", range(20))
async def test_the_largest_of_each_kind_tell_what_all_could_hold(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, links = random.Random(seed), await many(12)
    for link in links:
        load = worker_pb2.Load(progress=99, total_pages=rng.choice([0, 10, 50, 100, 900]))
        load.draining = rng.random() < 0.2
        link._receive(worker_pb2.WorkResponse(load=load))
        link.identity.model.fingerprint = rng.choice("fg")
        link.identity = link.identity
    demand = demand_of(prompt_tokens=rng.choice([100, 1500]), max_tokens=rng.choice([1, 64]))
    reduced = routing.largest_pool_tokens(demand, links, "cached")
    monkeypatch.setattr(routing, "largest_of", list)
    assert reduced == routing.largest_pool_tokens(demand, links, "cached")


def test_a_kind_is_known_as_long_as_somebody_is_of_it() -> None:
    """Sets of adapters make kinds without end."""
    one = kind_of(("model", frozenset({b"law"})))
    assert kind_of(("model", frozenset({b"law"}))) is one
    assert kind_of(("model", frozenset({b"poems"}))).number != one.number
    number = one.number
    del one
    assert kind_of(("model", frozenset({b"law"}))).number > number
