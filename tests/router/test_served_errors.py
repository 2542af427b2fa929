"""The rows of the error table, brought about for real: a whole router, both its doors, its workers.

Only the workers' words are scripted. What a router refuses by itself, or makes of what befell a
worker, reaches a gRPC caller and an HTTP caller with one reason, each in its own form. Which reason
a dispatcher gives is in `test_dispatch_failures.py`, how each looks in `test_router_errors.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import httpx2 as httpx  # what the OpenAI client brings
import pytest
from frontdoor_kit import ids_input, refusal
from google.rpc import error_details_pb2
from router_kit import a_router, announce, served
from scripted_worker import DECODE, PREFILL, ScriptedWorker, until

from baton.grpc_options import channel_options
from baton.inference.v1 import inference_pb2 as api
from baton.inference.v1 import inference_pb2_grpc as api_grpc
from baton.worker.v1 import worker_pb2
from router.errors import DOMAIN
from router.server import RouterServer
from serving.release import PROTOCOL, stamp

HTTP_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "ABORTED": 503,
    "DEADLINE_EXCEEDED": 504,
    "INTERNAL": 500,
}


@dataclass
class Seen:
    """An error, as either caller sees it."""

    code: str
    """Of gRPC; an HTTP status stands for all codes that have it."""
    reason: str
    message: str
    retry_after_s: float | None
    metadata: dict[str, str] = field(default_factory=dict)
    """gRPC alone."""


Ask = Callable[..., Awaitable[Seen]]


async def ask_grpc(
    server: RouterServer, prompt: int = 3, timeout_s: float = 60.0, model: str = "tiny"
) -> Seen:
    given = api.GenerationInput(model=model, token_ids=api.TokenIds(ids=[1] * prompt))
    given.stop.max_tokens = 4
    async with grpc.aio.insecure_channel(server.address, options=channel_options()) as channel:
        stub = api_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(api.GenerateRequest(input=given), timeout=timeout_s)
    found = refusal(caught.value)
    assert found.info.domain == DOMAIN
    assert len(found.detail(error_details_pb2.RequestInfo).request_id) == 32
    retry = None
    if found.has(error_details_pb2.RetryInfo):
        retry = found.detail(error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() / 1e3
    values = dict(found.info.metadata)
    return Seen(found.code.name, found.info.reason, found.message, retry, values)


async def ask_http(
    server: RouterServer, prompt: int = 3, timeout_s: float = 60.0, model: str = "tiny"
) -> Seen:
    body = {"model": model, "prompt": [1] * prompt, "max_tokens": 4}
    async with httpx.AsyncClient() as client:
        url = f"http://{server.http_address}/v1/completions"
        answer = await client.post(url, json=body, timeout=timeout_s)
    error = answer.json()["error"]
    code = next(code for code, status in HTTP_STATUSES.items() if status == answer.status_code)
    retry = answer.headers.get("retry-after-ms")
    assert answer.headers["x-should-retry"] == str(retry is not None).lower()
    return Seen(code, error["code"].upper(), error["message"], retry and float(retry) / 1e3)


@pytest.fixture(params=[ask_grpc, ask_http], ids=["grpc", "http"])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param


def check(seen: Seen, code: str, reason: str, *, retry: bool, **metadata: str) -> None:
    assert seen.reason == reason
    assert HTTP_STATUSES[seen.code] == HTTP_STATUSES[code]
    assert (seen.retry_after_s is not None) == retry
    if seen.metadata:
        assert seen.code == code
        assert seen.metadata.items() >= metadata.items()


async def test_no_worker_yet(ask: Ask) -> None:
    async with a_router() as server:
        check(await ask(server), "UNAVAILABLE", "NO_WORKERS", retry=True, model="tiny")


@pytest.mark.parametrize("protocol", ["", "0f6c1d9a3b5e7788", f"{PROTOCOL.major + 1}.0"])
async def test_a_worker_of_another_major_protocol_is_refused_by_name(
    caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    """Whether it loads or serves; the log says so once for each of its starts."""
    async with a_router() as server:
        old = worker_pb2.WorkerIdentity()
        old.CopyFrom(ScriptedWorker("d0", DECODE).identity)
        old.address = "127.0.0.1:9"
        old.release, old.protocol = "0.0.1", protocol
        for loading in (True, False, False):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await announce(server, old, loading=loading)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            told = caught.value.details() or ""
            named = f"(0.0.1, protocol {protocol or 'unknown'}; here"
            assert f"worker d0 is of another release of Baton {named}" in told
        assert not server.registry.members
        assert [one.message for one in caplog.records].count("worker refused") == 1


async def test_a_model_that_is_being_loaded(ask: Ask) -> None:
    """From the first announcement on, for any worker, and until the last one is silent."""
    async with a_router() as server:
        model = worker_pb2.ModelInfo(name="tiny")
        identity = stamp(worker_pb2.WorkerIdentity(worker_id="d0", model=model))
        await announce(server, identity, loading=True)
        assert not server.registry.members
        check(await ask(server), "UNAVAILABLE", "MODEL_LOADING", retry=True, model="tiny")
        check(await ask(server, model=""), "UNAVAILABLE", "MODEL_LOADING", retry=True, model="tiny")
        check(await ask(server, model="x"), "UNAVAILABLE", "NO_WORKERS", retry=True, model="x")
    async with served(PREFILL) as (server, _):
        await announce(server, identity, loading=True)
        check(await ask(server), "UNAVAILABLE", "MODEL_LOADING", retry=True, model="tiny")
        decode = ScriptedWorker("d0", DECODE)
        await decode.start()
        await announce(server, decode.identity)
        await until(server.dispatcher.models)
        await decode.stop()
        await until(lambda: not server.dispatcher.models())
        check(await ask(server), "UNAVAILABLE", "NO_WORKERS", retry=True, model="tiny")


async def test_larger_than_any_pool(ask: Ask) -> None:
    """Refused at once, and not by whichever worker happens to be asked."""
    async with served() as (server, worker):
        worker.report(total_pages=3, free_pages=3)
        await until(lambda: server.registry.members[0].capacity().total_pages == 3)
        seen = await ask(server, prompt=45)
        reason = "CONTEXT_LENGTH_EXCEEDED"
        check(seen, "INVALID_ARGUMENT", reason, retry=False, max_context_tokens="48")
        assert not worker.count("submit")
        fits = asyncio.ensure_future(ask(server, prompt=44))
        attempt = (await worker.heard("submit")).attempt_id
        worker.failed(attempt, worker_pb2.FAILURE_REASON_NUMERICAL)
        assert (await fits).reason == "NUMERICAL_ERROR"


@pytest.mark.parametrize(("choices", "left"), [(1, 96 - 10), (3, 32 - 10)])
async def test_output_that_nobody_asked_for_fits_the_pool(choices: int, left: int) -> None:
    """Choices need pages of their own, so several have less room than the context promises."""
    async with served() as (server, worker):
        worker.report(total_pages=6, free_pages=6)
        await until(lambda: server.registry.members[0].capacity().total_pages == 6)
        given = ids_input(*[1] * 10)
        given.choices = choices
        async with grpc.aio.insecure_channel(server.address, options=channel_options()) as channel:
            stub = api_grpc.InferenceServiceStub(channel)
            call = stub.Generate(api.GenerateRequest(input=given))
            submitted = await worker.heard("submit")
            assert submitted.stopping.max_tokens == left
            call.cancel()
            given.stop.max_tokens = left + 1
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(api.GenerateRequest(input=given))
        assert refusal(caught.value).info.reason == "CONTEXT_LENGTH_EXCEEDED"


async def no_credit(server: RouterServer, worker: ScriptedWorker) -> None:
    worker.report(prefill_credit_tokens=0)
    await until(lambda: server.registry.members[0].capacity().prefill_credit_tokens <= 0)


async def backlog(server: RouterServer, worker: ScriptedWorker, tokens: int) -> asyncio.Task[Seen]:
    """A prompt that waits, for as long as nothing changes."""
    before = server.dispatcher.queued_jobs
    waits = asyncio.create_task(ask_grpc(server, tokens))
    await until(lambda: server.dispatcher.queued_jobs == before + 1)
    return waits


HELD_S = 1.2
"""Longer than what is too short to measure a pace."""
DONE = 4 + 1
"""What is done in that time: a prompt, and a token of its output."""


async def measure(
    server: RouterServer, worker: ScriptedWorker
) -> tuple[float, list[asyncio.Task[Seen]]]:
    """Beside one that runs two prompts wait, of 4 and 40 tokens, and the first goes and has a
    token; returns when it began to wait, and what is left: one runs, and one waits."""
    runs = asyncio.create_task(ask_grpc(server))
    await worker.heard("submit")
    await no_credit(server, worker)
    began_s = time.monotonic()
    first = await backlog(server, worker, 4)
    second = await backlog(server, worker, 40)
    await asyncio.sleep(HELD_S)
    worker.report(prefill_credit_tokens=1)
    worker.load.prefill_credit_tokens = 0
    attempt = (await worker.heard("submit")).attempt_id
    worker.report(prefill_credit_tokens=0)
    await until(lambda: not server.registry.members[0].estimate.load.prefill_credit_tokens)
    worker.first_token(attempt, 10)
    worker.failed(attempt, worker_pb2.FAILURE_REASON_NUMERICAL)
    await first
    return began_s, [runs, second]


def check_wait(told_s: float | None, began_s: float, work: int) -> None:
    """`DONE` took `HELD_S` at least, and by now at most."""
    assert told_s is not None
    passed_s = time.monotonic() - began_s
    assert 0.95 * work / DONE * HELD_S <= told_s <= 1.05 * work / DONE * passed_s + 0.1


async def test_a_full_queue_says_when_by_its_own_pace(ask: Ask) -> None:
    async with served(max_queued_requests=2) as (server, worker):
        began_s, open_ones = await measure(server, worker)
        open_ones.append(await backlog(server, worker, 4))
        seen = await ask(server)
        check(seen, "RESOURCE_EXHAUSTED", "QUEUE_FULL", retry=True, queued_requests="2")
        check_wait(seen.retry_after_s, began_s, work=(40 + 4) + (4 + 4))
        for one in open_ones:
            one.cancel()
