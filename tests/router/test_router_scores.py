"""Log probabilities are many: they are made in turns with other work, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from frontdoor_kit import ScriptedDispatcher, open_door, served_model, write_tokenizer
from openai_kit import answers, open_port

from baton.inference.v1 import inference_pb2 as api
from router.doors import grpc_messages
from router.doors.openai.completions import CompletionForm
from router.requests import outputs

MODEL = "tiny"
TOKENS = 200


@contextmanager
def turns_of(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> Iterator[list[tuple[int, int]]]:
    """Lengths of what a function is given, each with the turn of the event loop."""
    turn, seen, writes = 0, list[tuple[int, int]](), getattr(owner, name)

    def write(tokens: Any) -> Any:
        seen.append((len(tokens), turn))
        return writes(tokens)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(owner, name, write if owner is grpc_messages else staticmethod(write))
    counting = asyncio.create_task(count())
    try:
        yield seen
    finally:
        counting.cancel()


def few_at_a_time(seen: list[tuple[int, int]], least_sum: int) -> None:
    """All were written, no more than some in a turn of the event loop."""
    assert sum(count for count, _ in seen) >= least_sum
    by_turn: dict[int, int] = {}
    for count, turn in seen:
        by_turn[turn] = by_turn.get(turn, 0) + count
    assert max(by_turn.values()) <= 64


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_of_a_prompt_are_written_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with open_port(tmp_path, answers(lambda *_: [70]), max_context_tokens=256) as port:
        asked: dict[str, Any] = {"model": MODEL, "prompt": [70 + i for i in range(TOKENS)]}
        asked |= {"echo": True, "logprobs": 2, "max_tokens": 1}
        with turns_of(monkeypatch, CompletionForm, "scores") as seen:
            if stream:
                create = port.client.completions.create
                chunks = [chunk async for chunk in await create(**asked, stream=True)]
                columns = [chunk.choices[0].logprobs for chunk in chunks]
                tokens = [one for column in columns if column for one in column.tokens or ()]
            else:
                got = await port.client.completions.create(**asked)
                assert got.choices[0].logprobs is not None
                tokens = got.choices[0].logprobs.tokens or []
        few_at_a_time(seen, TOKENS + 1)
        assert tokens == [port.tokenizer.token_text(one) for one in [*asked["prompt"], 70]]


async def test_scores_of_a_prompt_are_written_in_turns_over_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    model = served_model(tmp_path, max_context_tokens=256)
    dispatcher = ScriptedDispatcher([model], answers(lambda *_: [70]))
    output = api.OutputOptions(logprobs=True, top_logprobs=2, prompt_logprobs=True)
    ids = api.TokenIds(ids=[70 + i for i in range(TOKENS)])
    asked = api.GenerationInput(token_ids=ids, output=output, stop=api.StopOptions(max_tokens=1))
    async with open_door(dispatcher) as door:
        with turns_of(monkeypatch, grpc_messages, "_logprobs") as seen:
            got = await door.stub.Generate(api.GenerateRequest(input=asked), timeout=20)
    few_at_a_time(seen, TOKENS)
    assert len(got.started.prompt_logprobs) == TOKENS
    assert got.started.prompt_logprobs[-1].top[0].token_id == 70 + TOKENS - 1


@pytest.mark.parametrize(
    ("asked", "is_held"),
    [
        ({"prompt": "a", "n": 2, "max_tokens": 25, "logprobs": 1}, 100),
        ({"prompt": "a", "n": 2, "max_tokens": 26, "logprobs": 1}, 104),
        ({"prompt": "a", "n": 2, "max_tokens": 26, "logprobs": 1, "stream": True}, 0),
        ({"prompt": "a", "n": 2, "max_tokens": 99}, 0),
        ({"prompt": [[70] * 24] * 2, "max_tokens": 1, "logprobs": 1, "echo": True}, 100),
        ({"prompt": [[70] * 25] * 2, "max_tokens": 1, "logprobs": 1, "echo": True}, 104),
        ({"prompt": [70] * 51, "logprobs": 1, "echo": True, "stream": True}, 102),
    ],
)
async def test_an_answer_holds_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], is_held: int
) -> None:
    """Of all prompts and choices together."""
    monkeypatch.setattr(outputs, "MOST_SCORES", 100)
    async with open_port(tmp_path, answers(lambda *_: [70])) as port:
        if is_held <= 100:
            await port.client.completions.create(model=MODEL, **asked)
            return
        with pytest.raises(openai.BadRequestError) as caught:
            await port.client.completions.create(model=MODEL, **asked)
        assert caught.value.param == "logprobs"


async def test_an_answer_of_no_stated_length_ends_where_it_holds_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is not refused for output that its client did not ask for."""
    monkeypatch.setattr(outputs, "MOST_SCORES", 100)
    async with open_port(tmp_path, answers(lambda *_: [70] * 200)) as port:
        asked: dict[str, Any] = {"n": 2, "logprobs": True, "top_logprobs": 4}
        messages = [{"role": "user", "content": "a"}]
        await port.client.chat.completions.create(model=MODEL, messages=messages, **asked)
        (job,) = port.dispatcher.jobs
    assert job.stopping.max_tokens == 100 // (2 * 5)
