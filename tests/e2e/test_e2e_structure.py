"""Structured output, tools and reasoning through real processes: random weights, which say anything
that they may, with the demo model's tokenizer and a chat template that gives tools and shows
thinking."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from cluster import Cluster, running
from node_kit import run_program
from pydantic import BaseModel, ConfigDict, Field
from tiny_models import write_tiny_model
from tool_templates import THINKING

from baton.client.clients import Client

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
MODEL_NAME = "formed"
WILD = {"temperature": 1.3, "seed": 4, "max_tokens": 96}
PLAIN = {"reasoning_effort": "none"}
"""Without thinking."""


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


@pytest.fixture(scope="module")
def cluster(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(THINKING)
    model = write_tiny_model(
        tmp_path_factory.mktemp("model") / MODEL_NAME, vocab=49152, tokenizer=False
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo_model / name, model)
    with running(
        model,
        tmp_path_factory.mktemp("logs"),
        own={"router": {"chat_template": template}},
        max_step_tokens=512,
    ) as cluster:
        yield cluster
        cluster.check_baseline()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def theirs(cluster: Cluster) -> openai.OpenAI:
    url = f"http://{cluster.plan.http_address}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_the_official_client_parses_what_it_asked_for(theirs: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL_NAME, "messages": QUESTION, **WILD}
    asked["extra_body"] = PLAIN
    parsed = theirs.chat.completions.parse(**asked, response_format=Person)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    with theirs.chat.completions.stream(**asked, response_format=Person) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == parsed.choices[0].message.parsed


def test_the_official_client_calls_tools(theirs: openai.OpenAI) -> None:
    plain = {**PLAIN, "min_tokens": 8}
    asked: dict[str, Any] = {"model": MODEL_NAME, "extra_body": plain, **WILD}
    asked["tools"] = [{"type": "function", "function": WEATHER}]
    got = theirs.chat.completions.create(
        **asked, messages=QUESTION, tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    assert got.finish_reason == "tool_calls"
    (call,) = got.message.tool_calls or ()
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["parameters"])
    with theirs.chat.completions.stream(
        **asked, messages=QUESTION, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        for _ in stream:
            pass
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    turns = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
    ]
    after = theirs.chat.completions.create(**asked, messages=turns, tool_choice="none")
    assert after.choices[0].message.content


FORMS: list[dict[str, Any]] = [
    {"json_schema": Person.model_json_schema(), "strict": True},
    {"json_object": True},
    {"regex": r"[a-f]{4,8}-\d{2}"},
    {"choice": ["rain", "sun"]},
    {"lark": 'start: "wet" | "dry" " " /[a-z]{3}/'},
    {"gbnf": 'root ::= "x" [0-9] [0-9]'},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_our_client_asks_for_any_form(client: Client, form: dict[str, Any]) -> None:
    whole = client.generate(messages=QUESTION, **WILD, **PLAIN, **form, choices=2)
    with client.stream(messages=QUESTION, **WILD, **PLAIN, **form, choices=2) as stream:
        deltas = list(stream)
    assert stream.result.choices == whole.choices, "it depends on the seed alone"
    joined = "".join(delta.text for delta in deltas if delta.choice == 1)
    assert joined == whole.choices[1].text
    if "json_schema" in form:
        assert all(Person.model_validate_json(choice.text) for choice in whole.choices)
    raw = client.generate("The weather is", **WILD, **form)
    assert raw.text


def test_a_client_in_node_from_the_protos_alone(cluster: Cluster) -> None:
    said = run_program("forms.mjs", cluster.plan.router_address)
    assert set(said["formed"]) == set(said["called"]) == {"city"}
    assert (said["finish"], said["name"]) == ("FINISH_REASON_TOOL_CALLS", "get_weather")
    assert said["same"]


def test_thinking_is_bounded_and_the_form_begins_behind_it(client: Client) -> None:
    got = client.generate(
        messages=QUESTION,
        template_variables={"forced": True},
        thinking_token_budget=12,
        choice=["rain", "sun"],
        message=True,
        **WILD,
    )
    (choice,) = got.choices
    assert choice.text in ("rain", "sun")
    assert choice.reasoning
    assert 1 <= got.usage.reasoning_tokens <= 16
    free = client.generate(
        messages=QUESTION,
        template_variables={"forced": True},
        message=True,
        min_tokens=30,
        **WILD,
    )
    assert free.usage.reasoning_tokens > 16
