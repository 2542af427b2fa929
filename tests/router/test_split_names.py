"""Names that stand for several models: shares, conversations, models that leave, bad input."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from frontdoor_kit import ScriptedDispatcher, plays
from openai_kit import Port, open_port, says

from baton.inference.v1 import inference_pb2 as api
from router.doors.auth import NOBODY
from router.jobs import ServedModel
from router.requests.validation import Limits
from router.settings import RouterSettings
from router.split_names import SplitNames, SplitNamesError
from router.visible import Visible

MODELS = [ServedModel(name, "r", "/m", 100, 1000, (), 16) for name in ("a", "b", "c")]


def visible(there: list[ServedModel]) -> Visible:
    return Visible(ScriptedDispatcher(there, plays()), NOBODY)


def chosen(names: SplitNames, count: int = 2000, served: str = "abc") -> list[str]:
    there = [model for model in MODELS if model.name in served]
    texts = (api.GenerationInput(model="chat", text=f"text {n}") for n in range(count))
    return [names.model_for(one, "t", visible(there)) for one in texts]


def test_shares_are_the_weights_and_a_model_that_leaves_moves_nobody_elses() -> None:
    names = SplitNames(["chat=a:90+b:10", "x=c:1"])
    every = chosen(names)
    assert Counter(every)["b"] / len(every) == pytest.approx(0.1, abs=0.02)
    assert set(chosen(names, served="ac")) == {"a"}
    three = SplitNames(["chat=a:2+b:1+c:1"])
    before, after = chosen(three), chosen(three, served="ab")
    assert all(new == old for new, old in zip(after, before, strict=True) if old != "c")
    assert {new for new, old in zip(after, before, strict=True) if old == "c"} == {"a", "b"}


def test_a_conversation_is_known_by_its_first_turn_and_its_tenant() -> None:
    names = SplitNames(["chat=a:1+b:1"])
    turns = [
        api.ChatMessage(role=role, content=text)
        for role, text in ((1, "Be brief."), (2, "One"), (3, "Two"), (2, "Three"))
    ]
    assert [turn.role for turn in turns][1] == api.ROLE_USER

    def models(first: str, tenant: str = "t") -> list[str]:
        turns[1].content = first
        chats = [api.ChatPrompt(messages=turns[:count]) for count in (2, 4)]
        asked = [api.GenerationInput(model="chat", chat=chat) for chat in chats]
        return [names.model_for(one, tenant, visible(MODELS)) for one in asked]

    found = [models(f"One {n}") for n in range(40)]
    assert all(first == later for first, later in found)
    assert {first for first, _ in found} == {"a", "b"}
    assert [models(f"One {n}", "u") for n in range(40)] != found


@pytest.mark.parametrize(
    "stated",
    [
        *("chat", "=a:1", "chat=", "chat=a", "chat=a:0", "chat=a:-1", "chat=a:nan", "chat=a:inf"),
        *("chat=:1", "chat=a:1+a:2", "chat=chat:1+a:1"),
    ],
)
def test_what_is_no_split_is_refused_at_the_start(stated: str) -> None:
    with pytest.raises(SplitNamesError):
        SplitNames([stated])
    with pytest.raises(ValueError, match="split_names"):
        RouterSettings(split_names=(stated,))


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    limits = Limits(split_names=SplitNames(["chat=a:1+b:1", "gone=z:1"]))
    async with open_port(tmp_path, says("The fox"), limits=limits) as port:
        (tiny,) = port.dispatcher.served
        port.dispatcher.served = [replace(tiny, name=name) for name in ("a", "b")]
        yield port


async def test_whoever_may_generate_may_tokenize(port: Port) -> None:
    """Over HTTP, too: /tokenize took the name, and then said that there is none."""
    client, base = port.client, f"http://{port.server.address}"
    ids = port.ids("The fox")
    body = {"model": "chat", "prompt": "The fox"}
    told: Any = await client.post(f"{base}/tokenize", body=body, cast_to=object)
    assert (told["tokens"], told["max_model_len"]) == (ids, 256)
    body = {"model": "chat", "tokens": ids}
    told = await client.post(f"{base}/detokenize", body=body, cast_to=object)
    assert told["prompt"] == "The fox"
    told = await client.get(f"{base}/tokenizer_info?model=chat", cast_to=object)
    assert told["eos_token"] == "<|im_end|>"


async def test_answers_say_which_model_served(port: Port) -> None:
    seen = set()
    for number in range(12):
        prompts = [f"text {number}", "another"]
        got = await port.client.completions.create(model="chat", prompt=prompts, logprobs=1)
        jobs = {job.model.name for job in port.dispatcher.jobs[-2:]}
        assert jobs == {got.model}, "prompts of a call go together"
        turns = [{"role": "user", "content": f"text {number}"}]
        chat = await port.client.chat.completions.create(
            model="chat", messages=turns, logprobs=True, top_logprobs=1
        )
        assert chat.model == port.job.model.name
        seen.add((got.model, chat.model))
    assert {one for one, _ in seen} == {other for _, other in seen} == {"a", "b"}
    listed = [one.id async for one in port.client.models.list()]
    assert listed == ["a", "b", "chat"]
    assert (await port.client.models.retrieve("chat")).id == "chat"
    with pytest.raises(Exception, match="z"):
        await port.client.completions.create(model="gone", prompt="x")
