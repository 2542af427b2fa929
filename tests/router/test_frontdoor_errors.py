"""Every status that the front door can produce, through a real channel."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from frontdoor_kit import (
    Door,
    Refusal,
    ScriptedDispatcher,
    fails,
    hangs,
    ids_input,
    open_door,
    plays,
    read,
    refusal,
    served_model,
)
from google.rpc import error_details_pb2

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.call import Call
from router.doors.frontdoor import InferenceService
from router.errors import RouterError
from router.jobs import Job, JobEvent, JobFinished, JobStarted, JobTokens
from router.requests.tokenization import Tokenizers
from router.requests.validation import Limits

Code = grpc.StatusCode
SECRET = "the prompt was: secret"
METHODS = ["Generate", "StreamGenerate", "Tokenize", "ListModels"]


@pytest.fixture
def dispatcher(folder: Path) -> ScriptedDispatcher:
    return ScriptedDispatcher([served_model(folder)], plays([70]))


async def refused(door: Door, prompt: api.GenerationInput) -> Refusal:
    """The status of both methods, which must be one and the same but for the call's id."""
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await door.stub.Generate(api.GenerateRequest(input=prompt), timeout=20)
    with pytest.raises(grpc.aio.AioRpcError) as streamed:
        await read(door.stub, prompt)
    first, second = refusal(unary.value), refusal(streamed.value)
    assert (first.code, first.message, first.info) == (second.code, second.message, second.info)
    assert first.info.domain == errors.DOMAIN
    assert len(first.detail(error_details_pb2.RequestInfo).request_id) == 32
    return first


async def raw(door: Door, method: str, data: bytes) -> Refusal | None:
    """Sends bytes; None where the call succeeds."""
    path = f"/baton.inference.v1.InferenceService/{method}"
    try:
        if method == "StreamGenerate":
            async for _ in door.channel.unary_stream(path)(data, timeout=20):
                pass
        else:
            await door.channel.unary_unary(path)(data, timeout=20)
    except grpc.aio.AioRpcError as error:
        return refusal(error)
    return None


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_do_not_parse(dispatcher: ScriptedDispatcher, method: str) -> None:
    async with open_door(dispatcher) as door:
        for data in (b"\x0a\xff", b"\x0a\x04\x12\x02\xff\xfe", b"\xff" * 20):
            found = await raw(door, method, data)
            if found is None or found.info.reason != "MALFORMED_REQUEST":
                assert method == "ListModels", (data, found)  # It has no field to be broken.
                continue
            assert found.code is Code.INVALID_ARGUMENT
            assert "Error" not in found.message
        assert await raw(door, method, b"\xff" * 20) is not None


async def test_all_violations_at_once(dispatcher: ScriptedDispatcher) -> None:
    prompt = ids_input(70, 512)
    prompt.sampling.temperature = -1
    prompt.sampling.top_p = float("nan")
    prompt.choices = 0
    async with open_door(dispatcher) as door:
        found = await refused(door, prompt)
    assert (found.code, found.info.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert found.fields == [
        "input.sampling.temperature",
        "input.sampling.top_p",
        "input.choices",
        "input.token_ids.ids[1]",
    ]
    assert not dispatcher.jobs


async def test_a_broken_request_is_told_so_even_where_nothing_is_served() -> None:
    async with open_door(ScriptedDispatcher([], plays([70]))) as door:
        assert (await refused(door, api.GenerationInput())).info.reason == "INVALID_FIELD"
        found = await refused(door, ids_input())
    assert (found.code, found.info.reason) == (Code.UNAVAILABLE, "NO_WORKERS")
    assert found.detail(error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0


async def test_context_length(dispatcher: ScriptedDispatcher) -> None:
    prompt = ids_input(*[70] * 60)
    prompt.stop.max_tokens = 5
    async with open_door(dispatcher) as door:
        found = await refused(door, prompt)
    assert (found.code, found.info.reason) == (Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    assert found.fields == ["input.stop.max_tokens"]
    assert dict(found.info.metadata) == {
        "prompt_tokens": "60",
        "max_tokens": "5",
        "max_context_tokens": "64",
    }


@pytest.mark.parametrize("name", ["nobody", "", "größe🎉"])
async def test_unknown_model(folder: Path, name: str) -> None:
    served = [served_model(folder, "one"), served_model(folder, "two")]
    prompt = ids_input()
    prompt.model = name
    async with open_door(ScriptedDispatcher(served, plays([70]))) as door:
        found = await refused(door, prompt)
        with pytest.raises(grpc.aio.AioRpcError) as tokenizing:
            await door.stub.Tokenize(api.TokenizeRequest(model=name, text="x"))
    assert (found.code, found.info.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
    assert found.detail(error_details_pb2.ResourceInfo).resource_name == name
    assert refusal(tokenizing.value).info == found.info


async def test_no_tokenizer(tmp_path: Path) -> None:
    dispatcher = ScriptedDispatcher([served_model(tmp_path / "none")], plays([70]))
    prompt = api.GenerationInput(text="hello", stop=api.StopOptions(sequences=["x"]))
    async with open_door(dispatcher) as door:
        assert (await refused(door, prompt)).fields == ["input.text", "input.stop.sequences"]
        with pytest.raises(grpc.aio.AioRpcError) as tokenizing:
            await door.stub.Tokenize(api.TokenizeRequest(text="x"))
        assert refusal(tokenizing.value).fields == ["text"]
        response = await door.stub.Generate(api.GenerateRequest(input=ids_input()))
    assert response.choices[0].output.text == ""
    assert response.choices[0].output.token_ids == [70]


async def test_a_chat_template_that_refuses(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    dispatcher = ScriptedDispatcher([served_model(folder)], plays([70]))
    turn = api.ChatMessage(role=api.ROLE_USER, content=SECRET)
    async with open_door(dispatcher) as door:
        found = await refused(door, api.GenerationInput(chat=api.ChatPrompt(messages=[turn])))
    assert found.fields == ["input.chat"]
    assert "secret" not in caplog.text, "the template's words are for the client alone"


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (errors.queue_full(9, 1.5), []),
        (errors.structure_too_complex(3), [70, 71]),
        (errors.worker_lost_mid_stream(2), [70, 71]),
    ],
    ids=["before", "after", "mid stream"],
)
async def test_what_the_dispatcher_raises(
    dispatcher: ScriptedDispatcher, error: errors.RouterError, after: list[int]
) -> None:
    dispatcher.script = fails(error, after)
    async with open_door(dispatcher) as door:
        found = await refused(door, ids_input())
        assert (found.code, found.info.reason) == (error.code, error.reason)
        assert found.has(error_details_pb2.RetryInfo) == (error.retry_after_s is not None)
        messages: list[api.StreamGenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError):
            await read(door.stub, ids_input(), into=messages)
    tokens = [one for message in messages for one in message.delta.token_ids]
    assert tokens == after, "what was generated before the error reaches the client"


@pytest.mark.parametrize(
    "bug",
    [ValueError(SECRET), asyncio.CancelledError(SECRET), grpc.aio.UsageError(SECRET)],
    ids=lambda bug: type(bug).__name__,
)
async def test_any_bug(
    dispatcher: ScriptedDispatcher, bug: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher.script = fails(bug, [70])
    with caplog.at_level(logging.DEBUG):
        async with open_door(dispatcher) as door:
            found = await refused(door, ids_input())
    assert (found.code, found.info.reason) == (Code.INTERNAL, "INTERNAL")
    assert "secret" not in f"{found}{caplog.text}{[vars(one) for one in caplog.records]}"
    request_id = found.detail(error_details_pb2.RequestInfo).request_id
    assert request_id in {vars(one).get("trace_id") for one in caplog.records}


async def broken_grammar(job: Job, *, case: str) -> AsyncGenerator[JobEvent, None]:
    if case != "no start":
        yield JobStarted()
    yield JobTokens(0, 0, (70,))
    if case == "gap":
        yield JobTokens(0, 2, (71,))
    if case == "double":
        yield JobTokens(0, 0, (70,))
    if case == "open choice":
        yield JobFinished()


@pytest.mark.parametrize("case", ["no start", "gap", "double", "open choice", "no end"])
async def test_a_dispatcher_that_breaks_its_contract(
    dispatcher: ScriptedDispatcher, case: str
) -> None:
    dispatcher.script = lambda job: broken_grammar(job, case=case)
    async with open_door(dispatcher) as door:
        assert (await refused(door, ids_input())).info.reason == "INTERNAL"


async def test_the_servers_longest_duration(dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = hangs
    async with open_door(dispatcher, Limits(max_request_duration_s=0.5)) as door:
        found = await refused(door, ids_input())
    assert (found.code, found.info.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    assert found.info.metadata["tokens_sent"] == "1"


@pytest.mark.parametrize("method", ["generate", "tokenize"])
async def test_the_deadline_holds_while_the_prompt_waits_to_be_tokenized(
    dispatcher: ScriptedDispatcher, method: str
) -> None:
    dispatcher.served = [replace(dispatcher.served[0], max_context_tokens=4096)]
    tokenizers, busy = Tokenizers(threads=1), threading.Event()
    await tokenizers.warm(dispatcher.served[:1])
    tokenizers._pool.submit(busy.wait)
    service = InferenceService(dispatcher, tokenizers, Limits(max_request_duration_s=0.1))
    text = "fox " * 2000
    if method == "generate":
        request = api.GenerateRequest(input=api.GenerationInput(text=text))
        work: Coroutine[Any, Any, object] = service.generate(request, Call())
    else:
        work = service.tokenize(api.TokenizeRequest(text=text), Call())
    try:
        with pytest.raises(RouterError) as caught:
            async with asyncio.timeout(20):
                await work
    finally:
        busy.set()
        tokenizers.close()
    assert caught.value.reason == "DEADLINE_EXCEEDED"


async def test_the_callers_deadline(dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = hangs
    async with open_door(dispatcher) as door:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.stub.Generate(api.GenerateRequest(input=ids_input()), timeout=1.5)
        assert caught.value.code() is Code.DEADLINE_EXCEEDED
        await asyncio.wait_for(dispatcher.closed.wait(), 20)
    left_s = (dispatcher.jobs[0].deadline_ns - dispatcher.jobs[0].arrived_ns) / 1e9
    assert 0 < left_s <= 1.5 * 1.01  # Deadlines travel rounded up, by at most a hundredth.


async def test_a_far_deadline_is_the_servers(dispatcher: ScriptedDispatcher) -> None:
    async with open_door(dispatcher) as door:
        await door.stub.Generate(api.GenerateRequest(input=ids_input()), timeout=1e9)
    job = dispatcher.jobs[0]
    assert job.deadline_ns - job.arrived_ns == 600 * 10**9
    assert abs(time.time_ns() - job.arrived_ns) < 20 * 10**9


async def test_unknown_methods_and_services_are_grpcs_own(dispatcher: ScriptedDispatcher) -> None:
    async with open_door(dispatcher) as door:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.channel.unary_unary("/baton.inference.v1.InferenceService/No")(b"")
        assert caught.value.code() is Code.UNIMPLEMENTED


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A truncation, some flipped bits, or bytes of chance."""
    match rng.randrange(3):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            flipped = bytearray(data)
            for _ in range(rng.randint(1, 6)):
                flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case _:
            return rng.randbytes(rng.randrange(80))


@pytest.mark.parametrize("count", [500, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
async def test_fuzz(
    dispatcher: ScriptedDispatcher, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    rng = random.Random(count)
    full = ids_input(*range(70, 90))
    full.sampling.CopyFrom(
        api.SamplingOptions(temperature=0.5, top_p=0.9, top_k=5, seed=3, logit_bias={7: 1.0})
    )
    full.stop.CopyFrom(api.StopOptions(max_tokens=9, sequences=["secret"], token_ids=[9]))
    turn = api.ChatMessage(role=api.ROLE_USER, content="secret größe 🎉")
    chat = api.GenerationInput(chat=api.ChatPrompt(messages=[turn] * 2))
    seeds = {
        "Generate": api.GenerateRequest(input=full, client_tag="tag").SerializeToString(),
        "StreamGenerate": api.StreamGenerateRequest(input=chat).SerializeToString(),
        "Tokenize": api.TokenizeRequest(text="secret text").SerializeToString(),
    }
    allowed = {"MALFORMED_REQUEST", "INVALID_FIELD", "CONTEXT_LENGTH_EXCEEDED", "MODEL_NOT_FOUND"}

    def answers(job: Job) -> AsyncGenerator[JobEvent, None]:
        return plays(*[[70]] * job.choices)(job)

    dispatcher.script = answers
    async with open_door(dispatcher) as door:
        for _ in range(count):
            method = rng.choice(list(seeds))
            found = await raw(door, method, mutated(rng, seeds[method]))
            if found is not None:
                assert found.info.reason in allowed
                named = found.info.reason == "MODEL_NOT_FOUND"  # It repeats the name it got.
                assert named or "secret" not in str(found)
        assert await raw(door, "Generate", seeds["Generate"]) is None
    assert not caplog.records
