"""Who joins, who is introduced to whom, and who is told of whose end."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
from scripted_worker import BOTH, DECODE, PREFILL, Cluster, ScriptedWorker, until, with_settings
from starlette.requests import Request

from baton.grpc_options import channel_options, server_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from router.workers.discovery import discovery_route
from router.workers.link import Loss
from router.workers.registry import STARTS_KEPT, RegistryServicer
from telemetry.names import FAILURE_UNIT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def registry_stub(
    cluster: Cluster,
) -> AsyncIterator[worker_pb2_grpc.RegistryServiceAsyncStub]:
    server = grpc.aio.server(options=server_options())
    worker_pb2_grpc.add_RegistryServiceServicer_to_server(
        RegistryServicer(cluster.registry), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=channel_options()
        ) as channel:
            yield worker_pb2_grpc.RegistryServiceStub(channel)
    finally:
        await server.stop(None)


def meets(worker: ScriptedWorker) -> set[str]:
    return {
        message.meet.worker.endpoint.agent_name
        for message in worker.history
        if message.WhichOneof("message") == "meet"
    }


async def test_announcing_opens_one_stream(cluster: Cluster) -> None:
    worker = ScriptedWorker("p0", PREFILL)
    await worker.start()
    cluster.workers.append(worker)
    request = worker_pb2.AnnounceRequest(worker=worker.identity)
    async with registry_stub(cluster) as stub:
        assert not (await stub.Announce(request)).attached
        assert not (await stub.Announce(request)).attached or cluster.registry.members
        await until(lambda: cluster.registry.members)
        assert (await stub.Announce(request)).attached
        assert len(cluster.registry.members) == 1


async def test_discovery_tells_groups_apart(cluster: Cluster) -> None:
    for name, unit in (("a", "one"), ("b", "")):
        await cluster.add(name, DECODE, failure_unit=unit)
    for link in cluster.registry.members:
        link.identity.admin_address = "127.0.0.1:9"
    route = discovery_route(lambda: cluster.registry.members)
    listed = json.loads((await route.endpoint(Request({"type": "http"}))).body)
    labels = [one["labels"] for one in listed]
    assert {one["worker"]: one[FAILURE_UNIT] for one in labels} == {"a": "one", "b": ""}


@pytest.mark.parametrize("field", ["worker_id", "address", "role", "model"])
async def test_incomplete_announcements_are_refused(cluster: Cluster, field: str) -> None:
    identity = ScriptedWorker("p0", PREFILL).identity
    identity.address = "127.0.0.1:9"
    identity.ClearField(field)
    async with registry_stub(cluster) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Announce(worker_pb2.AnnounceRequest(worker=identity))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("loading", [False, True])
async def test_a_worker_of_an_unknown_role_is_refused_and_counted(
    cluster: Cluster, loading: bool
) -> None:
    worker = ScriptedWorker("p0", 7)
    await worker.start()
    cluster.workers.append(worker)
    request = worker_pb2.AnnounceRequest(worker=worker.identity, loading=loading)
    async with registry_stub(cluster) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="p0 refused: its role 7 is unknown") as told:
            await stub.Announce(request)
    assert told.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert cluster.registry.net.refusals.counts["role"] == 1
    assert not cluster.registry._links


async def test_a_worker_that_answers_with_another_role_is_refused(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.workers.registry")
    worker = ScriptedWorker("p0", PREFILL)
    await worker.start()
    cluster.workers.append(worker)
    announced = worker_pb2.WorkerIdentity()
    announced.CopyFrom(worker.identity)
    worker.identity.role = 7
    cluster.registry.announce(announced)
    await until(lambda: any(record.message == "worker did not attach" for record in caplog.records))
    assert [record.cause for record in caplog.records] == ["refused"]
    assert not cluster.registry.members


async def test_of_starts_that_froze_the_last_are_remembered(cluster: Cluster) -> None:
    """Of each one a counter, until its worker is attached again. Most never are."""
    for epoch in range(STARTS_KEPT + 3):
        worker = worker_pb2.WorkerIdentity(worker_id=f"p{epoch}", epoch=epoch, role=PREFILL)
        worker.address = "127.0.0.1:9"
        cluster.registry.announce(worker)
        link = cluster.registry._links[worker.worker_id, epoch]
        link.progress = epoch
        link.end(Loss.FROZEN)
    kept = cluster.registry._stalled
    assert list(kept.values()) == list(range(3, STARTS_KEPT + 3))


async def test_pairs_that_may_exchange_pages_meet(cluster: Cluster) -> None:
    prefill = await cluster.add("p0", PREFILL)
    other_prefill = await cluster.add("p1", PREFILL)
    decode = await cluster.add("d0", DECODE)
    both = await cluster.add("b0", BOTH)
    foreign = await cluster.add("d1", DECODE, fingerprint="other")
    for worker, peers in ((both, 3), (decode, 3), (prefill, 2), (other_prefill, 2)):
        await until(lambda: len(meets(worker)) >= peers)
    assert meets(prefill) == meets(other_prefill) == {decode.agent_name, both.agent_name}
    assert meets(decode) == {prefill.agent_name, other_prefill.agent_name, both.agent_name}
    assert meets(foreign) == set()


async def test_peers_of_a_lost_worker_part(cluster: Cluster) -> None:
    """A goodbye is no proof of death."""
    prefill, decode = await cluster.pair()
    foreign = await cluster.add("d1", DECODE, fingerprint="other")
    await prefill.stop()
    part = await decode.heard("part")
    assert (part.agent_name, part.proven_dead) == (prefill.agent_name, False)
    assert foreign.count("part") == 0


async def test_a_warning_is_for_those_who_said_nothing(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Not for who drained, as on every scaling down, nor for any at the router's own end."""
    caplog.set_level(logging.INFO, "router.workers.registry")
    prefill, decode = await cluster.pair()
    other = await cluster.add("d1", DECODE)
    decode.report(draining=True)
    await until(lambda: cluster.link(decode).draining)
    for left, worker in ((2, decode), (1, prefill)):
        await worker.stop()
        await until(lambda: len(cluster.registry.members) == left)
    await cluster.registry.close()
    ends = {r.worker: (r.levelname, r.message) for r in caplog.records if "cause" in vars(r)}
    assert ends == {
        decode.identity.worker_id: ("INFO", "worker left"),
        prefill.identity.worker_id: ("WARNING", "worker lost"),
        other.identity.worker_id: ("INFO", "worker left"),
    }


async def test_two_of_one_name_are_told_apart(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """By mistake, or one that drains beside its successor: both stay, however often they announce
    themselves, and each is somebody to policies, metrics and traces."""
    prefill, decode = await cluster.pair()
    gone = ScriptedWorker("d0", DECODE)
    gone.identity.address = "127.0.0.1:9"
    cluster.registry.announce(gone.identity)  # late, of a start that is gone
    namesake = await cluster.add("d0", DECODE)
    for _ in range(5):
        for worker in (decode, namesake):
            assert cluster.registry.announce(worker.identity)
        await asyncio.sleep(0.05)
    epochs = {link.identity.epoch for link in cluster.registry.members}
    assert epochs == {one.identity.epoch for one in (prefill, decode, namesake)}
    names = {link.worker_id for link in cluster.registry.members}
    assert names == {"p0", "d0", f"d0~{namesake.identity.epoch & 0xFFFFFFFF:08x}"}
    assert "give each its own --name" in caplog.text
    await until(lambda: namesake.agent_name in meets(prefill))
    assert not prefill.count("part")
    await decode.stop()
    assert (await prefill.heard("part")).agent_name == decode.agent_name
    assert len(cluster.registry.members) == 2


async def test_same_start_on_a_new_stream_is_not_parted(cluster: Cluster) -> None:
    """The connection broke, the process did not."""
    prefill, decode = await cluster.pair()
    address = decode.identity.address
    await decode.stop()
    await until(lambda: len(cluster.registry.members) == 1)
    assert (await prefill.heard("part")).agent_name == decode.agent_name
    back = ScriptedWorker("d0", DECODE)
    back.identity.CopyFrom(decode.identity)
    await back.start(address)
    cluster.workers.append(back)
    cluster.registry.announce(back.identity)
    await until(lambda: len(cluster.registry.members) == 2)
    assert (await prefill.heard("meet")).worker.epoch == decode.identity.epoch


@with_settings(stale_after_s=1)
async def test_hung_worker_is_not_taken_back_until_it_moves(cluster: Cluster) -> None:
    """Its other threads still announce it and answer; only its step loop counts."""
    worker = await cluster.add("b0", BOTH)
    worker.frozen = True
    await until(lambda: not cluster.registry.members)
    cluster.registry.announce(worker.identity)
    await asyncio.sleep(0.3)
    assert not cluster.registry.members
    worker.frozen = False
    await until(lambda: cluster.registry.members)


def quiesce(decode: ScriptedWorker, prefill: ScriptedWorker) -> worker_pb2.Quiesce:
    return worker_pb2.Quiesce(
        transfer_id=b"t" * 16,
        decode_epoch=decode.identity.epoch,
        decode_agent_name=decode.agent_name,
        prefill_agent_name=prefill.agent_name,
    )


async def test_a_question_and_its_answer_pass_between_two_workers(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    other = await cluster.add("p1", PREFILL)
    question = quiesce(decode, prefill)
    decode.say(quiesce_wanted=question)
    assert await prefill.heard("quiesce") == question
    prefill.say(quiesced=question)
    assert await decode.heard("quiesced") == question
    assert not other.count("quiesce")


async def test_nobody_asks_or_answers_for_somebody_else(cluster: Cluster) -> None:
    """Pages go back on that word, and a peer that is not there answers nothing."""
    prefill, decode = await cluster.pair()
    other = await cluster.add("p1", PREFILL)
    other.say(quiesce_wanted=quiesce(decode, prefill))
    other.say(quiesced=quiesce(decode, prefill))
    decode.say(quiesce_wanted=quiesce(decode, ScriptedWorker("gone", PREFILL)))
    honest = quiesce(decode, other)
    decode.say(quiesce_wanted=honest)
    assert await other.heard("quiesce") == honest
    other.say(quiesced=honest)
    assert await decode.heard("quiesced") == honest
    assert not prefill.count("quiesce")
    assert not decode.count("quiesced")


async def test_a_registry_that_closes_takes_nobody_back(cluster: Cluster) -> None:
    """Workers announce themselves on while the router ends: it would wait for their streams."""
    worker = await cluster.add("p0", PREFILL)
    closing = asyncio.create_task(cluster.registry.close())
    for _ in range(3):
        await asyncio.sleep(0)
        assert not cluster.registry.announce(worker.identity)
    async with asyncio.timeout(10):
        await closing
    assert not cluster.registry.announce(worker.identity)
    assert not cluster.registry.members
