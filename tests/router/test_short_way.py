"""Tokens that go the short way give the bytes that they give on the usual one, in every API.

Both are run from the same events: what a worker sends in a turn, where the turns are, and when the
client reads. A failed worker and its follower are one run of events here (`JobRun` merges them).
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from openai_kit import Port, open_port, says, score
from tool_templates import THINKING

from baton.worker.v1 import worker_pb2
from router.doors.straight import NUMBER, Straight, Template
from router.jobs import ChoiceEnded, Job, JobEvent, JobFinished, JobStarted, JobTokens

HELLO = [{"role": "user", "content": "Hello"}]
TURNS_OF_THE_LOOP = 30
"""More than the usual way of a token takes."""
APIS = {
    "completions": ("/v1/completions", {"prompt": [1, 2, 3]}),
    "chats": ("/v1/chat/completions", {"messages": HELLO}),
    "responses": ("/v1/responses", {"input": "Hello"}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 99}),
}
DRAWN = re.compile(rb'("(?:id|item_id)": ?"\w+?[_-])\w+|("(?:created\w*|completed_at)": ?)\d+')
TEXTS = [
    "The fox ",
    "é🎉",
    "<think>",
    "</think>",
    "\n",
    '"\\',
    "\x01",
    " jumps",
    "stop",
    "日本",
    "\u2028\x85",
]


@dataclass
class Plan:
    """Ids of a turn, for each choice; and whether the loop turns before the next."""

    turns: list[list[list[int]]]

    async def script(self, job: Job) -> AsyncGenerator[JobEvent, None]:
        counts = [0] * job.choices
        yield JobStarted(cached_prompt_tokens=1)
        for turn in self.turns:
            for choice, ids in enumerate(turn[: job.choices]):
                if ids:
                    wanted = job.sampling.HasField("top_logprobs")
                    scores = tuple(score(job, one) for one in ids) if wanted else ()
                    yield JobTokens(choice, counts[choice], tuple(ids), scores)
                    counts[choice] += len(ids)
            for _ in range(TURNS_OF_THE_LOOP):
                await asyncio.sleep(0)
        for choice, count in enumerate(counts):
            yield ChoiceEnded(choice, worker_pb2.END_REASON_LENGTH, count)
        yield JobFinished(cached_prompt_tokens=1)


class Both:
    """A served API, each request of which is answered on both ways."""

    def __init__(self, port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = port
        self.written = 0
        self.is_open = True
        write, is_free = Straight.write, Straight.is_free

        def counted(straight: Straight, event: bytes, now_s: float) -> None:
            self.written += 1
            write(straight, event, now_s)

        monkeypatch.setattr(Straight, "write", counted)
        monkeypatch.setattr(Straight, "is_free", lambda one: self.is_open and is_free(one))

    async def answers(self, api: str, plan: Plan, **fields: Any) -> tuple[bytes, bytes]:
        """The bodies, the short way's first."""
        found = []
        for self.is_open in (True, False):
            self.port.dispatcher.script = plan.script
            reader, writer = await self.ask(api, **fields)
            head, _, chunks = (await reader.read()).partition(b"\r\n\r\n")
            assert b" 200 " in head, chunks
            writer.close()
            found.append(DRAWN.sub(rb"\1\2", unchunked(chunks)))
        return found[0], found[1]

    async def ask(
        self, api: str, buffer: int = 0, **fields: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends a request for a stream. `buffer`: bytes that the client's system takes unread."""
        path, body = APIS[api]
        content = json.dumps({"model": "tiny", "stream": True, **body, **fields}).encode()
        client = socket.socket()
        if buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.connect(self.port.address)
        reader, writer = await asyncio.open_connection(sock=client, limit=max(buffer, 1 << 10))
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += "content-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        return reader, writer


def unchunked(data: bytes) -> bytes:
    """A body out of its chunks, whose frames must be whole."""
    parts, rest = [], data
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        assert rest[count : count + 2] == b"\r\n"
        parts, rest = [*parts, rest[:count]], rest[count + 2 :]
    assert parts.pop() == b"", "the answer has no end"
    return b"".join(parts)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def both(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "chat_template.jinja").write_text(THINKING)
    stack = AsyncExitStack()
    with pytest.MonkeyPatch.context() as monkeypatch:
        served = open_port(folder, Plan([]).script, max_context_tokens=2048)
        yield Both(runner.run(stack.enter_async_context(served)), monkeypatch)
        runner.run(stack.aclose())


def ids_of(both: Both, text: str) -> list[int]:
    return both.port.ids(text)


PIECES = st.lists(st.one_of(st.sampled_from(TEXTS), st.integers(0, 399)), max_size=3)
TURNS = st.lists(st.tuples(PIECES, PIECES), min_size=2, max_size=12)


def plan_of(both: Both, turns: list[tuple[list[Any], list[Any]]]) -> Plan:
    def ids(pieces: list[Any]) -> list[int]:
        runs = ([one] if isinstance(one, int) else ids_of(both, one) for one in pieces)
        return [one for run in runs for one in run]

    return Plan([[ids(pieces) for pieces in turn] for turn in turns])


@pytest.mark.parametrize("api", APIS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(turns=TURNS, stop=st.sampled_from([None, "stop", "fox j"]), wide=st.booleans())
@example(turns=[(["The fox "], []), (["The fox ", "stop"], [])], stop="stop", wide=False)
def test_both_ways_give_the_same_bytes(
    runner: asyncio.Runner, both: Both, api: str, turns: Any, stop: str | None, wide: bool
) -> None:
    fields: dict[str, Any] = {}
    if stop is not None and api != "responses":
        fields["stop_sequences" if api == "messages" else "stop"] = [stop]
    if wide and api in ("completions", "chats"):
        fields |= {"n": 2, "stream_options": {"include_usage": True}}
    short, usual = runner.run(both.answers(api, plan_of(both, turns), **fields))
    assert short == usual


@pytest.mark.parametrize("api", APIS)
def test_all_but_the_ends_of_a_text_goes_the_short_way(
    runner: asyncio.Runner, both: Both, api: str
) -> None:
    ids = ids_of(both, "<think>Hm, what now?</think>Sure, the fox jumps. 🎉 é")
    both.written = 0
    short, usual = runner.run(both.answers(api, Plan([[[one]] for one in ids])))
    assert short == usual
    events = usual.count(b"data: ")
    assert both.written >= 0.6 * events


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 1},
        {"return_token_ids": True},
        {"prompt": [[1, 2], [3]]},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_needs_more_than_text_goes_the_usual_way(
    runner: asyncio.Runner, both: Both, fields: dict[str, Any]
) -> None:
    both.written = 0
    ids = ids_of(both, "The quick brown fox")
    runner.run(both.answers("completions", Plan([[[one]] for one in ids]), **fields))
    assert both.written == 0


@pytest.mark.parametrize("api", APIS)
def test_a_slow_reader_gets_all_of_it(runner: asyncio.Runner, both: Both, api: str) -> None:
    """Its connection is full, so what follows is merged, and goes short again once it reads."""
    words = ids_of(both, "The quick brown fox jumps over the lazy dog. ") * 30
    plan = Plan([[[one]] for one in words])

    async def read_slowly() -> bytes:
        both.port.dispatcher.script = plan.script
        reader, writer = await both.ask(api, buffer=2048)
        found = [await reader.read(256)]
        for _ in range(40):
            await asyncio.sleep(0.002)
            found.append(await reader.read(256))
        found.append(await reader.read())
        writer.close()
        return unchunked(b"".join(found).partition(b"\r\n\r\n")[2])

    both.is_open, both.written = True, 0
    events = [json.loads(one) for one in re.findall(rb"data: (\{.*\})", runner.run(read_slowly()))]
    assert "".join(map(text_of_event, events)).count("fox") == 30
    assert both.written


def text_of_event(event: dict[str, Any]) -> str:
    if "choices" in event:
        choice = event["choices"][0]
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    delta = event.get("delta", "")
    if event["type"] not in ("response.output_text.delta", "content_block_delta"):
        return ""
    return str(delta["text"] if isinstance(delta, dict) else delta)


async def test_a_client_that_leaves_ends_the_job(tmp_path: Path) -> None:
    ids = [70] * 4000
    async with open_port(tmp_path, Plan([[[one]] for one in ids]).script) as port:
        with pytest.MonkeyPatch.context() as monkeypatch:
            both = Both(port, monkeypatch)
            reader, writer = await both.ask("completions")
            await reader.readuntil(b"data: ")
            while both.written < 3:
                await asyncio.sleep(0.001)
            writer.close()
            await asyncio.wait_for(port.dispatcher.closed.wait(), 20)
            assert both.written < len(ids)


def text_in(event: Any) -> str:
    """What an event of any API adds to the text."""
    delta = event.get("delta") or (event.get("choices") or [{}])[0]
    if isinstance(delta, str):
        return delta
    delta = delta.get("delta", delta)
    return str(delta.get("content") or delta.get("text") or "")


@pytest.mark.parametrize("api", APIS)
async def test_an_event_is_one_line_for_all_who_split_lines(tmp_path: Path, api: str) -> None:
    """httpx divides lines as `str.splitlines` does, at characters that are no ends in JSON."""
    text, (path, body) = "a\u2028b\u2029c\x85d", APIS[api]
    async with open_port(tmp_path, says(text)) as port:
        url, client = f"http://{port.server.address}{path}", port.client._client
        async with client.stream("POST", url, json={**body, "stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line[:6] == "data: "]
    events = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    assert "".join(map(text_in, events)) == text


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 1 << 40))
@example("\x85é\u2028\\\u2029", 0)
def test_a_template_writes_what_the_encoder_writes(text: str, number: int) -> None:
    from router.doors.straight import MARK
    from router.one_line import json_line

    def event(text: str, number: int) -> bytes:
        return json_line({"n": number, "choices": [{"text": text, "again": text}], "id": None})

    written = Template(event(MARK, NUMBER)).event(text, number)
    assert written == event(text, number)
    assert len(written.decode().splitlines()) == 1
    assert json.loads(written)["choices"] == [{"text": text, "again": text}]
