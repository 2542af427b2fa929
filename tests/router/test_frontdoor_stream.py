"""What clients of the front door read: grammar, text, stops, pace, and the end of a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import tokenizers
from frontdoor_kit import (
    CORPUS,
    Script,
    ScriptedDispatcher,
    hangs,
    ids_input,
    open_door,
    plays,
    read,
    refusal,
    served_model,
    write_tokenizer,
)

from baton.inference.v1 import inference_pb2 as api
from baton.inference.v1 import inference_pb2_grpc as api_grpc
from baton.worker.v1 import worker_pb2
from router.jobs import (
    ChoiceEnded,
    Job,
    JobEvent,
    JobFinished,
    JobStarted,
    JobTokens,
    TokenScore,
)
from router.requests.generation import Generations
from router.requests.validation import Limits

TEXT = "naïve 🎉 fox jumps over 👩‍👩‍👧 great"
SOON_S = 10.0
GENERATED_S = 60.0
"""For thousands of tokens with their alternatives."""
FIXED_WINDOW = [("grpc.http2.bdp_probe", 0)]
"""Of a channel: else what its client takes in unread grows with the time that answers take, and on
a busy machine a whole stream fits."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> tokenizers.Tokenizer:
    return write_tokenizer(tmp_path)


@pytest.fixture
def dispatcher(tokenizer: tokenizers.Tokenizer, tmp_path: Path) -> ScriptedDispatcher:
    return ScriptedDispatcher([served_model(tmp_path)], plays(tokenizer.encode(TEXT).ids))


def texts(messages: Sequence[api.StreamGenerateResponse], choice: int = 0) -> list[str]:
    deltas = [one.delta for one in messages if one.HasField("delta")]
    return [delta.text for delta in deltas if delta.choice_index == choice]


def check_grammar(messages: Sequence[api.StreamGenerateResponse], choices: int = 1) -> None:
    """`started`, then deltas without gap or duplicate and one `finished` per choice."""
    assert messages[0].HasField("started")
    counts: dict[int, int] = dict.fromkeys(range(choices), 0)
    for message in messages[1:]:
        match message.WhichOneof("event"):
            case "delta":
                delta = message.delta
                assert delta.first_token_index == counts[delta.choice_index]
                counts[delta.choice_index] += len(delta.token_ids)
            case "finished":
                finished = message.finished
                assert finished.finish_reason != api.FINISH_REASON_UNSPECIFIED
                last = message is messages[-1]
                assert finished.HasField("usage") == finished.HasField("timings") == last
                tokens = counts.pop(finished.choice_index)
                assert tokens > 0
            case other:
                pytest.fail(f"{other} in the middle of a stream")
    assert not counts, "a choice did not finish"


async def test_a_stream(dispatcher: ScriptedDispatcher, tokenizer: tokenizers.Tokenizer) -> None:
    prompt = api.GenerationInput(text="The quick fox", priority=3)
    async with open_door(dispatcher) as door:
        messages = await read(door.stub, prompt)
    check_grammar(messages)
    job = dispatcher.jobs[0]
    assert job.prompt_ids.tolist() == tokenizer.encode("The quick fox").ids
    assert (job.priority, job.choices, job.stopping.max_tokens) == (3, 1, 64 - job.prompt_tokens)
    started = messages[0].started
    assert (started.model, started.model_revision) == ("tiny", "r1")
    assert (started.prompt_tokens, started.cached_prompt_tokens) == (job.prompt_tokens, 1)
    assert started.generation_id == job.id
    assert "".join(texts(messages)) == TEXT
    assert not any("�" in text for text in texts(messages))
    finished = messages[-1].finished
    assert finished.finish_reason == api.FINISH_REASON_LENGTH
    output_tokens = len(tokenizer.encode(TEXT).ids)
    assert finished.usage == api.Usage(
        prompt_tokens=job.prompt_tokens, cached_prompt_tokens=1, output_tokens=output_tokens
    )
    timings = finished.timings
    told = [timings.queue, timings.prefill, timings.kv_transfer, timings.decode_queue]
    assert [one.ToMilliseconds() for one in [*told, timings.decode]] == [1, 2, 3, 4, 5]
    assert 0 < timings.time_to_first_token.ToNanoseconds() < 5e9


async def test_a_request_is_read_in_one_callback_and_made_a_job_in_another(
    dispatcher: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of other streams may come between."""
    seen: list[str] = []
    made = Generations._job

    def others_turn(*_: object) -> None:
        asyncio.get_running_loop().call_soon(seen.append, "others")

    def job(*given: Any) -> Job:
        seen.append("job")
        return made(*given)

    monkeypatch.setattr("router.requests.validation.check_prompt_ids", others_turn)
    monkeypatch.setattr(Generations, "_job", job)
    async with open_door(dispatcher) as door:
        await read(door.stub, ids_input())
    assert seen == ["others", "job"]


async def test_unary_is_the_stream_in_one(
    dispatcher: ScriptedDispatcher, tokenizer: tokenizers.Tokenizer
) -> None:
    outputs = [tokenizer.encode(text).ids for text in (TEXT, "short", *CORPUS[1:3])]
    dispatcher.script = plays(*outputs)
    prompt = ids_input()
    prompt.choices = 4
    async with open_door(dispatcher) as door:
        messages = await read(door.stub, prompt)
        whole = await door.stub.Generate(api.GenerateRequest(input=prompt))
    check_grammar(messages, choices=4)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice, output in zip(whole.choices, outputs, strict=True):
        assert choice.output.choice_index == choice.index
        assert choice.output.first_token_index == 0
        assert list(choice.output.token_ids) == output
        assert choice.output.text == "".join(texts(messages, choice.index))
        assert choice.output.text == tokenizer.decode(output)
        assert choice.finish_reason == api.FINISH_REASON_LENGTH
    assert whole.usage == messages[-1].finished.usage
    assert whole.usage.output_tokens == sum(map(len, outputs))
    assert whole.started.prompt_tokens == messages[0].started.prompt_tokens


async def test_chat_and_tokenize_agree(dispatcher: ScriptedDispatcher) -> None:
    turns = [
        api.ChatMessage(role=api.ROLE_SYSTEM, content="Be brief."),
        api.ChatMessage(role=api.ROLE_USER, content="Größe? 🎉"),
    ]
    chat = api.ChatPrompt(messages=turns)
    async with open_door(dispatcher) as door:
        tokens = await door.stub.Tokenize(api.TokenizeRequest(chat=chat))
        await read(door.stub, api.GenerationInput(chat=chat))
        plain = await door.stub.Tokenize(api.TokenizeRequest(model="tiny", text="fox"))
    assert dispatcher.jobs[0].prompt_ids.tolist() == list(tokens.token_ids)
    assert tokens.token_ids[0] == 1  # <|im_start|>
    assert plain.token_ids


async def test_list_models(tmp_path: Path, dispatcher: ScriptedDispatcher) -> None:
    dispatcher.served = [served_model(tmp_path), served_model(tmp_path / "none", "ids", 4096)]
    async with open_door(dispatcher, Limits(max_output_tokens=1000)) as door:
        listed = await door.stub.ListModels(api.ListModelsRequest())
    assert list(listed.models) == [
        api.Model(
            name="tiny",
            revision="r1",
            max_context_tokens=64,
            max_output_tokens=63,
            has_tokenizer=True,
        ),
        api.Model(name="ids", revision="r1", max_context_tokens=4096, max_output_tokens=1000),
    ]


async def test_a_tokenizer_that_cannot_be_read_hides_no_model(
    tmp_path: Path, dispatcher: ScriptedDispatcher
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    dispatcher.served = [served_model(tmp_path), served_model(broken, "broken")]
    async with open_door(dispatcher) as door:
        listed = await door.stub.ListModels(api.ListModelsRequest())
    assert [(model.name, model.has_tokenizer) for model in listed.models] == [
        ("tiny", True),
        ("broken", False),
    ]


async def scored(job: Job) -> AsyncGenerator[JobEvent, None]:
    def score(value: float) -> TokenScore:
        return TokenScore(value, (5, 6), (-0.5, -1.5))

    yield JobStarted(2, tuple(score(-1.0 - index) for index in range(job.prompt_tokens - 1)))
    yield JobTokens(0, 0, (70,), (score(-0.25),))
    yield JobTokens(0, 1, (71, 72), (score(-0.5), score(-0.75)))
    yield ChoiceEnded(0, worker_pb2.END_REASON_LENGTH, 3)
    yield JobFinished(cached_prompt_tokens=2)


async def test_log_probabilities(dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = scored
    prompt = ids_input(70, 71, 72)
    prompt.output.CopyFrom(
        api.OutputOptions(logprobs=True, top_logprobs=2, prompt_logprobs=True, omit_text=True)
    )
    async with open_door(dispatcher) as door:
        whole = await door.stub.Generate(api.GenerateRequest(input=prompt))
    assert dispatcher.jobs[0].sampling.top_logprobs == 2
    assert dispatcher.jobs[0].prompt_logprobs
    first, *others = whole.started.prompt_logprobs
    assert not first.HasField("logprob")
    assert [one.logprob for one in others] == [-1.0, -2.0]
    output = whole.choices[0].output
    assert [one.logprob for one in output.logprobs] == [-0.25, -0.5, -0.75]
    assert [(one.token_id, one.logprob) for one in output.logprobs[2].top] == [(5, -0.5), (6, -1.5)]
    assert output.text == ""


def with_stop(**stop: object) -> api.GenerationInput:
    prompt = ids_input()
    prompt.stop.CopyFrom(api.StopOptions(**stop))
    return prompt


@pytest.mark.parametrize(
    ("stop", "text", "met"),
    [
        ({"sequences": ["jumps"]}, "naïve 🎉 fox ", "jumps"),
        ({"sequences": ["x ju", "zzz"]}, "naïve 🎉 fo", "x ju"),
        ({"sequences": ["🎉"]}, "naïve ", "🎉"),
        ({"sequences": ["n"]}, "", "n"),
        ({"sequences": ["n"], "include_stop": True}, "n", "n"),
        ({"sequences": ["ïve 🎉"], "include_stop": True}, "naïve 🎉", "ïve 🎉"),
        ({"sequences": ["n", "great"], "min_tokens": 8}, TEXT.removesuffix("great"), "great"),
        ({"sequences": ["great!"]}, TEXT, ""),
    ],
)
async def test_stop_texts(
    dispatcher: ScriptedDispatcher, stop: dict[str, object], text: str, met: str
) -> None:
    async with open_door(dispatcher) as door:
        messages = await read(door.stub, with_stop(**stop))
        whole = await door.stub.Generate(api.GenerateRequest(input=with_stop(**stop)))
    check_grammar(messages)
    assert "".join(texts(messages)) == text == whole.choices[0].output.text
    finished = messages[-1].finished
    assert finished.stop_sequence == met == whole.choices[0].stop_sequence
    expected = api.FINISH_REASON_STOP if met else api.FINISH_REASON_LENGTH
    assert finished.finish_reason == expected
    assert dispatcher.ended == [0, 0] * bool(met)
    assert whole.usage.output_tokens == len(whole.choices[0].output.token_ids)


async def test_a_stop_text_is_met_where_text_is_left_out(dispatcher: ScriptedDispatcher) -> None:
    prompt = with_stop(sequences=["x ju"])
    prompt.output.omit_text = True
    async with open_door(dispatcher) as door:
        messages = await read(door.stub, prompt)
        with_text = await read(door.stub, with_stop(sequences=["x ju"]))
    assert "".join(texts(messages)) == ""
    assert messages[-1].finished.stop_sequence == "x ju"
    ids = [[i for one in run for i in one.delta.token_ids] for run in (messages, with_text)]
    assert ids[0] == ids[1]


async def test_one_choice_stops_and_the_others_go_on(
    dispatcher: ScriptedDispatcher, tokenizer: tokenizers.Tokenizer
) -> None:
    outputs = [tokenizer.encode(text).ids for text in ("fox jumps over", "the lazy dog again")]
    dispatcher.script = plays(*outputs)
    prompt = with_stop(sequences=["jum"])
    prompt.choices = 2
    async with open_door(dispatcher) as door:
        messages = await read(door.stub, prompt)
    check_grammar(messages, choices=2)
    assert "".join(texts(messages, 0)) == "fox "
    assert "".join(texts(messages, 1)) == "the lazy dog again"
    assert dispatcher.ended == [0]


@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stop_token_is_counted_and_its_text_left_out(
    dispatcher: ScriptedDispatcher, tokenizer: tokenizers.Tokenizer, include_stop: bool
) -> None:
    ids = tokenizer.encode("the fox!").ids
    dispatcher.script = plays(ids, reason=worker_pb2.END_REASON_STOP_TOKEN)
    prompt = with_stop(token_ids=[ids[-1]], include_stop=include_stop)
    async with open_door(dispatcher) as door:
        whole = await door.stub.Generate(api.GenerateRequest(input=prompt))
    assert whole.choices[0].output.text == ("the fox!" if include_stop else "the fox")
    assert list(whole.choices[0].output.token_ids) == ids
    assert whole.choices[0].finish_reason == api.FINISH_REASON_STOP
    assert whole.choices[0].stop_sequence == ""


async def test_text_held_back_comes_with_the_end(
    dispatcher: ScriptedDispatcher, tokenizer: tokenizers.Tokenizer
) -> None:
    half = tokenizer.encode("fox 🎉").ids[:-1]
    dispatcher.script = plays([*half, 2], reason=worker_pb2.END_REASON_END_OF_SEQUENCE)
    async with open_door(dispatcher) as door:
        messages = await read(door.stub, with_stop(sequences=["ox 🎉 and more"]))
    check_grammar(messages)
    assert "".join(texts(messages)) == tokenizer.decode(half)
    assert messages[-1].finished.finish_reason == api.FINISH_REASON_END_OF_SEQUENCE


async def test_cancelling_ends_the_dispatchers_work(dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = hangs
    async with open_door(dispatcher) as door:
        for _ in range(2):
            dispatcher.closed.clear()
            call = door.stub.StreamGenerate(api.StreamGenerateRequest(input=ids_input()))
            assert (await call.read()).HasField("started")
            call.cancel()
            await asyncio.wait_for(dispatcher.closed.wait(), SOON_S)
        dispatcher.closed.clear()
        unary = door.stub.Generate(api.GenerateRequest(input=ids_input()))
        while len(dispatcher.jobs) < 3:
            await asyncio.sleep(0.001)
        unary.cancel()
        await asyncio.wait_for(dispatcher.closed.wait(), SOON_S)


async def test_a_vanished_client_ends_it_too(dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = hangs
    async with open_door(dispatcher) as door:
        call = door.stub.StreamGenerate(api.StreamGenerateRequest(input=ids_input()))
        await call.read()
        await door.channel.close()
        await asyncio.wait_for(dispatcher.closed.wait(), SOON_S)


async def read_on(
    call: grpc.aio.UnaryStreamCall[api.StreamGenerateRequest, api.StreamGenerateResponse],
    messages: list[api.StreamGenerateResponse],
) -> None:
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)


def endless(tokens: int, pace_s: float = 0.0) -> Script:
    async def script(job: Job) -> AsyncGenerator[JobEvent, None]:
        yield JobStarted()
        logprob = TokenScore(-1.0, tuple(range(20)), (0.0,) * 20)
        for index in range(tokens):
            yield JobTokens(0, index, (70,), (logprob,) if job.sampling.top_logprobs else ())
            await asyncio.sleep(pace_s)
        yield ChoiceEnded(0, worker_pb2.END_REASON_LENGTH, tokens)
        yield JobFinished()

    return script


async def test_one_token_a_message_while_the_client_keeps_up(
    dispatcher: ScriptedDispatcher,
) -> None:
    """Each token is made when the one before it was read: nothing waits behind another."""
    may_go_on = asyncio.Event()

    async def at_the_readers_pace(job: Job) -> AsyncGenerator[JobEvent, None]:
        async for event in endless(50)(job):
            yield event
            if isinstance(event, JobTokens):
                await may_go_on.wait()
                may_go_on.clear()

    dispatcher.script = at_the_readers_pace
    sizes = []
    async with open_door(dispatcher) as door:
        call = door.stub.StreamGenerate(api.StreamGenerateRequest(input=ids_input()), timeout=20)
        async for message in call:
            if message.HasField("delta"):
                sizes.append(len(message.delta.token_ids))
                may_go_on.set()
    assert sizes == [1] * 50


async def test_a_reader_that_pauses_gets_the_rest_merged(dispatcher: ScriptedDispatcher) -> None:
    """Nothing is lost, and neither the dispatcher nor another client waits for it."""
    dispatcher.script = endless(20_000)
    prompt = ids_input()
    prompt.output.CopyFrom(api.OutputOptions(logprobs=True, top_logprobs=20, omit_text=True))
    async with (
        open_door(dispatcher, Limits(max_unread_tokens=20_000)) as door,
        grpc.aio.insecure_channel(door.address, options=FIXED_WINDOW) as channel,
    ):
        stub = api_grpc.InferenceServiceStub(channel)
        call = stub.StreamGenerate(api.StreamGenerateRequest(input=prompt))
        messages = [await call.read()]
        # Generated to the end, unread.
        await asyncio.wait_for(dispatcher.closed.wait(), GENERATED_S)
        begun = time.perf_counter()
        dispatcher.script = plays([70])
        await read(door.stub, ids_input())
        assert time.perf_counter() - begun < SOON_S
        await read_on(call, messages)
    check_grammar(messages)
    assert messages[-1].finished.usage.output_tokens == 20_000
    assert max(len(message.delta.token_ids) for message in messages) > 100


async def test_a_reader_that_stops_is_aborted(dispatcher: ScriptedDispatcher) -> None:
    dispatcher.script = endless(100_000)
    prompt = ids_input()
    prompt.output.CopyFrom(api.OutputOptions(logprobs=True, top_logprobs=20))
    async with (
        open_door(dispatcher, Limits(max_unread_tokens=500)) as door,
        grpc.aio.insecure_channel(door.address, options=FIXED_WINDOW) as channel,
    ):
        stub = api_grpc.InferenceServiceStub(channel)
        call = stub.StreamGenerate(api.StreamGenerateRequest(input=prompt))
        await call.read()
        await asyncio.wait_for(dispatcher.closed.wait(), GENERATED_S)
        messages: list[api.StreamGenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_on(call, messages)
    read_tokens = sum(len(message.delta.token_ids) for message in messages)
    found = refusal(caught.value)
    assert (found.code, found.info.reason) == (grpc.StatusCode.ABORTED, "READER_TOO_SLOW")
    assert int(found.info.metadata["tokens_sent"]) == read_tokens
