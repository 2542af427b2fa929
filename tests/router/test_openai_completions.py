"""/v1/completions, as the official client sees it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import openai
import pytest
from frontdoor_kit import hangs
from openai_kit import Port, answers, open_port, prompt_of, says

from baton.worker.v1 import worker_pb2
from router.doors.openai import completions
from router.jobs import ChoiceEnded, Job, JobEvent, JobFinished, JobStarted, JobTokens
from router.requests.generation import Generations
from router.requests.outputs import Output
from router.requests.tokenization import Tokenizer

TEXT = "The quick brown fox — naïve café 🎉"
MODEL = "tiny"


def echoes_prompt(job: Job, choice: int) -> list[int]:
    return [*prompt_of(job), *[70] * choice]


async def test_whole(tmp_path: Path) -> None:
    async with open_port(tmp_path, says(TEXT)) as port:
        got = await port.client.completions.create(
            model=MODEL, prompt="jugs", max_tokens=99, temperature=0, seed=7
        )
        choice = got.choices[0]
        assert (choice.text, choice.finish_reason, choice.index) == (TEXT, "length", 0)
        assert choice.logprobs is None
        assert (got.object, got.model) == ("text_completion", MODEL)
        assert got.id[:-8] == f"cmpl-{port.job.id}"
        assert got._request_id == port.job.id
        usage = got.usage
        assert usage is not None
        prompt_tokens, output_tokens = len(port.ids("jugs")), len(port.ids(TEXT))
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, output_tokens)
        assert usage.total_tokens == prompt_tokens + output_tokens
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 1
        assert prompt_of(port.job) == port.ids("jugs")
        assert port.job.sampling.seed == 7
        assert port.job.sampling.temperature == 0
        assert port.job.stopping.max_tokens == 99


async def test_every_option_arrives(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("a")) as port:
        await port.client.completions.create(
            model=MODEL,
            prompt=[5, 6, 7],
            max_tokens=9,
            temperature=0.5,
            top_p=0.25,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            seed=-1,
            logit_bias={"7": 3},
            user="somebody",
            extra_body={
                "top_k": 5,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "min_tokens": 2,
                "ignore_eos": True,
                "stop_token_ids": [8, 9],
                "priority": 3,
                "use_beam_search": False,
                "skip_special_tokens": True,
                "unknown": {"what": "ever"},
            },
        )
        job = port.job
        assert prompt_of(job) == [5, 6, 7]
        assert job.sampling == worker_pb2.Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=5,
            min_p=0.125,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.5,
            seed=2**64 - 1,
            logit_bias={7: 3},
        )
        assert job.stopping == worker_pb2.Stopping(
            max_tokens=9, min_tokens=2, token_ids=[8, 9], ignore_eos=True
        )
        assert job.priority == -3  # Lower runs first in this API.


async def test_a_request_is_read_in_one_callback_and_run_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of other streams may come between."""
    seen: list[str] = []
    reads, runs = completions.parse, Generations.stream

    def read(*given: Any) -> Any:
        asyncio.get_running_loop().call_soon(seen.append, "others")
        return reads(*given)

    async def run(*given: Any) -> AsyncGenerator[Output, None]:
        seen.append("run")
        async with aclosing(runs(*given)) as outputs:
            async for output in outputs:
                yield output

    monkeypatch.setattr(completions, "parse", read)
    monkeypatch.setattr(Generations, "stream", run)
    async with open_port(tmp_path, says("a")) as port:
        await port.client.completions.create(model="tiny", prompt="a")
    assert seen == ["others", "run"]


async def test_what_is_left_out(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("a")) as port:
        await port.client.completions.create(model=MODEL, prompt="a")
        assert port.job.stopping.max_tokens == 16
        assert port.job.sampling.temperature == 1
        nulls = dict.fromkeys(("max_tokens", "n", "stop", "seed", "top_k", "stream", "tools"))
        await port.client.post("/completions", body={"prompt": "a", **nulls}, cast_to=object)
        assert port.job.stopping.max_tokens == 256 - port.job.prompt_tokens
        body = {"prompt": "a", "top_k": -1, "stop": ""}
        await port.client.post("/completions", body=body, cast_to=object)
        assert port.job.sampling.top_k == 0


async def test_stream_and_usage(tmp_path: Path) -> None:
    async with open_port(tmp_path, says(TEXT)) as port:
        stream = await port.client.completions.create(
            model=MODEL, prompt="a", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        *tokens, finish, totals = chunks
        assert "".join(chunk.choices[0].text for chunk in tokens) == TEXT
        assert {chunk.choices[0].finish_reason for chunk in tokens} == {None}
        assert finish.choices[0].finish_reason == "length"
        assert totals.choices == []
        assert totals.usage is not None
        assert totals.usage.completion_tokens == len(port.ids(TEXT))
        assert {chunk.usage for chunk in (*tokens, finish)} == {None}
        assert {(chunk.id[:-8], chunk.object) for chunk in chunks} == {
            (f"cmpl-{port.job.id}", "text_completion")
        }
        assert len({chunk.id for chunk in chunks}) == 1
        stream = await port.client.completions.create(
            model=MODEL,
            prompt="a",
            stream=True,
            extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
        assert counts == sorted(counts)
        assert counts[-1] == len(port.ids(TEXT))


async def test_stream_brings_each_token_at_once(tmp_path: Path) -> None:
    """The next token is made only when the client has the one before."""
    got = asyncio.Semaphore(0)

    async def script(job: Job) -> AsyncGenerator[JobEvent, None]:
        yield JobStarted()
        for index in range(5):
            yield JobTokens(0, index, (70 + index,))
            await got.acquire()
        yield ChoiceEnded(0, worker_pb2.END_REASON_LENGTH, 5)
        yield JobFinished()

    async with open_port(tmp_path, script) as port:
        stream = await port.client.completions.create(model=MODEL, prompt="a", stream=True)
        texts = []
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
            got.release()
        assert texts == [*(port.tokenizer.decode([70 + index]) for index in range(5)), ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_batch_of_prompts_and_n(tmp_path: Path, stream: bool) -> None:
    prompts = ["The quick", "brown fox jumps", "Pack my box"]
    async with open_port(tmp_path, answers(echoes_prompt)) as port:
        more = port.tokenizer.decode([70])
        want = {
            index * 2 + choice: text + more * choice
            for index, text in enumerate(prompts)
            for choice in range(2)
        }
        for prompt in (prompts, [port.ids(text) for text in prompts]):
            port.dispatcher.jobs.clear()
            got: dict[int, str] = {}
            if stream:
                chunks = await port.client.completions.create(
                    model=MODEL, prompt=prompt, n=2, stream=True
                )
                finished = []
                async for chunk in chunks:
                    one = chunk.choices[0]
                    got[one.index] = got.get(one.index, "") + one.text
                    if one.finish_reason:
                        finished.append(one.index)
                assert sorted(finished) == list(range(6))
            else:
                whole = await port.client.completions.create(model=MODEL, prompt=prompt, n=2)
                assert [one.index for one in whole.choices] == list(range(6))
                got = {one.index: one.text for one in whole.choices}
                assert whole.usage is not None
                prompt_tokens = sum(len(port.ids(text)) for text in prompts)
                assert whole.usage.prompt_tokens == prompt_tokens
                assert whole.usage.completion_tokens == 2 * prompt_tokens + 3
                assert whole.usage.prompt_tokens_details is not None
                assert whole.usage.prompt_tokens_details.cached_tokens == 3
            assert got == want
            assert {job.id for job in port.dispatcher.jobs} == {port.job.id}


@pytest.mark.parametrize("included", [False, True])
async def test_stop_text(tmp_path: Path, included: bool) -> None:
    async with open_port(tmp_path, says("jumps over the dog")) as port:
        got = await port.client.completions.create(
            model=MODEL,
            prompt="a",
            stop=["zzz", "er th"],
            extra_body={"include_stop_str_in_output": included},
        )
        text = "jumps over th" if included else "jumps ov"
        assert (got.choices[0].text, got.choices[0].finish_reason) == (text, "stop")
        assert port.dispatcher.ended == [0]


async def test_end_of_sequence_is_a_stop(tmp_path: Path) -> None:
    script = says("a<|im_end|>", reason=worker_pb2.END_REASON_END_OF_SEQUENCE)
    async with open_port(tmp_path, script) as port:
        got = await port.client.completions.create(model=MODEL, prompt="a")
        assert (got.choices[0].text, got.choices[0].finish_reason) == ("a", "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(tmp_path: Path, stream: bool) -> None:
    async with open_port(tmp_path, says("The fox")) as port:
        ids = port.ids("The fox")
        create = port.client.completions.create
        columns: dict[str, list[object]] = {}
        if stream:
            async for chunk in await create(model=MODEL, prompt="a", logprobs=2, stream=True):
                for name, column in chunk.choices[0].logprobs or {}:
                    columns.setdefault(name, []).extend(column)
        else:
            whole = await create(model=MODEL, prompt="a", logprobs=2)
            columns = dict(whole.choices[0].logprobs or {})
        texts = [port.tokenizer.token_text(one) for one in ids]
        assert columns["tokens"] == texts
        assert "".join(texts) == "The fox"
        assert columns["token_logprobs"] == pytest.approx([-one / 100 for one in ids])
        assert columns["text_offset"] == [len("".join(texts[:i])) for i in range(len(texts))]
        for token_id, top in zip(ids, columns["top_logprobs"], strict=True):
            assert top == pytest.approx(
                {
                    port.tokenizer.token_text(token_id): -token_id / 100,
                    port.tokenizer.token_text(token_id - 1): -(token_id + 1) / 100,
                }
            )


async def test_token_ids_instead_of_their_text(tmp_path: Path) -> None:
    async with open_port(tmp_path, answers(lambda *_: [70, 71])) as port:
        got = await port.client.completions.create(
            model=MODEL, prompt="a", logprobs=0, extra_body={"return_tokens_as_token_ids": True}
        )
        assert got.choices[0].logprobs is not None
        assert got.choices[0].logprobs.tokens == ["token_id:70", "token_id:71"]
        assert got.choices[0].logprobs.top_logprobs is not None
        assert list(got.choices[0].logprobs.top_logprobs[0]) == ["token_id:70"]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo(tmp_path: Path, as_ids: bool, stream: bool) -> None:
    async with open_port(tmp_path, says(" lazy")) as port:
        prompt = port.ids("The fox") if as_ids else "The fox"
        create = port.client.completions.create
        if stream:
            chunks = await create(model=MODEL, prompt=prompt, echo=True, n=2, stream=True)
            texts = ["", ""]
            async for chunk in chunks:
                texts[chunk.choices[0].index] += chunk.choices[0].text
        else:
            got = await create(model=MODEL, prompt=prompt, echo=True, n=2)
            texts = [choice.text for choice in got.choices]
        assert texts == ["The fox lazy"] * 2
        assert prompt_of(port.job) == port.ids("The fox")
        assert not port.job.prompt_logprobs


async def test_a_prompt_of_ids_is_read_for_its_echo_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have tens of thousands of them, and nobody has compared that with the context yet."""
    read_on: list[threading.Thread] = []
    decode = Tokenizer.decode

    def watched(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
        read_on.append(threading.current_thread())
        return decode(tokenizer, ids, skip)

    async with open_port(tmp_path, hangs) as port:
        monkeypatch.setattr(Tokenizer, "decode", watched)
        with pytest.raises(openai.BadRequestError, match="tokens"):
            await port.client.completions.create(model=MODEL, prompt=[5] * 60_000, echo=True)
    assert read_on
    assert threading.main_thread() not in read_on


@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo_with_logprobs(tmp_path: Path, as_ids: bool) -> None:
    """As evaluations score a continuation: the prompt's own log probabilities."""
    async with open_port(tmp_path, answers(lambda *_: [70])) as port:
        prompt_ids = port.ids("The quick fox")
        prompt = prompt_ids if as_ids else "The quick fox"
        got = await port.client.completions.create(
            model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=1
        )
        assert port.job.prompt_logprobs
        columns = got.choices[0].logprobs
        assert columns is not None
        assert columns.tokens == [port.tokenizer.token_text(one) for one in [*prompt_ids, 70]]
        first, *scores = columns.token_logprobs or ()
        assert first is None
        assert scores == pytest.approx([-one / 100 for one in [*prompt_ids[1:], 70]])
        assert columns.top_logprobs is not None
        assert columns.top_logprobs[0] is None
        assert columns.top_logprobs[1] == pytest.approx({columns.tokens[1]: scores[0]})


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("kept", [2, -1, 99])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_is_echoed_as_far_as_it_is_kept(
    tmp_path: Path, as_ids: bool, kept: int, logprobs: int | None
) -> None:
    async with open_port(tmp_path, answers(lambda *_: [70]), max_context_tokens=6) as port:
        text = "The<|im_end|> quick fox"
        prompt_ids = port.ids(text)
        got = await port.client.completions.create(
            model=MODEL,
            prompt=prompt_ids if as_ids else text,
            echo=True,
            logprobs=logprobs,
            max_tokens=2,
            extra_body={"truncate_prompt_tokens": kept},
        )
        run = prompt_of(port.job)
        assert run == prompt_ids[-min(kept % 100, 4) :]
        whole = port.tokenizer.decode([*run, 70], skip_special_tokens=as_ids)
        assert got.choices[0].text == whole
        columns = got.choices[0].logprobs
        assert (columns is None) == (logprobs is None)
        if columns is not None:
            tokens, offsets = columns.tokens, columns.text_offset
            assert tokens == [port.tokenizer.token_text(one) for one in [*run, 70]]
            assert offsets is not None
            assert whole[offsets[-1] :] == tokens[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_with_nothing_generated(tmp_path: Path, stream: bool) -> None:
    ends = answers(lambda *_: [70], worker_pb2.END_REASON_END_OF_SEQUENCE)
    async with open_port(tmp_path, ends) as port:
        tokens = [port.tokenizer.token_text(one) for one in port.ids("The quick fox")]
        create = port.client.completions.create
        asked = {"model": MODEL, "prompt": "The quick fox", "echo": True, "max_tokens": 0}
        if stream:
            chunks = [chunk async for chunk in await create(**asked, logprobs=1, stream=True)]
            choices = [chunk.choices[0] for chunk in chunks]
            assert len(choices) == 2  # The prompt, and the end.
        else:
            got = await create(**asked, logprobs=1)
            choices = got.choices
            assert got.usage is not None
            assert got.usage.completion_tokens == 0
        assert "".join(choice.text for choice in choices) == "The quick fox"
        assert choices[0].logprobs is not None
        assert choices[0].logprobs.tokens == tokens
        assert choices[-1].finish_reason == "length"
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, prompt="The quick fox", max_tokens=0)
        assert caught.value.param == "max_tokens"


async def test_models(tmp_path: Path) -> None:
    async with open_port(tmp_path, hangs) as port:
        models = [model async for model in port.client.models.list()]
        assert [(model.id, model.object, model.owned_by) for model in models] == [
            (MODEL, "model", "baton")
        ]
        assert (await port.client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await port.client.models.retrieve("other/model")


async def test_health(tmp_path: Path) -> None:
    async with open_port(tmp_path, hangs) as port:
        assert await health(port) == 200
        served, port.dispatcher.served = port.dispatcher.served, []
        assert await health(port) == 503
        port.dispatcher.served = served
        port.server.drain()
        assert await health(port) == 503


async def health(port: Port) -> int:
    answer = await port.client._client.get(f"http://{port.server.address}/health")
    return int(answer.status_code)


@pytest.mark.parametrize(
    ("stop", "options", "text", "reason"),
    [
        ("<|im_start|>", {}, "a ", "stop"),
        ("a <|im_start|>", {}, "", "stop"),
        ("<|im_start|>us", {}, "a ", "stop"),
        ("<|im_start|>us", {"include_stop_str_in_output": True}, "a <|im_start|>us", "stop"),
        ("<|im_start|>us", {"skip_special_tokens": False}, "a ", "stop"),
        ("<|im_start|>x", {}, "a user", "stop"),
        ("<|im_start|>x", {"skip_special_tokens": False}, "a <|im_start|>user", "stop"),
        ("<|im_start|>us", {"min_tokens": 99, "max_tokens": 100}, "a user", "stop"),
        ("er<|im_end|>", {}, "a us", "stop"),
    ],
)
async def test_a_stop_text_may_hold_the_name_of_a_special_token(
    stop: str, options: dict[str, Any], text: str, reason: str, tmp_path: Path
) -> None:
    script = says("a <|im_start|>user<|im_end|>", reason=worker_pb2.END_REASON_END_OF_SEQUENCE)
    async with open_port(tmp_path, script) as port:
        got = await port.client.completions.create(
            model=MODEL, prompt="a", stop=stop, extra_body=options
        )
        assert (got.choices[0].text, got.choices[0].finish_reason) == (text, reason)


SEVERAL = "a 🦄é 🏃‍♀️ b<|im_start|>c 日<|im_end|>"


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("x", {}),
        ("x 日", {"skip_special_tokens": False}),
        ("é<|im_start|>🦄 x", {"echo": True}),
        ([1, 5, 6, 260], {"echo": True}),
        ("x", {"return_tokens_as_token_ids": True}),
    ],
)
async def test_offsets_are_places_in_the_text(
    prompt: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    async with open_port(tmp_path, says(SEVERAL)) as port:
        got = await port.client.completions.create(
            model=MODEL, prompt=prompt, logprobs=0, extra_body=options
        )
        text, columns = got.choices[0].text, got.choices[0].logprobs
        assert columns is not None
        names = columns.tokens
        if "return_tokens_as_token_ids" in options:
            names = [port.tokenizer.token_text(int(one.split(":")[1])) for one in names]
        whole = 0
        for name, offset in zip(names, columns.text_offset, strict=True):
            assert offset <= len(text)
            is_shown = not name.startswith("<|") or text[offset:].startswith(name)
            if "\ufffd" not in name and is_shown:
                assert text[offset:].startswith(name)
                whole += 1
        assert whole > 4
