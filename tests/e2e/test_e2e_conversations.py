"""Conversations over /v1/responses are those of chats, whichever way and router a turn takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Cluster, running
from openai import OpenAI
from tiny_models import write_tiny_model
from tool_templates import HERMES

from telemetry.names import Metric

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "seven",
    "grey",
    "stones",
)
CALL = {"name": "look", "arguments": '{"city": "Paris"}'}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("conversations")
    (template := folder / "tools.jinja").write_text(HERMES)
    own = {"chat_template": template, "responses_folder": folder / "kept"}
    with running(
        write_tiny_model(folder / "model", max_positions=4096),
        folder / "logs",
        routers=2,
        own={"router-0": own, "router-1": own},
    ) as cluster:
        yield cluster
        cluster.check_baseline()


@pytest.mark.parametrize("conversations", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_responses_are_the_turns_of_chats(cluster: Cluster, conversations: int) -> None:
    draw, url = random.Random(conversations), f"http://{cluster.plan.http_address}/v1"
    cached = sum(converse(url, draw) for _ in range(conversations))
    assert cached > 0, "chains hit the prefix cache"
    path, method = f"{Metric.REQUESTS_BY_METHOD}_total", "POST /v1/responses"
    assert all(cluster.metric(path, name, method=method) for name in cluster.routers)


def converse(url: str, draw: random.Random) -> int:
    """A random conversation. Every turn is checked against a chat of the same turns. Returns the
    cached tokens of turns that went on from a stored response."""
    turns: list[dict[str, Any]] = []
    items: list[Any] = []
    last, cached = None, 0
    for _ in range(draw.randint(2, 4)):
        new_turns, new_items = asked(draw)
        turns, items = turns + new_turns, items + new_items
        how: dict[str, Any] = {"input": items, "store": draw.choice((True, False, None))}
        if last is not None and draw.random() < 0.6:
            how |= {"input": new_items, "previous_response_id": last.id}
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:  # at either router
            before, last = last, respond(client, draw, **how)
            chat = client.chat.completions.create(
                model="", messages=turns, temperature=0, max_completion_tokens=8
            )
        said = chat.choices[0].message.content
        assert last.output_text == said
        assert last.usage.input_tokens == chat.usage.prompt_tokens
        if "previous_response_id" in how:
            cached += last.usage.input_tokens_details.cached_tokens
            assert last.previous_response_id == before.id
        turns.append({"role": "assistant", "content": said})
        items += last.output
        last = last if last.store else None
    return cached


def respond(client: OpenAI, draw: random.Random, **how: Any) -> Any:
    fields = {"model": "", "temperature": 0, "max_output_tokens": 8, **how}
    fields = {name: value for name, value in fields.items() if value is not None}
    if draw.random() < 0.5:
        return client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        *_, ended = stream
    return ended.response


def asked(draw: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What a client says next, as turns of a chat and as items: at times a call with its result."""
    text = " ".join(draw.choices(WORDS, k=draw.randint(4, 24)))
    user = {"role": "user", "content": text}
    if draw.random() < 0.7:
        return [user], [user]
    call_id = f"call_{draw.randrange(1 << 30)}"
    called = {"id": call_id, "type": "function", "function": CALL}
    turns = [
        user,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call_id, "content": text[::-1]},
    ]
    items = [
        user,
        {"type": "function_call", "call_id": call_id, **CALL},
        {"type": "function_call_output", "call_id": call_id, "output": text[::-1]},
    ]
    return turns, items
