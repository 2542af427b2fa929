"""Structured output, tools and reasoning over the OpenAI API, as the official client sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from frontdoor_kit import served_model
from llguidance import LLMatcher, LLTokenizer
from openai_kit import Port, answers, open_port, says
from pydantic import BaseModel
from tool_templates import HERMES, LLAMA, THINKING

from baton.worker.v1 import worker_pb2

MODEL = "tiny"
HELLO = [{"role": "user", "content": "Hello"}]
END = worker_pb2.END_REASON_END_OF_SEQUENCE
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}


def called_with(parameters: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    """A tool whose arguments have that schema."""
    function = {"name": "f", "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Paris"}}'


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
async def port(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Port]:
    template, *texts = getattr(request, "param", (HERMES, '{"name": "Ann", "age": 3}'))
    (tmp_path / "chat_template.jinja").write_text(template)
    async with open_port(tmp_path, says(*texts, reason=END), max_context_tokens=2048) as port:
        yield port


@cache
def ll_tokenizer(file: str, vocab_size: int) -> LLTokenizer:
    return LLTokenizer(file, vocab_size, list(served_model(Path()).eos_token_ids))


def accepts(port: Port, text: str) -> bool:
    """Whether the grammar of the latest job has this whole text."""
    file = Path(port.job.model.path) / "tokenizer.json"
    tokenizer = ll_tokenizer(file.read_text(), port.job.model.vocab_size)
    matcher = LLMatcher(tokenizer, port.job.sampling.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = port.ids(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


async def create(port: Port, *, messages: Any = HELLO, **fields: Any) -> Any:
    return await port.client.chat.completions.create(model=MODEL, messages=messages, **fields)


async def refusal(port: Port, **fields: Any) -> openai.BadRequestError:
    jobs = len(port.dispatcher.jobs)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(port, **fields)
    assert len(port.dispatcher.jobs) == jobs
    return caught.value


FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "response_format": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": PERSON},
            }
        },
        '{"name": "é", "age": -3}',
        '{"name": "a"}',
    ),
    "json_object": ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
    "TGI's schema": (
        {"response_format": {"type": "json_object", "value": PERSON}},
        '{"name": "a", "age": 3}',
        '{"name": "a"}',
    ),
    "llama.cpp's schema": (
        {"response_format": {"type": "json_object", "schema": PERSON}},
        '{"name": "a", "age": 3}',
        '{"name": "a"}',
    ),
    "strict closes": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "strict": True, "schema": {"properties": {"a": {}}}},
            }
        },
        '{"a": 1}',
        '{"b": 1}',
    ),
    "guided_json": ({"guided_json": json.dumps(PERSON)}, '{"name":"a","age":1}', "{}"),
    "json_schema": ({"json_schema": PERSON}, '{"name":"a","age":1}', "{}"),
    "json": ({"structured_outputs": {"json": PERSON}}, '{"name":"a","age":1}', "{}"),
    "regex": ({"structured_outputs": {"regex": r"^a/\d+$"}}, "a/12", "a/"),
    "guided_regex": ({"guided_regex": r"a\d+"}, "a12", "ba12"),
    "sglang's regex": ({"regex": r"a\d+"}, "a12", "a12b"),
    "choice": ({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'n"o', "no"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "no", "non"),
    "lark": ({"structured_outputs": {"grammar": 'start: "a" /[0-9]+/'}}, "a12", "12"),
    "gbnf": ({"guided_grammar": 'root ::= "a" [0-9]+'}, "a12", "12"),
    "ebnf": ({"ebnf": 'root ::= "a" | "b"'}, "b", "c"),
    "a literal like GBNF": ({"guided_grammar": 'start: "a ::= b"'}, "a ::= b", "a"),
    "GBNF's escapes": ({"ebnf": r'root ::= [\u00e9\u0041] "\u20ac"'}, "A€", "B€"),
    "guidance sends both": (
        {"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}},
        "a",
        "b",
    ),
}


def deep(levels: int) -> dict[str, Any]:
    """A schema of lists in lists."""
    return {"type": "array", "items": deep(levels - 1)} if levels else {}


async def test_each_way_to_ask_for_a_form(port: Port) -> None:
    for name, (fields, good, bad) in FORMS.items():
        await create(port, extra_body=fields)
        assert accepts(port, good), name
        assert not accepts(port, bad), name
        await port.client.completions.create(model=MODEL, prompt="a", extra_body=fields)
        assert accepts(port, good), name


async def test_white_space_is_at_most_one_character(port: Port) -> None:
    await create(port, response_format={"type": "json_object"})
    assert accepts(port, '{ "a":\n1}')
    assert not accepts(port, '{  "a": 1}')


async def test_the_clients_parse_helper(port: Port) -> None:
    got = await port.client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Person
    )
    assert got.choices[0].message.parsed == Person(name="Ann", age=3)
    async with port.client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Person
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Ann", age=3)


async def test_keywords_that_cannot_be_enforced(port: Port) -> None:
    schema = {**PERSON, "not": {"const": "SECRET"}}
    wanted = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema, "strict": True}}
    error = await refusal(port, response_format=wanted)
    assert error.param == "response_format.json_schema.schema"
    assert "/not" in error.message
    assert "SECRET" not in error.message
    wanted["json_schema"]["strict"] = False
    for stream in (False, True):
        answer = await port.client.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, response_format=wanted, stream=stream
        )
        assert answer.headers["x-dropped-keywords"] == "/not"
        await answer.http_response.aclose()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "(SECRET"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": "start: SECRET"}}, "structured_outputs.grammar"),
    ({"ebnf": "root ::= SECRET ("}, "ebnf"),
    ({"guided_json": '{"$ref": "https://SECRET"}'}, "guided_json"),
    ({"guided_json": "SECRET"}, "guided_json"),
    ({"guided_json": '{"enum": ["SECRET\\ud83d"]}'}, "guided_json"),
    ({"guided_json": deep(110)}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"structured_outputs": {"SECRET": 1}}, "structured_outputs"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
    ({"guided_json": "{}", "regex": "SECRET"}, "regex"),
    ({"structural_tag": {"SECRET": 1}}, "structural_tag"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"structural_tag": "SECRET"}}, "structured_outputs.structural_tag"),
    ({"guided_regex": "a+", "ignore_eos": True}, "ignore_eos"),
    ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json"),
    ({"regex": "x" * 300_000}, "regex"),
    ({"tools": [WEATHER] * 2}, "tools[1].function.name"),
    ({"tools": [CLOCK] * 129}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "SECRET"}}]}, "tools[0].type"),
    (
        {"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
        "tools[0].function.name",
    ),
    (
        {"tools": [CLOCK], "tool_choice": {"function": {"name": "SECRET"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": "SECRET"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "SECRET"}}, "tool_choice"),
    ({"logit_bias": {"SECRET": 1}}, "logit_bias"),
    (
        {"tools": [called_with({"type": "string"})], "tool_choice": "required"},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "[SECRET]"}}]},
        "tools[0].function.parameters",
    ),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"reasoning_effort": "SECRET"}, "reasoning_effort"),
    ({"thinking_token_budget": 3}, "thinking_token_budget"),
    (
        {"messages": [*HELLO, {"role": "tool", "tool_call_id": "SECRET", "content": "a"}]},
        "messages[1].tool_call_id",
    ),
    (
        {
            "messages": [
                *HELLO,
                {
                    "role": "user",
                    "content": "a",
                    "tool_calls": [{"id": "a", "function": {"name": "f"}}],
                },
            ]
        },
        "messages[1].tool_calls",
    ),
]
"""Fields with the name that the refusal has."""


async def test_what_asks_for_too_much_or_for_nothing_is_refused(port: Port) -> None:
    for fields, param in BAD:
        error = await refusal(port, extra_body=fields)
        assert error.param == param
        assert (error.body or {})["code"] == "invalid_field", param
        assert "SECRET" not in error.message, param
        assert len(error.message) < 500, param


@pytest.mark.parametrize(
    "port",
    [
        (HERMES, f"Sure. {CALL}"),
        (LLAMA, LLAMA_CALL),
        (
            "{# <｜tool▁calls▁begin｜> #}" + HERMES,
            "Sure. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "{# <arg_key> #}" + HERMES,
            "Sure. <tool_call>get_weather\n<arg_key>city</arg_key>\n"
            "<arg_value>Paris</arg_value>\n</tool_call>",
        ),
        (
            "{# <function= #}" + HERMES,
            "Sure. <tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "{# <|channel|> <|message|> #}" + HERMES,
            "<|channel|>commentary<|message|>Sure. <|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}',
        ),
    ],
    indirect=True,
)
async def test_a_call_of_a_tool(port: Port) -> None:
    got = await create(port, tools=[WEATHER, CLOCK])
    (choice,) = got.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert choice.message.content in (None, "Sure. ")
    async with port.client.chat.completions.stream(
        model=MODEL, messages=HELLO, tools=[WEATHER]
    ) as stream:
        names = [event.type async for event in stream]
        final = (await stream.get_final_completion()).choices[0]
    assert "tool_calls.function.arguments.delta" in names
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}
    answer = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
    ]
    await create(port, messages=answer, tools=[WEATHER])
    prompt = port.tokenizer.decode(port.job.prompt_ids.tolist())
    assert '"name": "get_weather", "arguments": {"city": "Paris"}' in prompt
    assert "Rain." in prompt


async def test_which_calls_a_grammar_has(port: Port) -> None:
    await create(port, tools=[CLOCK])
    assert not port.job.sampling.grammar, "auto is free"
    await create(port, tools=[WEATHER, CLOCK])
    assert accepts(port, "Any text")
    assert accepts(port, f"Sure. {CALL}\n{CALL} Done.")
    assert not accepts(port, CALL.replace("city", "town")), "strict is held to its schema"
    assert accepts(port, CALL.replace("get_weather", "clock").replace("city", "town"))
    await create(port, tools=[WEATHER, CLOCK], tool_choice="required")
    assert accepts(port, f"{CALL}\n{CALL}")
    assert not accepts(port, f"Sure. {CALL}")
    await create(port, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert accepts(port, CALL)
    assert not accepts(port, f"{CALL}\n{CALL}")
    named = {"type": "function", "function": {"name": "clock"}}
    await create(port, tools=[WEATHER, CLOCK], tool_choice=named)
    assert not accepts(port, CALL)
    assert accepts(port, CALL.replace("get_weather", "clock"))
    other = CALL.replace("get_weather", "clock")
    assert not accepts(port, f"{other}\n{other}"), "a tool that is named is called once"
    loose = {**WEATHER["function"], "strict": False}
    await create(port, tools=[{"type": "function", "function": loose}], tool_choice="required")
    assert not accepts(port, CALL.replace("city", "town")), "a call that is required is held, too"
    await create(port, tools=[WEATHER], response_format={"type": "json_object"})
    assert accepts(port, CALL)
    assert accepts(port, '{"a": 1}')
    either = {"response_format": {"type": "json_object"}, "tool_choice": "required"}
    await create(port, tools=[WEATHER], **either)
    assert accepts(port, CALL)
    assert not accepts(port, '{"a": 1}')
    assert not accepts(port, "Any text")
    await create(port, tools=[WEATHER], tool_choice="none")
    assert not port.job.sampling.grammar
    assert "get_weather" not in port.tokenizer.decode(port.job.prompt_ids.tolist())


@pytest.mark.parametrize("port", [(HERMES, f"{CALL}\n{CALL}")], indirect=True)
async def test_one_call_only(port: Port) -> None:
    several = await create(port, tools=[CLOCK])
    assert len(several.choices[0].message.tool_calls) == 2
    one = await create(port, tools=[CLOCK], parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1
    assert one.choices[0].finish_reason == "tool_calls"
    assert one.usage.completion_tokens < several.usage.completion_tokens


@pytest.mark.parametrize("strict", [False, True])
async def test_arguments_are_an_object_though_their_schema_does_not_say_so(
    port: Port, strict: bool
) -> None:
    await create(
        port,
        tools=[called_with({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, strict)],
        tool_choice="required",
    )
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert accepts(port, call % '{"a": 1}')
    assert not accepts(port, call % "[1]")
    assert not accepts(port, call % '"a"')


async def test_a_strict_tool_whose_schema_cannot_be_enforced(port: Port) -> None:
    function = {**CLOCK["function"], "strict": True, "parameters": {"type": "object", "not": {}}}
    error = await refusal(port, tools=[WEATHER, {"type": "function", "function": function}])
    assert error.param == "tools[1].function.parameters"
    assert "/not" in error.message


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("", "{}"), ("null", "{}"), ("[1]", '"[1]"'), ('{"a": 1', '"{\\"a\\": 1"'),
     ({"a": 1}, '{"a": 1}'), ('{"a": "\\ud83d"}', '"{\\"a\\": \\"\\\\ud83d\\"}"')],
)  # fmt: skip
async def test_arguments_that_a_model_wrote_are_taken_back(
    port: Port, arguments: Any, shown: str
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    await create(port, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}])
    assert f'"arguments": {shown}}}' in port.tokenizer.decode(port.job.prompt_ids.tolist())


@pytest.mark.parametrize("port", [(HERMES.replace("| tojson }}}", "| items | list }}}"), "a")],
                         indirect=True)  # fmt: skip
async def test_templates_that_look_into_arguments_get_an_object(port: Port) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1'}}
    await create(port, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}])
    assert '"arguments": []}' in port.tokenizer.decode(port.job.prompt_ids.tolist())


async def test_fields_without_effect_are_named(port: Port) -> None:
    asked = {
        "reasoning_effort": "low",
        "verbosity": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "user": "SECRET",
        "prediction": {"type": "content", "content": "SECRET"},
        "metadata": None,
        "new field": {"a": 1},
        "messages": [{"role": "user", "content": "a", "cache": 1}],
    }
    chat = await port.client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[], extra_body=asked
    )
    names = ["user", "prediction", "new%20field", "messages[0].cache", "reasoning_effort"]
    names += ["chat_template_kwargs.enable_thinking", "verbosity"]
    assert chat.headers["x-baton-ignored"].split(", ") == names
    text = await port.client.completions.with_raw_response.create(
        model=MODEL, prompt="a", user="SECRET", stream=True
    )
    assert text.headers["x-baton-ignored"] == "user"
    await text.http_response.aclose()


async def test_a_template_without_tools(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("a")) as port:
        error = await refusal(port, tools=[CLOCK])
        assert error.param == "tools"


THOUGHT = "<think>\nWell </think>\n\nyes"


@pytest.mark.parametrize("port", [(THINKING, THOUGHT)], indirect=True)
async def test_reasoning(port: Port) -> None:
    got = await create(port)
    message = got.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == (
        "yes",
        "Well",
        "Well",
    )
    details = got.usage.completion_tokens_details
    assert 3 <= details.reasoning_tokens < got.usage.completion_tokens
    streamed = [chunk async for chunk in await create(port, stream=True, n=2)]
    deltas = [choice.delta for chunk in streamed for choice in chunk.choices if choice.index == 1]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Well"
    assert "".join(delta.content or "" for delta in deltas) == "yes"
    silent = await create(port, extra_body={"include_reasoning": False})
    assert "reasoning" not in (silent.choices[0].message.model_extra or {})
    assert silent.usage.completion_tokens_details.reasoning_tokens == details.reasoning_tokens
    text = await port.client.completions.create(model=MODEL, prompt="a")
    assert text.choices[0].text == THOUGHT


@pytest.mark.parametrize("port", [(THINKING, "so</think>yes")], indirect=True)
async def test_a_form_begins_behind_the_thinking(port: Port) -> None:
    wanted = {"structured_outputs": {"choice": ["yes", "no"]}}
    await create(port, extra_body=wanted)
    assert accepts(port, "yes")
    assert accepts(port, "<think>Well, no way</think>\n\nyes")
    forced = {**wanted, "chat_template_kwargs": {"forced": True}, "thinking_token_budget": 5}
    got = await create(port, extra_body=forced)
    assert got.choices[0].message.reasoning == "so"
    assert got.choices[0].message.content == "yes"
    assert accepts(port, "so</think>yes")
    assert not accepts(port, "yes")
    budget = port.job.sampling.thinking
    assert (budget.tokens, budget.begin_ids) == (5, b"")
    assert budget.end_ids == port.tokenizer.encode("</think>", False).astype("<u4").tobytes()
    await create(port, extra_body=wanted, reasoning_effort="none")
    assert accepts(port, "yes")
    assert not accepts(port, "<think></think>yes")


async def test_further_fields(port: Port) -> None:
    got = await create(
        port,
        service_tier="priority",
        extra_body={
            "allowed_token_ids": [70, 71],
            "bad_words": ["fox"],
            "cache_salt": "pepper",
            "extensions": {"quest": "512"},
            "return_token_ids": True,
            "truncate_prompt_tokens": 3,
        },
    )
    sampling = port.job.sampling
    assert list(sampling.allowed_token_ids) == [70, 71]
    words = {port.tokenizer.encode(text, False).astype("<u4").tobytes() for text in ("fox", " fox")}
    assert set(sampling.bad_words) == words
    assert port.job.prompt_tokens == 3
    assert got.prompt_token_ids == port.job.prompt_ids.tolist()
    assert got.choices[0].token_ids == port.ids('{"name": "Ann", "age": 3}')
    assert port.job.priority > 0
    assert port.job.extensions == {"quest": b"512"}
    assert got.service_tier == "priority"
    salted = port.job.cache_salt
    await create(port)
    assert salted != port.job.cache_salt
    text = await port.client.completions.create(
        model=MODEL, prompt=[[70], [71]], extra_body={"return_token_ids": True}
    )
    assert [choice.prompt_token_ids for choice in text.choices] == [[70], [71]]


async def test_special_tokens_in_the_text(tmp_path: Path) -> None:
    async with open_port(tmp_path, answers(lambda *_: [1, 70])) as port:
        for skip, text in ((True, ""), (False, port.tokenizer.token_text(1))):
            got = await create(port, extra_body={"skip_special_tokens": skip})
            assert got.choices[0].message.content == text + port.tokenizer.token_text(70)
