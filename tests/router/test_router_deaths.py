"""Lost workers over several hosts: peers hear that one is gone when all is proven, or fenced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_worker import DECODE, PREFILL, Cluster, ScriptedWorker, until
from starlette.requests import Request

from baton.worker.v1 import worker_pb2
from router.deaths.fence import fence_route
from router.workers.load_estimate import Reservation
from serving.net.internal_net import agent_name

HOSTS = "boot/1", "boot/2"


@pytest.mark.parametrize(("draining", "busy"), [(True, False), (True, True), (False, False)])
async def test_who_leaves_in_order_with_nothing_to_do_is_not_listed(
    cluster: Cluster, draining: bool, busy: bool
) -> None:
    """Its end can be proven all the same."""
    worker = await cluster.add("d0", DECODE)
    worker.report(draining=draining)
    await until(lambda: cluster.link(worker).draining is draining)
    if busy:
        cluster.link(worker).estimate.reserve(b"a", Reservation(sequences=1))
    await worker.stop()
    await until(lambda: cluster.registry.deaths._lost)
    assert bool(cluster.registry.deaths.unproven) is (busy or not draining)
    cluster.registry.deaths.fence("d0", worker.identity.epoch)
    assert not cluster.registry.deaths._lost


async def lost_worker(cluster: Cluster) -> tuple[ScriptedWorker, ScriptedWorker]:
    """One that decodes, and one on two hosts that it knew. The router has lost the latter."""
    decode = await cluster.add("d0", DECODE)
    prefill = ScriptedWorker("p0", PREFILL)
    prefill.identity.endpoint.process = f"{HOSTS[0]}/5/1"
    prefill.identity.endpoint.ranks.add(process=f"{HOSTS[1]}/5/1")
    cluster.workers.append(prefill)
    await prefill.start()
    cluster.registry.announce(prefill.identity)
    await until(lambda: cluster.has_load(prefill))
    await prefill.stop()
    assert not (await decode.heard("part")).proven_dead
    await until(lambda: cluster.registry.deaths.unproven)
    return decode, prefill


async def test_a_peer_hears_it_once_both_hosts_have_said_so(cluster: Cluster) -> None:
    decode, prefill = await lost_worker(cluster)
    deaths = cluster.registry.deaths
    assert deaths.witness("p0", HOSTS[0], [f"{HOSTS[0]}/5/1"]) == []
    assert not decode.count("part")
    deaths.witness("p0", HOSTS[1], [f"{HOSTS[1]}/5/1"])
    part = await decode.heard("part")
    assert (part.agent_name, part.proven_dead) == (prefill.agent_name, True)


async def test_a_router_that_is_started_again_learns_it_from_who_waits(cluster: Cluster) -> None:
    """The fence is then as ever, and reaches who has not heard it the first time."""
    decode, _ = await cluster.add("d0", DECODE), await cluster.add("d1", DECODE)
    lost = agent_name("p0", 7)
    question = worker_pb2.Quiesce(
        decode_agent_name=decode.agent_name,
        prefill_agent_name=lost,
        prefill_processes=[f"{host}/5/1" for host in HOSTS],
    )
    posing = worker_pb2.Quiesce(decode_agent_name="d1-1", prefill_agent_name=agent_name("p1", 7))
    decode.say(quiesce_wanted=posing)
    decode.say(quiesce_wanted=question)
    await until(lambda: cluster.registry.deaths.unproven)
    _, shown = await asked(cluster)
    assert [(one["worker"], one["processes"]) for one in shown["lost"]] == [("p0", 2)]
    assert (await asked(cluster, {"worker": "p0", "epoch": "7"}))[0] == 200
    for _ in range(2):
        part = await decode.heard("part")
        assert (part.agent_name, part.proven_dead) == (lost, True)
        decode.say(quiesce_wanted=question)
    assert (await asked(cluster))[1] == {"lost": []}


async def test_who_missed_a_proven_end_is_told_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object) -> bool:
        return True

    monkeypatch.setattr("router.workers.registry.process_is_gone", gone)
    prefill, decode = await cluster.pair()
    await prefill.stop()
    assert (await decode.heard("part")).proven_dead
    assert cluster.registry.deaths.asked(agent_name("p0", prefill.identity.epoch), [])
    assert not cluster.registry.deaths.unproven


async def asked(cluster: Cluster, body: Any = None) -> tuple[int, Any]:
    """Status and answer of the page."""
    route = fence_route(cluster.registry.deaths, lambda: cluster.registry.members)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    method = "GET" if body is None else "POST"
    scope = {"type": "http", "method": method, "path": "/fence", "headers": []}
    answer = await route.endpoint(Request(scope, receive))
    return answer.status_code, json.loads(answer.body)


async def test_an_operator_fences_what_is_lost_and_nothing_that_lives(cluster: Cluster) -> None:
    decode, prefill = await lost_worker(cluster)
    epoch = f"{prefill.identity.epoch:016x}"
    _, shown = await asked(cluster)
    assert [(one["worker"], one["epoch"], one["processes"]) for one in shown["lost"]] == [
        ("p0", epoch, 2)
    ]
    status, answer = await asked(cluster, {"worker": "d0", "epoch": f"{decode.identity.epoch:x}"})
    assert (status, "is attached: it lives" in answer["error"]) == (409, True)
    assert await asked(cluster, {"worker": "p0", "epoch": epoch}) == (
        200,
        {"worker": "p0", "epoch": epoch},
    )
    part = await decode.heard("part")
    assert (part.agent_name, part.proven_dead) == (prefill.agent_name, True)
    assert await asked(cluster) == (200, {"lost": []})


@pytest.mark.parametrize("change", [{"worker": "p1"}, {"epoch": "7"}])
async def test_what_is_not_lost_here_is_refused_and_frees_nothing(
    cluster: Cluster, change: dict[str, str]
) -> None:
    decode, prefill = await lost_worker(cluster)
    named = {"worker": "p0", "epoch": f"{prefill.identity.epoch:016x}"} | change
    status, answer = await asked(cluster, named)
    said = f"this router knows no lost {named['worker']} of epoch {int(named['epoch'], 16):016x}"
    assert (status, answer["error"].partition(":")[0]) == (404, said)
    assert not decode.count("part")
    assert len((await asked(cluster))[1]["lost"]) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 9000,
        {},
        [],
        {"worker": "p0"},
        {"worker": "p0", "epoch": 7},
        {"worker": "p0", "epoch": "x"},
        {"worker": "p0", "epoch": "0"},
        {"worker": "p0", "epoch": "1" * 17},
        {"worker": 5, "epoch": "7"},
    ],
)
async def test_a_body_that_says_nothing_fences_nothing(cluster: Cluster, body: Any) -> None:
    status, answer = await asked(cluster, body)
    assert (status, answer["error"]) == (
        400,
        'the body must be {"worker": NAME, "epoch": 16 hexadecimal digits}',
    )
