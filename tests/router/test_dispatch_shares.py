"""Who gets the last slots, how much a tenant may have, and deadlines that cannot be met."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import aiohttp
import grpc.aio
import pytest
from router_kit import served
from scripted_worker import BOTH, DECODE, PREFILL, Cluster, Reader, ScriptedWorker, job, until
from test_dispatch_failures import error_of

from baton.inference.v1 import inference_pb2 as api
from baton.inference.v1 import inference_pb2_grpc as api_grpc
from router.jobs import Job, Quota
from serving.wire import pack_ids

SLOTS = 32
KEPT = 2
"""A sixteenth of the slots."""


async def a_worker(cluster: Cluster, role: int = BOTH) -> ScriptedWorker:
    """With `SLOTS` slots and room for all that they need."""
    worker = await cluster.add(f"w{role}", role)
    room = {"max_sequences": SLOTS, "total_pages": 1000, "free_pages": 1000}
    worker.report(prefill_credit_tokens=10_000, **room)
    await until(lambda: cluster.link(worker).capacity().max_sequences == SLOTS)
    return worker


def of(call: str, **fields: Any) -> Job:
    """A job of a call that is alone in its trace."""
    return replace(job(**fields), id=call, holder=fields.get("holder", call))


async def leave(*readers: Reader) -> None:
    for reader in readers:
        await reader.leave()


async def test_the_last_slots_are_for_those_who_hold_none(cluster: Cluster) -> None:
    """A call of many prompts fills a worker for the length of its answers, but not all of it."""
    worker = await a_worker(cluster)
    many = [cluster.read(of("many")) for _ in range(SLOTS + 8)]
    await until(lambda: cluster.dispatcher.queued_jobs == 8 + KEPT)
    others = [cluster.read(of(f"other {i}")) for i in range(KEPT + 1)]
    await until(lambda: worker.count("submit") == SLOTS)
    assert cluster.dispatcher.queued_jobs == 8 + KEPT + 1
    await leave(*many, *others)


async def test_who_waits_for_pages_is_passed_into_the_last_slots_only(cluster: Cluster) -> None:
    worker = await a_worker(cluster)
    worker.report(free_pages=4)
    await until(lambda: cluster.link(worker).capacity().free_pages == 4)
    held = cluster.read(of("large"))
    await until(lambda: worker.count("submit") == 1)
    large = cluster.read(of("large", prompt_tokens=100))
    small = cluster.read(of("small"))
    await until(lambda: worker.count("submit") == 2)
    assert cluster.dispatcher.queued_jobs == 1
    again = cluster.read(of("small"))
    await until(lambda: cluster.dispatcher.queued_jobs == 2)
    await leave(held, large, small, again)


async def test_a_tenant_has_no_more_under_way_than_it_may(cluster: Cluster) -> None:
    await a_worker(cluster)
    for quota, fits in (
        (Quota(requests=2), {}),
        (Quota(sequences=4), {"choices": 2}),
        (Quota(tokens=40), {"prompt_tokens": 4, "max_tokens": 8, "choices": 2}),
    ):
        limited = {"tenant": "acme", "quota": quota, **fits}
        taken = [cluster.read(job(**limited)) for _ in range(2)]
        await until(lambda: cluster.dispatcher.active_jobs == 2)
        error = await error_of(cluster.read(job(**limited)))
        assert (error.reason, error.code.name) == ("QUOTA_EXCEEDED", "RESOURCE_EXHAUSTED")
        assert error.retry_after_s == 1.0
        other = cluster.read(job(tenant="beta", **fits))
        await until(lambda: cluster.dispatcher.active_jobs == 3)
        await leave(taken[0])
        again = cluster.read(job(**limited))
        await until(lambda: cluster.dispatcher.active_jobs == 3)
        await leave(taken[1], other, again)


async def test_more_than_a_quota_alone_is_no_matter_of_time(cluster: Cluster) -> None:
    await a_worker(cluster)
    quota = Quota(sequences=2)
    error = await error_of(cluster.read(job(tenant="acme", quota=quota, choices=3)))
    assert error.retry_after_s is None
    assert error.metadata == {"quota": "sequences", "used": "0", "wanted": "3", "limit": "2"}


async def test_alone_it_may_try(cluster: Cluster) -> None:
    worker = await a_worker(cluster)
    cluster.dispatcher._queue.of("tiny").pace.served(1.0, 1.0, [8])
    reader = cluster.read(job(deadline_s=1))
    await until(lambda: worker.count("submit") == 1)
    await leave(reader)


async def begun(cluster: Cluster) -> tuple[Reader, ScriptedWorker]:
    """A stream of which one token was sent, and its decode worker."""
    prefill, decode = await a_worker(cluster, PREFILL), await a_worker(cluster, DECODE)
    reader = cluster.read(job())
    attempt = (await prefill.heard("submit")).attempt_id
    prefill.first_token(attempt, 10)
    prefill.prefill_done(attempt)
    decode.delivered(attempt)
    await until(lambda: reader.events)
    return reader, decode


async def test_a_pool_that_left_in_order_is_not_waited_for(cluster: Cluster) -> None:
    """`resume_grace_s` is a minute."""
    reader, decode = await begun(cluster)
    decode.report(draining=True)
    await until(lambda: cluster.link(decode).draining)
    await decode.stop()
    began_s = time.monotonic()
    assert (await error_of(reader)).reason == "WORKER_LOST_MID_STREAM"
    assert time.monotonic() - began_s < 10


async def test_a_worker_that_loads_is_waited_for(cluster: Cluster) -> None:
    reader, decode = await begun(cluster)
    decode.report(draining=True)
    await until(lambda: cluster.link(decode).draining)
    new = ScriptedWorker("d1", DECODE)
    cluster.dispatcher.loading(new.identity)
    await decode.stop()
    await until(lambda: not cluster.dispatcher.active_attempts)
    await asyncio.sleep(0.2)
    assert cluster.dispatcher.queued_jobs == 1
    new = await cluster.add("d1", DECODE)
    attempt = (await new.heard("submit")).attempt_id
    new.tokens(attempt, 1, 11)
    new.finished(attempt, 2)
    await reader.end()


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_two_hundred_streams_of_a_connection_hold_up_another_by_one(door: str) -> None:
    """Nobody shows a token here, so connections of this machine take turns."""
    many, honest = 200, [7, 8, 9]
    async with served() as (server, worker), AsyncExitStack() as held:
        worker.report(max_sequences=4, prefill_credit_tokens=10_000)
        await until(lambda: server.dispatcher.attached_models())
        channel = await held.enter_async_context(a_connection(server.address))
        streams = [ask_grpc(channel, [1, 2, 3]) for _ in range(many)]
        await until(lambda: server.dispatcher.queued_jobs == many - worker.count("submit"))
        assert server.dispatcher.queued_jobs > many - 10
        if door == "grpc":
            other = await held.enter_async_context(a_connection(server.address))
            asked: Any = ask_grpc(other, honest)
        else:
            session = await held.enter_async_context(aiohttp.ClientSession())
            url = f"http://{server.http_address}/v1/completions"
            body = {"prompt": honest, "max_tokens": 2}
            asked = asyncio.create_task(session.post(url, json=body).__aenter__())
        before = server.dispatcher.queued_jobs
        await until(lambda: server.dispatcher.queued_jobs == before + 1)
        while True:
            submit = await worker.heard("submit")
            if submit.prompt_ids == pack_ids(honest):
                break
            worker.first_token(submit.attempt_id, 10)
            worker.tokens(submit.attempt_id, 1, 11)
            worker.finished(submit.attempt_id, 2)
        sent = [one for one in worker.history if one.HasField("submit")]
        assert len(sent) <= 12, "of the two hundred those that had begun, and one each turn"
        asked.cancel()
        for stream in streams:
            stream.cancel()


def a_connection(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


def ask_grpc(channel: grpc.aio.Channel, ids: list[int]) -> grpc.aio.Call:
    request = api.StreamGenerateRequest(
        input=api.GenerationInput(
            token_ids=api.TokenIds(ids=ids), stop=api.StopOptions(max_tokens=2)
        )
    )
    request.input.output.omit_text = True
    return api_grpc.InferenceServiceStub(channel).StreamGenerate(request)
