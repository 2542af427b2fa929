"""Tokens that go the short way of the fast door give the messages that they give on the usual one.

The usual way is run twice: at the fast door, message by message, and at gRPC's own server, whose
pace merges other tokens. Plans of events are those of the HTTP doors' test.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import frontdoor_kit
import grpc.aio
import pytest
from frontdoor_kit import ScriptedDispatcher, fast_door, grpcs_door, served_model, write_tokenizer
from http2_kit import STREAM, raw
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_short_way import TURNS, Plan
from tool_templates import THINKING
from waiting import until

from baton.inference.v1 import inference_pb2 as api
from router.doors.grpc_messages import Messages
from router.requests.tokenization import Tokenizers

Response = api.StreamGenerateResponse


class Ways:
    """A service at both doors, with and without the short way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dispatcher: ScriptedDispatcher) -> None:
        self.dispatcher = dispatcher
        self.is_short = True
        self.taken = 0
        self.stubs: list[Any] = []
        self.address = ""
        take, way = Messages.take, Messages.short_way

        def counted(messages: Messages, delta: Any) -> bool:
            self.taken += (taken := take(messages, delta))
            return taken

        def short_way(messages: Messages) -> Any:
            return way.fget(messages) if self.is_short else None  # type: ignore[attr-defined]

        monkeypatch.setattr(Messages, "take", counted)
        monkeypatch.setattr(Messages, "short_way", property(short_way))

    async def answers(self, plan: Plan, prompt: api.GenerationInput) -> list[list[Response]]:
        """Messages of the short way, of the usual one there, and of gRPC's own server."""
        found = []
        request = api.StreamGenerateRequest(input=prompt)
        for stub, self.is_short in ((0, True), (0, False), (1, False)):
            self.dispatcher.script = plan.script
            found.append([one async for one in self.stubs[stub](request, timeout=20)])
            forget_drawn(found[-1])
        return found


def forget_drawn(messages: list[Response]) -> None:
    """Leaves out what differs from run to run."""
    for message in messages:
        if message.HasField("started"):
            message.started.ClearField("generation_id")
        if message.HasField("finished"):
            message.finished.timings.ClearField("time_to_first_token")


@asynccontextmanager
async def ways_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ways]:
    tokenizer = write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(THINKING)
    model = served_model(folder, max_context_tokens=1 << 16)
    ways = Ways(monkeypatch, ScriptedDispatcher([model], Plan([]).script))
    ways.ids = lambda text: tokenizer.encode(text).ids  # type: ignore[attr-defined]
    tokenizers = Tokenizers()
    service = frontdoor_kit.InferenceService(ways.dispatcher, tokenizers)
    await tokenizers.get(model.path)
    async with AsyncExitStack() as stack:
        for open_one in (fast_door, grpcs_door):
            server, address = await open_one(service, ())
            stack.push_async_callback(server.stop, 0)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            ways.stubs.append(
                channel.unary_stream(
                    STREAM,
                    request_serializer=api.StreamGenerateRequest.SerializeToString,
                    response_deserializer=Response.FromString,
                )
            )
            ways.address = ways.address or address
        yield ways
    tokenizers.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def ways(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    stack = AsyncExitStack()
    with pytest.MonkeyPatch.context() as monkeypatch:
        served = ways_of(tmp_path_factory.mktemp("model"), monkeypatch)
        yield runner.run(stack.enter_async_context(served))
        runner.run(stack.aclose())


def whole(messages: list[Response]) -> tuple[Any, ...]:
    """What a reader has in the end, however the tokens were divided; indices have no gap."""
    ids: dict[int, list[int]] = defaultdict(list)
    parts: dict[tuple[int, str], str] = defaultdict(str)
    scores: dict[int, list[bytes]] = defaultdict(list)
    ends = []
    for message in messages:
        delta = message.delta
        choice = delta.choice_index
        if message.HasField("finished"):
            ends.append(message.finished.SerializeToString(deterministic=True))
        elif message.HasField("delta"):
            assert delta.first_token_index == len(ids[choice])
            ids[choice] += delta.token_ids
            scores[choice] += [one.SerializeToString() for one in delta.logprobs]
            parts[choice, "text"] += delta.text
            parts[choice, "content"] += delta.message.content
            parts[choice, "reasoning"] += delta.message.reasoning
    return messages[0].started, dict(ids), dict(parts), dict(scores), ends


def prompt_of(kind: str, stop: str | None) -> api.GenerationInput:
    prompt = api.GenerationInput(token_ids=api.TokenIds(ids=[70, 71]))
    if kind == "chat":
        turn = api.ChatMessage(role=api.ROLE_USER, content="Hello")
        prompt = api.GenerationInput(chat=api.ChatPrompt(messages=[turn]))
    if kind == "choices":
        prompt.choices = 2
    if kind == "scores":
        prompt.output.logprobs = True
    if stop:
        prompt.stop.sequences.append(stop)
    return prompt


def plan_of(ways: Ways, turns: list[tuple[list[Any], list[Any]]]) -> Plan:
    def ids(pieces: list[Any]) -> list[int]:
        runs = ([one] if isinstance(one, int) else ways.ids(one) for one in pieces)  # type: ignore[attr-defined]
        return [one for run in runs for one in run]

    return Plan([[ids(pieces) for pieces in turn] for turn in turns])


@pytest.mark.parametrize("kind", ["ids", "chat", "choices", "scores"])
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(turns=TURNS, stop=st.sampled_from([None, "stop", "fox j"]))
@example(turns=[(["The fox "], []), (["The fox ", "stop"], [])], stop="stop")
def test_all_ways_give_the_same_messages(
    runner: asyncio.Runner, ways: Ways, kind: str, turns: Any, stop: str | None
) -> None:
    found = runner.run(ways.answers(plan_of(ways, turns), prompt_of(kind, stop)))
    short, usual, grpcs = found
    assert short == usual
    assert whole(short) == whole(grpcs)


@pytest.mark.parametrize("kind", ["ids", "chat", "choices", "scores"])
def test_all_but_the_first_token_and_the_end_goes_the_short_way(
    runner: asyncio.Runner, ways: Ways, kind: str
) -> None:
    ids = ways.ids("<think>Hm, what now?</think>Sure, the fox jumps. 🎉 é")  # type: ignore[attr-defined]
    ways.taken = 0
    short, usual, _ = runner.run(
        ways.answers(Plan([[[one], [one]] for one in ids]), prompt_of(kind, None))
    )
    assert short == usual
    deltas = sum(one.HasField("delta") for one in short)
    assert ways.taken >= 0.9 * deltas - 2


def test_a_slow_reader_gets_all_of_it(runner: asyncio.Runner, ways: Ways) -> None:
    """Its window is full again and again, so tokens are merged, and go short once it has read."""
    ids = ways.ids("The quick brown fox jumps over the lazy dog. ") * 10  # type: ignore[attr-defined]
    plan, prompt = Plan([[[one]] for one in ids]), prompt_of("ids", None)

    async def read_slowly() -> list[Response]:
        ways.dispatcher.script, ways.is_short, ways.taken = plan.script, True, 0
        async with raw(ways.address) as client:
            client.greet(200)
            client.opens_windows = False
            stream = client.ask(api.StreamGenerateRequest(input=prompt).SerializeToString())
            answer, opened = client.answers[stream], 0
            while not answer.ended:
                assert await client.turn()
                if len(answer.data) - opened > 150 and not answer.ended:
                    await asyncio.sleep(0.003)
                    client.h2.increment_flow_control_window(len(answer.data) - opened, stream)
                    opened = len(answer.data)
                    client.flush()
        return [Response.FromString(one) for one in answer.messages]

    slow = runner.run(read_slowly())
    taken = ways.taken
    quick = runner.run(ways.answers(plan, prompt))[0]
    forget_drawn(slow)
    assert whole(slow) == whole(quick)
    assert 0 < taken < len(ids)


def test_a_client_that_leaves_ends_the_job(runner: asyncio.Runner, ways: Ways) -> None:
    async def leave() -> None:
        ways.is_short, ways.taken = True, 0
        ways.dispatcher.closed.clear()
        ways.dispatcher.script = Plan([[[70]]] * 4000).script
        call = ways.stubs[0](api.StreamGenerateRequest(input=prompt_of("ids", None)))
        await call.read()
        await until(lambda: ways.taken > 3)
        call.cancel()
        await asyncio.wait_for(ways.dispatcher.closed.wait(), 20)
        assert ways.taken < 4000

    runner.run(leave())
