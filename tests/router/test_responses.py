"""/v1/responses, as the official client sees it: the same answers as chats, in another form."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_kit import Port, open_port, prompt_of, says
from pydantic import BaseModel
from tool_templates import HERMES, THINKING

from baton.worker.v1 import worker_pb2
from router.doors.responses.items import Item, Turns
from telemetry.metrics.router import RouterLoad, RouterMetrics
from telemetry.names import Metric

MODEL = "tiny"
END = worker_pb2.END_REASON_END_OF_SEQUENCE
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": None}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
async def port(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Port]:
    template, text, *rest = getattr(request, "param", (HERMES, "The fox"))
    (tmp_path / "chat_template.jinja").write_text(template)
    reason = rest[0] if rest else END
    async with open_port(tmp_path, says(text, reason=reason), max_context_tokens=2048) as port:
        yield port


async def create(port: Port, **fields: Any) -> Any:
    return await port.client.responses.create(**{"model": MODEL, "input": "Hello", **fields})


async def refused(port: Port, **fields: Any) -> Any:
    jobs = len(port.dispatcher.jobs)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(port, **fields)
    assert len(port.dispatcher.jobs) == jobs
    return caught.value


async def test_a_whole_response(port: Port) -> None:
    got = await create(port, instructions="Be brief.", max_output_tokens=9, metadata={"a": "b"})
    assert (got.object, got.status, got.output_text) == ("response", "completed", "The fox")
    assert (got.instructions, got.metadata, got.max_output_tokens) == ("Be brief.", {"a": "b"}, 9)
    assert got.usage.input_tokens == port.job.prompt_tokens
    assert got.usage.total_tokens == port.job.prompt_tokens + len(port.ids("The fox"))
    assert not got.model_extra["store"]
    for asked in ("auto", "scale", "flex"):
        tier = (await create(port, extra_body={"service_tier": asked})).service_tier
        assert tier == (asked if asked == "flex" else "default")


OPEN_RESPONSES = """background completed_at created_at error frequency_penalty id incomplete_details
    instructions max_output_tokens max_tool_calls metadata model object output parallel_tool_calls
    presence_penalty previous_response_id prompt_cache_key reasoning safety_identifier service_tier
    status store temperature text tool_choice tools top_logprobs top_p truncation usage user"""
"""What its `ResponseResource` requires (2026-04-24)."""


async def test_a_response_has_all_that_open_responses_requires(port: Port) -> None:
    text = {
        "verbosity": "low",
        "format": {"type": "json_schema", "name": "a", "schema": {"const": 1}, "strict": True},
    }
    more = {"presence_penalty": 1, "max_tool_calls": 2}
    stream = await create(port, stream=True, text=text, extra_body=more)
    events = [one async for one in stream]
    for event in (events[0], events[-1]):
        got = event.response.model_dump()
        assert got.keys() >= set(OPEN_RESPONSES.split())
        assert got["text"]["verbosity"] == "low"
        form = got["text"]["format"]
        assert form["name"] == "a"
        assert form["description"] is None
        assert (got["presence_penalty"], got["frequency_penalty"]) == (1, 0)
        assert got["max_tool_calls"] == 2


async def test_requests_are_counted_by_method(tmp_path: Path) -> None:
    metrics = RouterMetrics(RouterLoad)
    async with open_port(tmp_path, says("a"), events=metrics) as port:
        for _ in range(2):
            await create(port)
        await port.client.completions.create(model=MODEL, prompt="Hello")
    for path, count in (("responses", 2), ("completions", 1)):
        labels, name = {"method": f"POST /v1/{path}"}, f"{Metric.REQUESTS_BY_METHOD}_total"
        assert metrics.registry.get_sample_value(name, labels) == count


@pytest.mark.parametrize(
    "port", [(THINKING, f"<think>Hm.</think>Sure. {CALL}\n{CALL}")], indirect=True
)
async def test_events_in_openais_order(port: Port) -> None:
    """The official client's parser makes of the events what the whole response is."""
    names = []
    async with port.client.responses.stream(
        model=MODEL, input="Hello", tools=[WEATHER], reasoning={"effort": "high"}
    ) as stream:
        async for event in stream:
            if event.type not in names[-1:]:
                names.append(event.type)
        got = await stream.get_final_response()
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    part = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    assert [name.removeprefix("response.") for name in names] == [
        *("created", "in_progress"),
        *(*part, "reasoning_text.delta", "reasoning_text.done", *done),
        *(*part, "output_text.delta", "output_text.done", *done),
        *(*call, *call),
        "completed",
    ]
    whole = await create(port, tools=[WEATHER], reasoning={"effort": "high"})
    for one in (got, whole):
        thinking, text, *calls = one.output
        assert thinking.content[0].text == "Hm."
        assert text.content[0].text == "Sure. "
        assert [(call.name, call.arguments) for call in calls] == [
            ("get_weather", '{"city": "Paris"}')
        ] * 2


CALLED = {
    "id": "c3",
    "type": "function",
    "function": {"name": "get_weather", "arguments": "{}"},
}
TURNS = [
    {"role": "user", "content": "Hello"},
    {
        "role": "assistant",
        "content": "Sure.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": f"c{one}",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            }
            for one in (1, 2)
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
    {"role": "tool", "tool_call_id": "c2", "content": "Sun."},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c3", "content": "Fog."},
    {"role": "assistant", "content": "Both."},
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": [{"type": "text", "text": one} for one in ("a", "b")]},
]
_CALLED = {"type": "function_call", "name": "get_weather", "arguments": '{"city": "Paris"}'}
ITEMS = [
    {"role": "user", "content": "Hello"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sure."}]},
    {**_CALLED, "call_id": "c1"},
    {**_CALLED, "call_id": "c2"},
    {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
    {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "Sun."}],
    },
    {"type": "function_call", "call_id": "c3", **CALLED["function"]},
    {"type": "function_call_output", "call_id": "c3", "output": "Fog."},
    {"role": "assistant", "content": "Both."},
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": [{"type": "input_text", "text": one} for one in ("a", "b")]},
]


@pytest.mark.parametrize("port", [(THINKING, "The fox")], indirect=True)
async def test_items_make_the_prompt_of_a_chat(port: Port) -> None:
    chat_tool = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    await port.client.chat.completions.create(model=MODEL, messages=TURNS, tools=[chat_tool])
    wanted = prompt_of(port.job)
    await create(port, input=ITEMS, tools=[WEATHER])
    assert prompt_of(port.job) == wanted


@pytest.mark.parametrize("port", [(HERMES, '{"name": "Ann", "age": 3}')], indirect=True)
async def test_structured_text(port: Port) -> None:
    got = await port.client.responses.parse(model=MODEL, input="Hello", text_format=Person)
    assert got.output_parsed == Person(name="Ann", age=3)
    assert port.job.sampling.grammar


@pytest.mark.parametrize("port", [(HERMES, "The fox", worker_pb2.END_REASON_LENGTH)], indirect=True)
async def test_a_cut_response_is_incomplete(port: Port) -> None:
    got = await create(port)
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert got.output[0].status == "incomplete"


@pytest.mark.parametrize(
    ("port", "ignored", "read"),
    [((HERMES, "a"), "text.verbosity", ""), (("{{ verbosity }}" + HERMES, "a"), None, "low")],
    indirect=["port"],
)
async def test_verbosity_reaches_a_template_that_reads_it(
    port: Port, ignored: str | None, read: str
) -> None:
    got = await port.client.responses.with_raw_response.create(
        model=MODEL, input="Hello", text={"verbosity": "low"}
    )
    assert got.headers.get("x-baton-ignored") == ignored
    assert port.tokenizer.decode(prompt_of(port.job)).startswith(f"{read}user")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_SECRET"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "SECRET"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "parameters": "SECRET"}]}, "tools[0].parameters"),
        ({"tools": [{**WEATHER, "parameters": {"a": "a" * 300_000}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"verbosity": "SECRET"}}, "text.verbosity"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"metadata": {"SECRET" * 99: "a"}}, "metadata"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "SECRET", "content": "a"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        (
            {"input": [{"type": "function_call_output", "call_id": "SECRET", "output": "a"}]},
            "input[0].call_id",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, "response_format"),
        ({"instructions": "a" * 9000}, "input"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    port: Port, fields: dict[str, Any], param: str
) -> None:
    error = await refused(port, **fields)
    assert error.param == param
    assert "SECRET" not in str(error.body)


@pytest.mark.parametrize("kinds", [("reasoning",), ("function_call", "message")])
def test_thousands_of_items_of_a_turn_are_joined_in_no_time(kinds: tuple[str, ...]) -> None:
    """Each text is copied once, as in `test_messages.py`."""
    text = [{"text": "x" * 1000}]
    items = {
        "reasoning": {"type": "reasoning", "summary": text},
        "function_call": {"type": "function_call", "name": "f", "call_id": "1", "arguments": "{}"},
        "message": {"type": "message", "role": "assistant", "content": text},
    }
    turns, own = Turns(), [Item.model_validate(items[kind]) for kind in kinds]
    began_s = time.process_time()
    for one in own * 2000:
        turns.add(one, "input[0]")
    (turn,) = turns.messages
    assert time.process_time() - began_s < 1
    assert len(turn.reasoning + turn.content) == 2_000_000
