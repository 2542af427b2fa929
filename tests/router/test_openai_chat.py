"""/v1/chat/completions, as the official client sees it."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from frontdoor_kit import CHAT_TEMPLATE
from openai_kit import answers, open_port, prompt_of, says

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from router.answers.token_texts import TokenTexts
from router.doors.openai.turns import MAX_DEPTH, MAX_INTEGER

MODEL = "tiny"
TEXT = "The quick brown fox 🎉"
HELLO = [{"role": "user", "content": "Hello"}]


async def test_whole(tmp_path: Path) -> None:
    script = says(TEXT, reason=worker_pb2.END_REASON_END_OF_SEQUENCE)
    async with open_port(tmp_path, script) as port:
        got = await port.client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "developer", "content": "Be brief."},
                *HELLO,
                {"role": "assistant", "content": None},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
            ],
            max_completion_tokens=99,
        )
        choice = got.choices[0]
        assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
        assert choice.finish_reason == "stop"
        assert (got.object, got.id[:-8]) == ("chat.completion", f"chatcmpl-{port.job.id}")
        assert got.usage is not None
        assert got.usage.prompt_tokens == port.job.prompt_tokens
        assert port.job.stopping.max_tokens == 99
        turns = [
            api.ChatMessage(role=api.ROLE_SYSTEM, content="Be brief."),
            api.ChatMessage(role=api.ROLE_USER, content="Hello"),
            api.ChatMessage(role=api.ROLE_ASSISTANT),
            api.ChatMessage(role=api.ROLE_USER, content="a\nb"),
        ]
        rendered = port.tokenizer.encode(
            port.tokenizer.render_chat(api.ChatPrompt(messages=turns)), False
        )
        assert prompt_of(port.job) == rendered.tolist()


async def test_max_tokens_by_either_name_or_the_servers_default(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("a")) as port:
        create = port.client.chat.completions.create
        await create(model=MODEL, messages=HELLO, max_tokens=7)
        assert port.job.stopping.max_tokens == 7
        await create(model=MODEL, messages=HELLO)
        assert port.job.stopping.max_tokens == 256 - port.job.prompt_tokens


async def test_stream_by_the_clients_own_accumulator(tmp_path: Path) -> None:
    script = says("The fox", "lazy dog", reason=worker_pb2.END_REASON_END_OF_SEQUENCE)
    async with open_port(tmp_path, script) as port:
        async with port.client.chat.completions.stream(
            model=MODEL,
            messages=HELLO,
            n=2,
            logprobs=True,
            stream_options={"include_usage": True},
        ) as stream:
            async for _ in stream:
                pass
            got = await stream.get_final_completion()
        assert [choice.message.content for choice in got.choices] == ["The fox", "lazy dog"]
        assert [choice.message.role for choice in got.choices] == ["assistant"] * 2
        assert [choice.finish_reason for choice in got.choices] == ["stop"] * 2
        logprobs = got.choices[0].logprobs
        assert logprobs is not None
        assert "".join(one.token for one in logprobs.content or ()) == "The fox"
        assert got.usage is not None
        assert got.usage.completion_tokens == len(port.ids("The fox")) + len(port.ids("lazy dog"))


async def test_chunks(tmp_path: Path) -> None:
    async with open_port(tmp_path, says(TEXT)) as port:
        stream = await port.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
        assert "".join(delta.content or "" for delta in deltas) == TEXT
        finish_reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert finish_reasons == [*[None] * (len(deltas) - 1), "length"]
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert {chunk.usage for chunk in chunks} == {None}


async def test_stop_text_in_a_stream(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("jumps over the dog")) as port:
        stream = await port.client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stop="er th"
        )
        chunks = [chunk.choices[0] async for chunk in stream]
        assert "".join(one.delta.content or "" for one in chunks) == "jumps ov"
        assert chunks[-1].finish_reason == "stop"


async def test_logprobs(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("é<|im_end|>")) as port:
        got = await port.client.chat.completions.create(
            model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2
        )
        assert got.choices[0].logprobs is not None
        content = got.choices[0].logprobs.content
        assert content is not None
        ids = port.ids("é<|im_end|>")
        assert [one.token for one in content] == [port.tokenizer.token_text(i) for i in ids]
        assert content[-1].token == "<|im_end|>"
        assert content[-1].bytes == list(b"<|im_end|>")
        for token_id, one in zip(ids, content, strict=True):
            assert one.logprob == pytest.approx(-token_id / 100)
            assert one.top_logprobs[0].token == one.token
            assert len(one.top_logprobs) == 2


@pytest.mark.parametrize("knows", [True, False])
async def test_parts_of_characters_have_bytes_and_infinity_a_number(
    tmp_path: Path, knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of all tokens together are the text's, where the tokenizer knows them."""
    if not knows:
        monkeypatch.setattr(TokenTexts, "of", lambda _: None)
    async with open_port(tmp_path, answers(lambda *_: [70])) as port:
        ids = port.ids("é🎉🏃‍♀️")
        port.dispatcher.script = answers(lambda *_: ids, logprob=-float("inf"))
        got = await port.client.chat.completions.create(
            model=MODEL, messages=HELLO, logprobs=True, top_logprobs=1
        )
        assert got.choices[0].logprobs is not None
        tokens = got.choices[0].logprobs.content or []
        parts = [one for one in tokens if "\ufffd" in one.token]
        assert parts
        assert {one.logprob for one in tokens} == {-9999.0}
        assert [one.bytes for one in tokens] == [one.top_logprobs[0].bytes for one in tokens]
        if knows:
            assert bytes(one for token in tokens for one in token.bytes or ()) == "é🎉🏃‍♀️".encode()
        else:
            assert {one.bytes is None for one in parts} == {True}


async def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    fields: list[dict[str, object]] = [
        {"functions": [{"name": "f"}]},
        {"chat_template": "{{ messages }}"},
        {"xtc_probability": 0.5},
    ]
    async with open_port(tmp_path, says("a")) as port:
        for field in fields:
            with pytest.raises(openai.BadRequestError) as caught:
                await port.client.chat.completions.create(
                    model=MODEL, messages=HELLO, extra_body=field
                )
            assert caught.value.param == next(iter(field))
            assert "not supported" in caught.value.message
        assert not port.dispatcher.jobs


THINKING = CHAT_TEMPLATE + "{% if not enable_thinking %}<think></think>{{ depth }}{% endif %}"


async def test_variables_of_the_chat_template(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("a")) as port:
        (tmp_path / "chat_template.jinja").write_text(THINKING)
        create = port.client.chat.completions.create
        for value, end in ((False, "<think></think>7"), (True, "")):
            given = {"chat_template_kwargs": {"enable_thinking": value, "depth": 7, "unknown": {}}}
            await create(model=MODEL, messages=HELLO, extra_body=given)
            prompt = port.tokenizer.decode(prompt_of(port.job), skip_special_tokens=False)
            assert prompt.endswith("<|im_start|>assistant\n" + end)
        given = {"chat_template_kwargs": {"tools": [], "depth": 7}}
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, messages=HELLO, extra_body=given)
        assert caught.value.param == "chat_template_kwargs.tools"


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 150])
async def test_variables_nest_to_a_bound(tmp_path: Path, depth: int) -> None:
    nested: dict[str, object] = {}
    for _ in range(depth - 1):
        nested = {"a": nested}
    await check_variables(tmp_path, nested, are_taken=depth == MAX_DEPTH)


@pytest.mark.parametrize("number", [MAX_INTEGER, -MAX_INTEGER - 1, 10**400])
async def test_an_integer_that_would_be_changed_is_refused(tmp_path: Path, number: int) -> None:
    await check_variables(tmp_path, {"a": [number]}, are_taken=number == MAX_INTEGER)


async def check_variables(tmp_path: Path, given: dict[str, object], *, are_taken: bool) -> None:
    async with open_port(tmp_path, says("a")) as port:
        create = port.client.chat.completions.create
        body = {"chat_template_kwargs": given}
        if are_taken:
            await create(model=MODEL, messages=HELLO, extra_body=body)
            return
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model=MODEL, messages=HELLO, extra_body=body)
        assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("turned", [{}, {"add_generation_prompt": False}])
async def test_an_answer_goes_on_where_the_last_turn_ends(
    tmp_path: Path, turned: dict[str, object]
) -> None:
    begun = {"role": "assistant", "content": "Sure: "}
    given = {"continue_final_message": True, **turned}
    async with open_port(tmp_path, says("a")) as port:
        create = port.client.chat.completions.create
        await create(model=MODEL, messages=[*HELLO, begun], extra_body=given)
        prompt = port.tokenizer.decode(prompt_of(port.job), skip_special_tokens=False)
        assert prompt.endswith("<|im_start|>assistant\nSure: ")
        refused: list[tuple[list[dict[str, str]], dict[str, object], str]] = [
            (HELLO, given, "continue_final_message"),
            ([*HELLO, begun], {**given, "add_generation_prompt": True}, "add_generation_prompt"),
            (HELLO, {"add_generation_prompt": False}, "add_generation_prompt"),
        ]
        for messages, fields, param in refused:
            with pytest.raises(openai.BadRequestError) as caught:
                await create(model=MODEL, messages=messages, extra_body=fields)
            assert caught.value.param == param


async def test_fields_that_ask_for_nothing_pass(tmp_path: Path) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "chat_template_kwargs": {},
    }
    async with open_port(tmp_path, says("a")) as port:
        got = await port.client.chat.completions.create(
            model=MODEL, messages=HELLO, extra_body=neutral
        )
        assert got.choices[0].message.content == "a"


@pytest.mark.parametrize(
    "part",
    [
        "Nobody",
        {"type": "refusal", "refusal": "Nobody"},
        {"text": "Nobody"},
        *({"type": kind, "text": "Nobody"} for kind in ("text", "input_text", "output_text", None)),
    ],
)
async def test_parts_that_hold_text(tmp_path: Path, part: object) -> None:
    await check_said(tmp_path, {"content": [part]})


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
async def test_a_refusal_is_what_the_assistant_said(
    tmp_path: Path, content: dict[str, object]
) -> None:
    """As the client gives a message back."""
    await check_said(tmp_path, {**content, "refusal": "Nobody"})


async def check_said(tmp_path: Path, given: dict[str, object]) -> None:
    turns = [*HELLO, {"role": "assistant", **given}, *HELLO]
    async with open_port(tmp_path, says("a")) as port:
        await port.client.chat.completions.create(
            model=MODEL, messages=[], extra_body={"messages": turns}
        )
        assert "Nobody" in port.tokenizer.decode(port.job.prompt_ids.tolist())


async def test_turns_that_cannot_be_rendered(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"role": "tool", "content": "SECRET"}, "messages[1].tool_call_id"),
        ({"role": "user", "content": [{"type": "image_url"}, "SECRET"]}, "messages[1].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "text": "SECRET"}]},
            "messages[1].content",
        ),
        ({"role": "user", "content": {"SECRET": 1}}, "messages[1].content"),
        ({"role": "user", "contents": "SECRET"}, "messages[1].content"),
        ({"role": "system", "content": None}, "messages[1].content"),
        (
            {"role": "assistant", "tool_calls": [{"id": "SECRET"}]},
            "messages[1].tool_calls[0].function",
        ),
    ]
    async with open_port(tmp_path, says("a")) as port:
        for turn, param in cases:
            with pytest.raises(openai.BadRequestError) as caught:
                await port.client.chat.completions.create(model=MODEL, messages=[*HELLO, turn])
            assert caught.value.param == param
            assert "SECRET" not in str(caught.value.body)
