"""Prompts go where their adapter is in a slot, as far as queues allow: at prefill and at decode
workers one term of what the policy weighs."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_worker import BOTH, DECODE, PREFILL, Cluster, ScriptedWorker, job, until

from baton.worker.v1 import worker_pb2
from bench.choose import MODEL, links_of
from engine.loads import AdapterLoad, EngineLoad
from prefixes.keys import short_key
from router.dispatch.dispatcher import JobDispatcher
from router.jobs import Demand, ServedModel
from router.placement import routing
from router.placement.adapters import UNKNOWN_WAIT_S, finds_slot, slot_s
from router.placement.cost import SLACK
from router.placement.few import DRAWN, _with_adapter, few_of
from router.settings import RouterSettings
from router.workers.link import WorkerLink
from router.workers.load_estimate import LoadEstimate, Reservation
from serving.wire import MOST_ADAPTERS
from worker.load import PrefillRoom, load_message

ONE, TWO, THREE = (bytes([number]) * 32 for number in (1, 2, 3))
GIB = 1 << 30


def places(*in_slots: bytes, idle: int = 1, **others: Any) -> worker_pb2.AdapterPlaces:
    fields = {"all_in_host": True} | others
    return worker_pb2.AdapterPlaces(in_slots=map(short_key, in_slots), idle_slots=idle, **fields)


@pytest.fixture
def usual() -> dict[str, object]:
    return {"local_prefill": "never"}


async def has(cluster: Cluster, worker: ScriptedWorker, *in_slots: bytes, **fields: Any) -> None:
    """The worker has two adapters of a GiB each, some in slots, and the router knows it."""
    told = [
        worker_pb2.Adapter(name=n, digest=d, num_bytes=GIB)
        for n, d in (("law", ONE), ("poems", TWO))
    ]
    worker.say(adapters=worker_pb2.Adapters(adapters=told))
    worker.load.adapters.CopyFrom(places(*in_slots, **fields))
    worker.report(prefill_tokens_per_s=1000.0)
    await cluster.caught_up(worker)
    await until(lambda: len(cluster.link(worker).adapters) == 2)


@pytest.mark.parametrize(
    ("told", "sent", "finds", "seconds"),
    [
        (places(ONE, idle=0), set(), True, 0.0),
        (places(TWO), {ONE}, True, 0.0),
        (places(TWO), {TWO}, True, GIB / 20e9),
        (places(TWO), {THREE}, False, GIB / 20e9 + UNKNOWN_WAIT_S),
        (places(TWO, idle=2), {THREE}, True, GIB / 20e9),
        (places(idle=0, wait_ms=250), set(), False, GIB / 20e9 + 0.25),
        (places(all_in_host=False, in_host=[short_key(ONE)]), set(), True, GIB / 20e9),
        (places(all_in_host=False, in_host=[short_key(TWO)]), set(), True, GIB / 20e9 + GIB / 1e9),
        (None, set(), True, 0.0),
    ],
)  # fmt: skip
def test_the_way_into_a_slot(
    told: worker_pb2.AdapterPlaces | None, sent: set[bytes], finds: bool, seconds: float
) -> None:
    estimate = LoadEstimate()
    estimate.report(worker_pb2.Load(adapters=told))
    for digest in sent:
        estimate.reserve(digest, Reservation(), adapter=digest)
    worker: Any = SimpleNamespace(
        estimate=estimate,
        capacity=lambda: SimpleNamespace(load_bytes_per_s=0.0),
        adapter_bytes={ONE: GIB},
    )
    assert finds_slot(worker, ONE) is finds
    assert slot_s(worker, ONE) == pytest.approx(seconds)


async def test_prompts_go_where_their_adapter_is(cluster: Cluster) -> None:
    """A queue of 100 tokens takes 100 ms, and the way into a slot 54; so it is worth one of 40."""
    first, second = await cluster.add("b0", BOTH), await cluster.add("b1", BOTH)
    await has(cluster, first)
    await has(cluster, second, ONE)
    asked = replace(job(), model=cluster.dispatcher.model("law"))

    async def goes_to() -> ScriptedWorker:
        before = first.count("submit")
        reader = cluster.read(asked)
        await until(lambda: first.count("submit") + second.count("submit") > sum(counts))
        counts[0], counts[1] = first.count("submit"), second.count("submit")
        await reader.leave()
        return first if first.count("submit") > before else second

    counts = [0, 0]
    for queued, expected in ((0, second), (40, second), (100, first)):
        second.report(queued_prefill_tokens=queued)
        await cluster.caught_up(second)
        assert await goes_to() is expected, queued
    second.report(queued_prefill_tokens=0)
    await cluster.caught_up(second)
    asked = replace(job(), model=cluster.dispatcher.model(""))
    assert await goes_to() is first, "without an adapter the first by name"


async def test_a_burst_follows_its_first_request(cluster: Cluster) -> None:
    """Before any report says that the adapter has come."""
    first, second = await cluster.add("b0", BOTH), await cluster.add("b1", BOTH)
    for worker in (first, second):
        worker.reports_by_itself = False
        await has(cluster, worker, THREE, idle=1)
    readers = [
        cluster.read(replace(job(), model=cluster.dispatcher.model(name)))
        for name in ("law", "poems", "law", "poems")
    ]
    await until(lambda: first.count("submit") + second.count("submit") == 4)
    found = [{(await one.heard("submit")).adapter for _ in range(2)} for one in (first, second)]
    for reader in readers:
        await reader.leave()
    assert found == [{ONE}, {TWO}]


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ((0, TWO, 1), (0, TWO, 1), "d0"),
        ((0, TWO, 1), (0, ONE, 1), "d1"),
        ((0, TWO, 1), (1, ONE, 1), "d0"),
        ((1, THREE, 0), (7, TWO, 1), "d1"),
    ],
)
async def test_decode_prefers_residents_by_a_little(
    cluster: Cluster, one: tuple[int, bytes, int], two: tuple[int, bytes, int], expected: str
) -> None:
    """By `SLACK`, half a row of eight. A full set of slots counts as a full worker."""
    assert SLACK < 1 / 8
    await has(cluster, await cluster.add("p0", PREFILL), ONE)
    workers = {name: await cluster.add(name, DECODE) for name in ("d0", "d1")}
    for worker, (rows, in_slot, idle) in zip(workers.values(), (one, two), strict=True):
        worker.load.running_sequences = rows
        await has(cluster, worker, in_slot, idle=idle)
    reader = cluster.read(replace(job(), model=cluster.dispatcher.model("law")))
    await until(lambda: sum(worker.count("submit") for worker in workers.values()) == 1)
    await reader.leave()
    assert workers[expected].count("submit") == 1


def reports(link: WorkerLink, told: worker_pb2.AdapterPlaces) -> None:
    load = worker_pb2.Load()
    load.CopyFrom(link.estimate.load)
    load.adapters.CopyFrom(told)
    link.estimate.report(load)


async def test_a_search_of_a_thousand_workers_is_short() -> None:
    """Each names more adapters than it may; those behind the first 64 do not count. The process's
    own time is the smallest of many."""
    links = links_of(JobDispatcher(RouterSettings()), 1000)
    others = [bytes([n, 9]) * 16 for n in range(200)]
    sizes = dict.fromkeys((ONE, *others), GIB)
    holding, lacking = places(ONE, *others, ONE), places(*others, ONE)
    demand = Demand(replace(ServedModel.of(MODEL), adapter="law", digest=ONE), 1024, 256, 1)
    for holders in (0, 2, 1000):
        for number, link in enumerate(links):
            link.adapter_bytes = sizes
            reports(link, holding if number < holders else lacking)
            assert len(link.estimate.load.adapters.in_slots) == MOST_ADAPTERS
        spent, counts = [], set()
        for _ in range(30):
            began_s = time.thread_time()
            found = _with_adapter(links, demand.model)
            spent.append(time.thread_time() - began_s)
            counts.add((sum(one.prefills for one in found), sum(one.decodes for one in found)))
        assert counts == {(min(holders // 2, DRAWN), min(holders // 2, DRAWN))}
        assert min(spent) < 3e-3, "0.7 ms on one of two overbooked cores"


async def test_of_many_workers_residents_are_looked_at() -> None:
    links = links_of(JobDispatcher(RouterSettings()), 300)
    model = replace(ServedModel.of(MODEL), adapter="law", digest=ONE)
    for number, link in enumerate(links):
        link.adapter_bytes = {ONE: GIB}
        reports(link, places(*([ONE] if number in (100, 299) else [])))
    demand = Demand(model, 1024, 256, 1)
    for _ in range(5):
        found = few_of(links, demand, (), routing._has_credit, routing._has_room)
        assert {links[100], links[299]} <= set(found)
        assert len(found) <= 3 * DRAWN


def test_a_report_is_bounded() -> None:
    digests = tuple(bytes([n]) * 32 for n in range(200))
    load = AdapterLoad(digests, 200, 3, 1, 1, 1, 1.0, 0.25, in_host=digests)
    room = PrefillRoom(0, 0, 1, 16)
    told = load_message(EngineLoad(adapters=load), room, draining=False).adapters
    assert list(told.in_slots) == list(told.in_host) == [short_key(one) for one in digests[:64]]
    assert (told.idle_slots, told.wait_ms, told.all_in_host) == (3, 250.0, False)
    assert told.ByteSize() < 2 * MOST_ADAPTERS * 8 + 32
    assert not load_message(EngineLoad(), room, draining=False).HasField("adapters")
