"""/v1/messages, as Anthropic's client sees it: the same answers as chats, in another form."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import pytest
from openai_kit import Port, open_port, prompt_of, says
from test_responses import SCHEMA, TURNS, Person
from tool_templates import HERMES, THINKING

from baton.worker.v1 import worker_pb2
from router.doors.auth import KeyGate
from router.doors.messages.schema import HARMLESS, CountRequest, MessageRequest

MODEL = "tiny"
END = worker_pb2.END_REASON_END_OF_SEQUENCE
CUT = worker_pb2.END_REASON_LENGTH
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = {"name": "get_weather", "input_schema": SCHEMA}
HELLO = [{"role": "user", "content": "Hello"}]


class Door(NamedTuple):
    port: Port
    client: anthropic.AsyncAnthropic

    async def create(self, **fields: Any) -> Any:
        asked = {"model": MODEL, "max_tokens": 99, "messages": HELLO, **fields}
        return await self.client.messages.create(**asked)


@pytest.fixture
async def door(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    template, text, *rest = getattr(request, "param", (HERMES, "The fox"))
    (tmp_path / "chat_template.jinja").write_text(template)
    reason, gate = rest[0] if rest else END, KeyGate("key")
    script = says(text, reason=reason)
    async with (
        open_port(tmp_path, script, max_context_tokens=2048, gate=gate, api_key="key") as port,
        anthropic.AsyncAnthropic(
            base_url=f"http://{port.server.address}", api_key="key", max_retries=0
        ) as client,
    ):
        yield Door(port, client)


async def test_a_whole_message_and_its_tokens(door: Door) -> None:
    got = await door.create(system="Be brief.", stop_sequences=["bear"], extra_body={"top_k": 5})
    assert (got.type, got.role, got.content[0].text) == ("message", "assistant", "The fox")
    assert (got.stop_reason, got.stop_sequence) == ("end_turn", None)
    read = got.usage.input_tokens + got.usage.cache_read_input_tokens
    assert (read, got.usage.output_tokens) == (
        door.port.job.prompt_tokens,
        len(door.port.ids("The fox")),
    )
    counted = await door.client.messages.count_tokens(
        model=MODEL, messages=HELLO, system="Be brief."
    )
    assert counted.input_tokens == read


async def test_messages_of_one_trace_have_ids_of_their_own(door: Door) -> None:
    trace = "ab" * 16
    headers = {"traceparent": f"00-{trace}-{'cd' * 8}-01"}
    ids = {(await door.create(extra_headers=headers)).id for _ in range(2)}
    assert len(ids) == 2
    assert all(one.startswith(f"msg_{trace}") for one in ids)


@pytest.mark.parametrize(
    "door", [(THINKING, f"<think>Hm.</think>Sure. {CALL}\n{CALL}")], indirect=True
)
async def test_events_in_anthropics_order(door: Door) -> None:
    """The official client's accumulator makes of the events what the whole message is."""
    names, asked = [], {"tools": [WEATHER], "thinking": {"type": "adaptive"}}
    async with door.client.messages.stream(
        model=MODEL, max_tokens=99, messages=HELLO, **asked
    ) as stream:
        async for event in stream:
            name = event.type
            if name == "content_block_delta":
                name = event.delta.type
            if name.startswith(("message", "content")) or name.endswith("delta"):
                names += [name] if name not in names[-1:] else []
        got = await stream.get_final_message()
    block = ["content_block_start", "{}", "content_block_stop"]
    kinds = ["thinking_delta signature_delta", "text_delta", *["input_json_delta"] * 2]
    blocks = [word for kind in kinds for word in " ".join(block).format(kind).split()]
    assert names == ["message_start", *blocks, "message_delta", "message_stop"]
    whole = await door.create(**asked)
    for one in (got, whole):
        thinking, text, *calls = one.content
        assert (thinking.thinking, text.text, one.stop_reason) == ("Hm.", "Sure. ", "tool_use")
        assert [(call.name, call.input) for call in calls] == [
            ("get_weather", {"city": "Paris"})
        ] * 2


_USE = {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}}
MESSAGES = [
    {"role": "user", "content": "Hello"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Sure."},
            {**_USE, "id": "c1"},
            {**_USE, "id": "c2"},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "Rain."},
            {
                "type": "tool_result",
                "tool_use_id": "c2",
                "content": [{"type": "text", "text": "Sun."}],
            },
        ],
    },
    {"role": "assistant", "content": [{**_USE, "id": "c3", "input": {}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c3", "content": "Fog."}],
    },
    {"role": "assistant", "content": "Both."},
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "b"}]},
]
COMBINED = [*TURNS[:-3], {"role": "assistant", "content": "Both.Well."}, TURNS[-1]]
"""Consecutive turns are one, as Anthropic's reference says."""


@pytest.mark.parametrize("door", [(THINKING, "The fox")], indirect=True)
async def test_messages_make_the_prompt_of_a_chat(door: Door) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    for extra, thinking in (
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "none"}, {"type": "disabled"}),
        ({}, {"type": "adaptive"}),
    ):
        await door.port.client.chat.completions.create(
            model=MODEL, messages=COMBINED, tools=[tool], **extra
        )
        wanted = prompt_of(door.port.job)
        given = {} if thinking is None else {"thinking": thinking}
        await door.create(messages=MESSAGES, tools=[WEATHER], **given)
        assert prompt_of(door.port.job) == wanted


@pytest.mark.parametrize("door", [(HERMES, "The fox"), (HERMES, CALL, CUT)], indirect=True)
async def test_without_tokens_the_prompt_alone_is_run(door: Door) -> None:
    got = await door.create(max_tokens=0, tools=[WEATHER])
    assert (got.content, got.stop_reason, got.usage.output_tokens) == ([], "max_tokens", 0)
    assert door.port.job.stopping.max_tokens == 1
    assert got.usage.input_tokens + got.usage.cache_read_input_tokens == door.port.job.prompt_tokens
    jobs = len(door.port.dispatcher.jobs)
    with pytest.raises(anthropic.BadRequestError, match="stream: "):
        await door.create(max_tokens=0, stream=True)
    assert len(door.port.dispatcher.jobs) == jobs


async def test_an_answer_goes_on_where_the_last_message_ends(door: Door) -> None:
    await door.create(messages=[*HELLO, {"role": "assistant", "content": "The quick"}])
    assert prompt_of(door.port.job)[-2:] == door.port.ids("The quick")[-2:]


@pytest.mark.parametrize(
    ("door", "asked", "reason"),
    [
        ((HERMES, "The fox", CUT), {"max_tokens": 2}, ("max_tokens", None)),
        ((HERMES, "The fox", CUT), {"max_tokens": 20_000}, ("model_context_window_exceeded", None)),
        ((HERMES, "The fox"), {"stop_sequences": ["fox"]}, ("stop_sequence", "fox")),
        ((HERMES, CALL), {"tools": [WEATHER]}, ("tool_use", None)),
    ],
    indirect=["door"],
)
async def test_reasons_to_stop(
    door: Door, asked: dict[str, Any], reason: tuple[str, str | None]
) -> None:
    """A bound beyond the context is cut to it: clients of this API must set one."""
    got = await door.create(**asked)
    assert (got.stop_reason, got.stop_sequence) == reason
    assert door.port.job.stopping.max_tokens <= 2048 - door.port.job.prompt_tokens


@pytest.mark.parametrize("door", [(HERMES, '{"name": "Ann", "age": 3}')], indirect=True)
async def test_structured_text(door: Door) -> None:
    got = await door.client.messages.parse(
        model=MODEL, max_tokens=99, messages=HELLO, output_format=Person
    )
    assert got.parsed_output == Person(name="Ann", age=3)
    assert door.port.job.sampling.grammar


def _with(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": role, "content": list(blocks)}]}


_IMAGE = {"type": "image", "source": {"type": "url", "url": "SECRET"}}
_CONTENT = "messages[1].content[0]"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (_with(_IMAGE), f"{_CONTENT}.type"),
        (
            _with({"type": "tool_result", "tool_use_id": "a", "content": [_IMAGE]}),
            f"{_CONTENT}.content[0].type",
        ),
        (_with({**_USE, "id": "a"}), f"{_CONTENT}.type"),
        (_with({"type": "tool_result", "content": "a"}), f"{_CONTENT}.tool_use_id"),
        (_with({**_USE, "id": "a", "input": "SECRET"}, role="assistant"), f"{_CONTENT}.input"),
        ({"messages": []}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0].type"),
        (
            {"tools": [{**WEATHER, "strict": True, "input_schema": {"type": "SECRET"}}]},
            "tools[0].input_schema",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"container": "SECRET"}, "container"),
        ({"extra_body": {"mcp_servers": ["SECRET"]}}, "mcp_servers"),
        (
            {"extra_body": {"context_management": {"edits": [{"type": "compact_20260112"}]}}},
            "context_management.edits[0].type",
        ),
        ({"stop_sequences": ["a" * 999]}, "stop_sequences[0]"),
        *(
            ({"extra_body": {name: True}}, name)
            for name in ("temperature", "top_p", "top_k", "seed")
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    door: Door, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await door.create(**fields)
    assert not door.port.dispatcher.jobs
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(f"{name}: ")
    assert "SECRET" not in str(body)
    assert body["request_id"] == caught.value.request_id


@pytest.mark.parametrize(
    ("door", "ignored"),
    [
        ((HERMES, "a"), "output_config.effort, thinking"),
        ((HERMES + "{{ enable_thinking }}", "a"), None),
        ((HERMES + "{{ thinking }}", "a"), None),
    ],
    indirect=["door"],
)
async def test_thinking_is_named_where_it_has_no_effect(door: Door, ignored: str | None) -> None:
    got = await door.client.messages.with_raw_response.create(
        model=MODEL,
        max_tokens=9,
        messages=HELLO,
        thinking={"type": "adaptive"},
        output_config={"effort": "low"},
    )
    assert got.headers.get("x-baton-ignored") == ignored


async def test_errors_and_keys_in_anthropics_form(door: Door) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await door.create(model="other")
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await door.client.with_options(api_key="SECRET").messages.create(
            model=MODEL, max_tokens=9, messages=HELLO
        )
    assert refused.value.body["error"]["type"] == "authentication_error"
    headers = {"x-api-key": "key", "Authorization": anthropic.Omit()}
    assert (await door.create(extra_headers=headers)).content
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await door.client.messages.batches.list(extra_headers=headers)
    assert "one by one" in unknown.value.body["error"]["message"]
    for method, path, status, kind in (
        ("GET", "/v1/models/other", 404, "not_found_error"),
        ("GET", "/v1/nothing", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages", 415, "invalid_request_error"),
    ):
        url = f"http://{door.port.server.address}{path}"
        sent = {"x-api-key": "key", "anthropic-version": "2023-06-01", "content-encoding": "gzip"}
        answer = await door.port.client._client.request(method, url, headers=sent)
        body = answer.json()
        assert (answer.status_code, body["error"]["type"]) == (status, kind)
        assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    (model,) = (await door.client.models.list(extra_headers=headers)).data
    assert model == await door.client.models.retrieve(MODEL)
    assert (model.id, model.type, model.created_at.tzinfo is not None) == (MODEL, "model", True)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_thousands_of_turns_are_combined_in_no_time(role: str) -> None:
    """Each text is copied once: 2 MB took 13 s and gigabytes, on the event loop."""
    turns = HELLO + [{"role": role, "content": "x" * 1000}] * 2000
    asked = MessageRequest(model=MODEL, max_tokens=1, messages=turns)
    began_s = time.process_time()
    chat, _ = asked.chat()
    assert time.process_time() - began_s < 1
    assert len(chat.SerializeToString()) > 2_000_000


def test_every_field_of_anthropics_api_is_known() -> None:
    for kind, theirs in (
        (MessageRequest, anthropic.types.message_create_params.MessageCreateParamsBase),
        (CountRequest, anthropic.types.message_count_tokens_params.MessageCountTokensParams),
    ):
        assert not set(theirs.__annotations__) - set(kind.model_fields) - HARMLESS
