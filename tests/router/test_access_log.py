"""One line for each request at either front door, and nothing of what it said."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from frontdoor_kit import (
    ScriptedDispatcher,
    access_lines,
    fails,
    hangs,
    open_door,
    plays,
    read,
    served_model,
    write_tokenizer,
)
from openai_kit import open_port, says
from router_kit import served
from waiting import until

from baton.client.clients import AsyncClient
from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.jobs import Job
from telemetry.logs import JsonFormatter

SECRET = "Zwölf Boxkämpfer"
SERVICE = "baton.inference.v1.InferenceService/"
WAIT_S = 20.0


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture
def dispatcher(tmp_path: Path) -> ScriptedDispatcher:
    write_tokenizer(tmp_path)
    return ScriptedDispatcher([served_model(tmp_path)], plays([70, 71, 72], [73]))


async def lines_of(log: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    """So many lines, and no more."""
    await until(lambda: len(access_lines(log)) >= count)
    await asyncio.sleep(0.02)
    lines = access_lines(log)
    assert len(lines) == count
    assert SECRET not in "".join(map(str, lines))
    return lines


def prompt(**options: Any) -> api.GenerationInput:
    return api.GenerationInput(text=SECRET, **options)


async def test_a_call_answered_whole(
    dispatcher: ScriptedDispatcher, log: pytest.LogCaptureFixture
) -> None:
    def runs(job: Job) -> Any:
        job.workers.extend(["prefill-0", "decode-0"])
        return plays([70, 71, 72], [73])(job)

    dispatcher.script = runs
    async with open_door(dispatcher) as door:
        request = api.StreamGenerateRequest(input=prompt(choices=2), client_tag="tag")
        async for _ in door.stub.StreamGenerate(request):
            pass
        (line,) = await lines_of(log, 1)
    job = dispatcher.jobs[0]
    record = next(one for one in log.records if one.name == "baton.access")
    shown = json.loads(JsonFormatter("baton-router", "router-0").format(record))
    assert 0 < shown.pop("first_token_s") <= shown.pop("duration_s") < WAIT_S
    assert (
        shown.items()
        >= {
            "message": "request",
            "trace_id": job.id,
            "method": SERVICE + "StreamGenerate",
            "status": "OK",
            "reason": "",
            "tenant": "",
            "client_tag": "tag",
            "model": "tiny",
            "prompt_tokens": job.prompt_tokens,
            "cached_prompt_tokens": 1,
            "output_tokens": 4,
            "queue_s": 0.001,
            "prefill_s": 0.002,
            "kv_transfer_s": 0.003,
            "decode_queue_s": 0.004,
            "decode_s": 0.005,
        }.items()
    )
    assert shown["finish_reasons"] == ["length", "length"]
    assert shown["workers"] == ["prefill-0", "decode-0"]
    assert line["name"] == "baton.access"


async def test_calls_that_are_refused_fail_or_are_cut_short(
    dispatcher: ScriptedDispatcher, log: pytest.LogCaptureFixture
) -> None:
    async with open_door(dispatcher) as door:
        path = f"/{SERVICE}Generate"
        for request in (
            b"\xff" * 20,
            api.GenerateRequest(input=prompt(model=SECRET)).SerializeToString(),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await door.channel.unary_unary(path)(request)
        dispatcher.script = fails(errors.worker_lost_mid_stream(2), after=[70, 71])
        with pytest.raises(grpc.aio.AioRpcError):
            await read(door.stub, prompt())
        dispatcher.script = fails(ValueError(SECRET))
        with pytest.raises(grpc.aio.AioRpcError):
            await read(door.stub, prompt())
        dispatcher.script = hangs
        call = door.stub.StreamGenerate(api.StreamGenerateRequest(input=prompt()))
        await call.read()
        await call.read()
        call.cancel()
        await lines_of(log, 5)
        with pytest.raises(grpc.aio.AioRpcError):
            await door.stub.Generate(api.GenerateRequest(input=prompt()), timeout=1.5)
        await lines_of(log, 6)
        await door.stub.Tokenize(api.TokenizeRequest(text=SECRET))
        lines = await lines_of(log, 7)
    assert [
        (line["method"].removeprefix(SERVICE), line["status"], line["reason"]) for line in lines
    ] == [
        ("Generate", "INVALID_ARGUMENT", "MALFORMED_REQUEST"),
        ("Generate", "NOT_FOUND", "MODEL_NOT_FOUND"),
        ("StreamGenerate", "ABORTED", "WORKER_LOST_MID_STREAM"),
        ("StreamGenerate", "INTERNAL", "INTERNAL"),
        ("StreamGenerate", "CANCELLED", "CANCELLED"),
        ("Generate", "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        ("Tokenize", "OK", ""),
    ]
    assert [line["output_tokens"] for line in lines] == [0, 0, 2, 0, 1, 1, 0]
    assert len({line["trace_id"] for line in lines}) == 7


async def test_http(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """A batch of prompts is one request, and its tokens add up."""
    async with open_port(tmp_path, says("abc")) as port:
        headers = {"x-request-id": "tag"}
        await port.client.completions.create(
            model="tiny", prompt=[SECRET, SECRET], extra_headers=headers
        )
        with pytest.raises(openai.BadRequestError):
            await port.client.completions.create(model="tiny", prompt=SECRET, temperature=-1)
        port.dispatcher.script = fails(errors.queue_full(3, 1.0))
        messages: Any = [{"role": "user", "content": SECRET}]
        with pytest.raises(openai.RateLimitError):
            await port.client.chat.completions.create(model="tiny", messages=messages)
        port.dispatcher.script = hangs
        stream = await port.client.completions.create(model="tiny", prompt=SECRET, stream=True)
        await anext(aiter(stream))
        await stream.close()
        lines = await lines_of(log, 4)
        tokens = len(port.ids("abc"))
    assert [(line["method"], line["status"], line["reason"]) for line in lines] == [
        ("POST /v1/completions", 200, ""),
        ("POST /v1/completions", 400, "INVALID_FIELD"),
        ("POST /v1/chat/completions", 429, "QUEUE_FULL"),
        ("POST /v1/completions", 499, "CANCELLED"),
    ]
    assert lines[0]["output_tokens"] == 2 * tokens
    assert lines[0]["prompt_tokens"] == 2 * port.dispatcher.jobs[0].prompt_tokens
    assert lines[0]["client_tag"] == "tag"
    assert lines[3]["output_tokens"] == 1


async def test_the_workers_are_named(log: pytest.LogCaptureFixture) -> None:
    async with served() as (server, worker), AsyncClient(server.address) as client:
        stream = client.stream(token_ids=[1, 2, 3], max_tokens=2, omit_text=True)
        first = asyncio.ensure_future(anext(stream))
        attempt = (await worker.heard("submit")).attempt_id
        worker.first_token(attempt, 10)
        await first
        stream.close()
        (line,) = await lines_of(log, 1)
    assert line["workers"] == ["b0"]
    assert (line["reason"], line["output_tokens"]) == ("CANCELLED", 1)
