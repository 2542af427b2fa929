"""What a router passes on between two workers: fetches of pages, and their refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_worker import BOTH, DECODE, PREFILL, Cluster, ScriptedWorker, job
from waiting import until

from baton.worker.v1 import worker_pb2
from router.placement import routing
from router.placement.routing import Route
from router.placement.ways import Way
from router.workers.between import fetches


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.close()


async def add(cluster: Cluster, name: str, role: int, transport: str = "nixl") -> ScriptedWorker:
    return await cluster.add(name, role, transport=transport)


def fetch(fetcher: ScriptedWorker, holder: ScriptedWorker) -> worker_pb2.Fetch:
    return worker_pb2.Fetch(
        transfer_id=b"t" * 16,
        fetcher_epoch=fetcher.identity.epoch,
        fetcher_agent_name=fetcher.agent_name,
        holder_agent_name=holder.agent_name,
        keys=b"k" * 32,
        page_ids=b"\7\0\0\0",
    )


def refusal(fetcher: ScriptedWorker, holder: ScriptedWorker) -> worker_pb2.FetchRefused:
    return worker_pb2.FetchRefused(
        transfer_id=b"t" * 16,
        fetcher_epoch=fetcher.identity.epoch,
        fetcher_agent_name=fetcher.agent_name,
        holder_agent_name=holder.agent_name,
        cause="missing",
    )


async def test_any_two_workers_that_can_fetch_meet(cluster: Cluster) -> None:
    """Whatever their roles; NCCL wires up the pairs of hand-offs alone."""
    workers = [await add(cluster, name, role) for name, role in (("p0", PREFILL), ("p1", PREFILL))]
    slow = [await add(cluster, name, DECODE, "nccl") for name in ("d8", "d9")]
    await until(lambda: all(worker.count("meet") >= 3 for worker in workers))
    names = {m.meet.worker.worker_id for m in workers[0].history if m.HasField("meet")}
    assert "p1" in names
    assert {m.meet.worker.worker_id for m in slow[0].history if m.HasField("meet")} == {"p0", "p1"}


async def test_a_fetch_and_its_refusal_pass_between_two_workers(cluster: Cluster) -> None:
    fetcher, holder = await add(cluster, "p0", PREFILL), await add(cluster, "b0", BOTH)
    other = await add(cluster, "p1", PREFILL)
    fetcher.say(fetch=fetch(fetcher, holder))
    assert await holder.heard("fetch") == fetch(fetcher, holder)
    holder.say(fetch_refused=refusal(fetcher, holder))
    assert await fetcher.heard("fetch_refused") == refusal(fetcher, holder)
    assert not other.count("fetch")
    assert not other.count("fetch_refused")


async def test_the_router_refuses_what_it_cannot_pass_on(cluster: Cluster) -> None:
    """A fetch is sent once, so its pages are free when nobody was asked."""
    fetcher = await add(cluster, "p0", PREFILL)
    foreign = await cluster.add("d1", DECODE, transport="nixl", fingerprint="other")
    for holder in (ScriptedWorker("gone", DECODE, transport="nixl"), foreign):
        fetcher.say(fetch=fetch(fetcher, holder))
        refused = await fetcher.heard("fetch_refused")
        assert (refused.cause, refused.holder_agent_name) == ("holder_gone", holder.agent_name)
    assert not foreign.count("fetch")


@pytest.mark.parametrize(
    ("groups", "ranks", "fetching"), [(0, 0, True), (2, 0, True), (1, 1, False)]
)
async def test_workers_of_one_rank_alone_fetch(groups: int, ranks: int, fetching: bool) -> None:
    """A worker of the release before tells of no group, and has one."""
    identity = ScriptedWorker("d0", DECODE, transport="nixl").identity
    identity.endpoint.groups.extend([worker_pb2.KvGroup(page_bytes=4096)] * groups)
    identity.endpoint.ranks.extend([worker_pb2.KvEndpoint()] * ranks)
    link: Any = SimpleNamespace(identity=identity, agent_name=identity.endpoint.agent_name)
    assert fetches(link) is fetching


async def test_nobody_fetches_or_refuses_for_somebody_else(cluster: Cluster) -> None:
    fetcher, holder = await add(cluster, "p0", PREFILL), await add(cluster, "d0", DECODE)
    liar = await add(cluster, "p1", PREFILL)
    liar.say(fetch=fetch(fetcher, holder))
    liar.say(fetch_refused=refusal(fetcher, holder))
    liar.say(fetch=fetch(liar, holder))
    assert await holder.heard("fetch") == fetch(liar, holder)
    assert not fetcher.count("fetch_refused")


async def test_who_computes_the_prompt_is_told_where_pages_can_be_had(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await cluster.pair()
    route = routing.choose

    def fetching(*args: Any) -> Route | None:
        chosen = route(*args)
        way = Way(0.0, holder=cluster.link(decode), fetched_pages=3)
        return chosen and chosen._replace(way=way)

    monkeypatch.setattr(routing, "choose", fetching)
    reader = cluster.read(job())
    submit = await prefill.heard("submit")
    assert (submit.fetch.agent_name, submit.fetch.pages) == (decode.agent_name, 3)
    assert not (await decode.heard("submit")).HasField("fetch")
    await reader.leave()
