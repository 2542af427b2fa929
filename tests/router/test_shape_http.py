"""What the body of an HTTP request may look like before anything is made of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from frontdoor_kit import served_model
from openai_kit import Port, open_port, says
from waiting import until

from router.doors.auth import TokenGate
from router.doors.http.bodies import Bodies
from router.doors.openai.schema import CompletionRequest
from router.doors.openai.turns import ChatRequest, ChatTurn
from router.errors import RouterError
from router.requests.bounds import LEAST_ELEMENTS, MAX_TEMPLATE_VALUES, MAX_TURNS, BodyShape

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SOON_S = 1.0
"""CPU time for a refusal, of the client here and of the router, which are one process: what was
parsed and walked took seconds."""
HALF_MIB = 1 << 19
TO_POST = "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
HEAD = f"{TO_POST.format(COMPLETIONS)}\r\n"


class Answer(NamedTuple):
    """What came back."""

    status: int
    body: Any
    cpu_s: float

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with open_port(tmp_path, says("a")) as port:
        yield port


async def post(port: Port, body: bytes, path: str = COMPLETIONS, *headers: str) -> Answer:
    began_s = time.process_time()
    reader, writer = await asyncio.open_connection(*port.address)
    lines = [TO_POST.format(path), f"content-length: {len(body)}", *headers, "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    answer = json.loads(await reader.readexactly(size))
    writer.close()
    return Answer(int(head.split(b" ")[1]), answer, time.process_time() - began_s)


TURN = b'{"role":"user","content":""}'
WIDE = {
    "lists in a field that is ignored": (COMPLETIONS, b'"prompt":"a","x":[' + b"[]," * 100_000),
    "objects": (COMPLETIONS, b'"prompt":"a","x":[' + b"{}," * 100_000),
    "keys": (COMPLETIONS, b'"prompt":"a","x":["",{' + b'"":1,' * 100_000 + b'"":1},'),
    "wrong turns": (CHAT, b'"messages":[' + b"{}," * 100_000),
}


@pytest.mark.parametrize("name", WIDE)
async def test_a_wide_body_is_refused_before_it_is_parsed(port: Port, name: str) -> None:
    path, inside = WIDE[name]
    answer = await post(port, b"{" + inside + b"1]}", path)
    assert (answer.status, answer.code) == (400, "malformed_request")
    assert "more than" in answer.message
    assert answer.cpu_s < SOON_S


def test_commas_are_counted_too() -> None:
    shape = BodyShape(lambda: [served_model("/m", max_context_tokens=100_000)])
    shape.check_json(b"1," * 800_000)
    with pytest.raises(RouterError, match="commas"):
        shape.check_json(b"1," * 800_001)


async def test_a_large_body_is_refused_by_what_it_announces(port: Port) -> None:
    """Nothing of it is read: none of it is sent here."""
    reader, writer = await asyncio.open_connection(*port.address)
    head = f"{HEAD}content-length: {1 << 30}\r\n\r\n"
    writer.write(head.encode())
    assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_a_large_body_in_chunks_is_refused_at_the_bound(port: Port) -> None:
    reader, writer = await asyncio.open_connection(*port.address)
    head = f"{HEAD}transfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    for _ in range(3):
        writer.write(b"%x\r\n" % HALF_MIB + b" " * HALF_MIB + b"\r\n")
    assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 400 ")
    writer.close()


LONG = {
    "messages": (CHAT, {"messages": [{}] * (MAX_TURNS + 1)}),
    "stop": (COMPLETIONS, {"prompt": "a", "stop": [1] * 1000}),
    "stop_token_ids": (COMPLETIONS, {"prompt": "a", "stop_token_ids": ["a"] * 5000}),
    "logit_bias": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {f"x{one}": "a" for one in range(5000)}},
    ),
    "prompt": (COMPLETIONS, {"prompt": [1] * (LEAST_ELEMENTS + 1)}),
    "messages[0].content": (CHAT, {"messages": [{"role": "user", "content": [{}] * 5000}]}),
    "chat_template_kwargs": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "a"}],
            "chat_template_kwargs": {"a": [[]] * MAX_TEMPLATE_VALUES},
        },
    ),
}


@pytest.mark.parametrize("name", LONG)
async def test_too_long_a_list_is_refused_for_its_length_alone(port: Port, name: str) -> None:
    """What is wrong with its elements is not looked for."""
    path, request = LONG[name]
    answer = await post(port, json.dumps(request).encode(), path)
    assert (answer.status, answer.code) == (400, "invalid_field")
    assert answer.message.startswith(f"{name}: ")
    assert "at most" in answer.message
    assert ";" not in answer.message
    assert answer.cpu_s < SOON_S


async def test_errors_are_few_and_their_names_are_short(port: Port) -> None:
    bias = {f"{one}{'k' * 5000}": 1 for one in range(64)}
    answer = await post(port, json.dumps({"prompt": "a", "logit_bias": bias}).encode())
    assert answer.message.count(";") == 31
    assert len(answer.message) < 32 * 300


def test_values_of_unknown_fields_are_not_kept() -> None:
    body = {"prompt": "a", "x": [1], "stop_regex": {"y": [1]}, "suffix": ""}
    request = CompletionRequest.model_validate_json(json.dumps(body), context={"most_ids": 9})
    assert request.model_extra == {"x": True}
    assert request.stop_regex is True
    assert request.suffix is False
    assert [one.field for one in request.refused()] == ["stop_regex"]
    turn = {"role": "user", "content": "a", "name": "b", "audio": {"id": "c"}, "y": {"z": 1}}
    chat = ChatRequest.model_validate({"messages": [turn], "moderation": [{"x": 1}]})
    assert chat.messages[0].model_extra == {"y": True}
    assert [one.field for one in chat.refused()] == ["moderation", "messages[0].audio"]
    assert ChatTurn.unsupported == {"audio", "function_call"}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of all bodies, after every change."""
    counts: list[int] = []
    hold = Bodies.hold

    def watched(bodies: Bodies, size_bytes: int) -> None:
        hold(bodies, size_bytes)
        counts.append(bodies._held_bytes)

    monkeypatch.setattr(Bodies, "hold", watched)
    return counts


async def test_all_bodies_together_are_bounded(
    port: Port, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.doors.http.bodies.MOST_HELD_BODY_BYTES", 300_000)
    _, held = await asyncio.open_connection(*port.address)
    head = f"{HEAD}content-length: 250000\r\n\r\n"
    held.write(head.encode() + b" " * 249_999)
    await until(lambda: counts and counts[-1] == 249_999)
    body = b'{"prompt": "a", "max_tokens": 1}'
    answer = await post(port, body + b" " * 60_000)
    assert (answer.status, answer.code) == (429, "router_busy")
    assert (await post(port, body)).status == 200
    held.close()
    await until(lambda: counts[-1] == 0)
    assert (await post(port, body + b" " * 60_000)).status == 200


async def test_a_body_counts_no_longer_than_it_is_read(port: Port, counts: list[int]) -> None:
    assert (await post(port, b'{"prompt": "a", "max_tokens": 1}')).status == 200
    assert (await post(port, b"{" + b"[]," * 100_000)).status == 400
    assert max(counts) > 300_000
    assert counts[-1] == 0


async def test_a_caller_without_a_token_is_answered_before_its_body_comes(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('"sk-good" = "acme"\n')
    async with open_port(tmp_path, says("a"), gate=TokenGate(tokens)) as port:
        reader, writer = await asyncio.open_connection(*port.address)
        head = f"{HEAD}content-length: 99\r\n\r\n"
        writer.write(head.encode())
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 401 ")
        writer.close()
