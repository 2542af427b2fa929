"""What a gRPC request may look like before anything is made of it: its bytes, fields and lists."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from frontdoor_kit import (
    Door,
    Refusal,
    ScriptedDispatcher,
    ids_input,
    open_door,
    plays,
    refusal,
    served_model,
    write_tokenizer,
)

from baton.inference.v1 import inference_pb2 as api
from router.doors.auth import TokenGate
from router.requests.bounds import (
    LEAST_ELEMENTS,
    LEAST_REQUEST_BYTES,
    MAX_TURNS,
    MOST_FIELDS,
    MOST_REQUEST_BYTES,
    BodyShape,
)
from router.requests.validation import MAX_LOGIT_BIASES, MAX_STOP_TOKENS
from router.requests.wire_shape import count_fields

GENERATE = "/baton.inference.v1.InferenceService/Generate"
SOON_S = 1.0
"""Of the CPU, for a refusal: what was parsed and walked took seconds."""


def wire(number: int, data: bytes) -> bytes:
    """A field of bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


TURN = wire(1, b"\x08\x02")
WIDE = {
    "empty turns": wire(1, wire(4, wire(1, b"") * 500_000)),
    "turns": wire(1, wire(4, TURN * 200_000)),
    "stops": wire(1, wire(2, b"a") + wire(6, wire(3, b"") * 400_000)),
    "unknown fields": wire(1, wire(2, b"a")) + wire(999, b"") * 300_000,
    "template variables": wire(1, wire(4, TURN + wire(2, wire(1, b"") * 400_000))),
}


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    write_tokenizer(tmp_path)
    dispatcher = ScriptedDispatcher([served_model(tmp_path)], plays([70]))
    async with open_door(dispatcher) as door:
        yield door


async def refused(door: Door, data: bytes, **options: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await door.channel.unary_unary(GENERATE)(data, timeout=20, **options)
    return caught.value


async def details_of(door: Door, data: bytes) -> Refusal:
    return refusal(await refused(door, data))


@pytest.mark.parametrize("name", WIDE)
async def test_a_message_of_many_fields_is_refused_before_it_is_parsed(
    door: Door, name: str
) -> None:
    began_s = time.thread_time()  # of the event loop, where messages are read
    found = await details_of(door, WIDE[name])
    assert time.thread_time() - began_s < SOON_S
    assert found.info.reason == "MALFORMED_REQUEST"
    assert f"{MOST_FIELDS} fields" in found.message


async def test_a_message_beyond_any_prompt_is_refused(door: Door) -> None:
    found = await details_of(door, wire(1, wire(2, b"a" * LEAST_REQUEST_BYTES)))
    assert found.info.reason == "MALFORMED_REQUEST"
    assert f"{LEAST_REQUEST_BYTES} bytes" in found.message


async def test_grpc_itself_reads_no_further_than_a_bound(door: Door) -> None:
    error = await refused(door, wire(1, wire(2, b"a" * MOST_REQUEST_BYTES)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_compressed_messages_are_not_taken(door: Door) -> None:
    data = wire(1, wire(2, b"a" * 1000))
    error = await refused(door, data, compression=grpc.Compression.Gzip)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    await door.stub.Generate(api.GenerateRequest(input=ids_input()), timeout=20)


def many_turns(generation: api.GenerationInput) -> None:
    generation.chat.messages.extend([api.ChatMessage()] * (MAX_TURNS + 1))


def many_biases(generation: api.GenerationInput) -> None:
    generation.text = "a"
    for token_id in range(MAX_LOGIT_BIASES + 1):
        generation.sampling.logit_bias[token_id + 1000] = 1000.0


def many_stop_ids(generation: api.GenerationInput) -> None:
    generation.text = "a"
    generation.stop.token_ids.extend([1000] * (MAX_STOP_TOKENS + 1))


@pytest.mark.parametrize(
    ("fill", "field"),
    [
        (many_turns, "input.chat.messages"),
        (many_biases, "input.sampling.logit_bias"),
        (many_stop_ids, "input.stop.token_ids"),
    ],
)
async def test_too_long_a_list_is_refused_for_its_length_alone(
    door: Door, fill: Callable[[api.GenerationInput], None], field: str
) -> None:
    """What is wrong with its elements is not looked for."""
    request = api.GenerateRequest()
    fill(request.input)
    found = await details_of(door, request.SerializeToString())
    assert found.fields == [field]


async def test_more_ids_than_the_context_has_room_for_are_only_counted(door: Door) -> None:
    """Ids outside the vocabulary, among them: nobody looks."""
    request = api.GenerateRequest(input=ids_input(*[1_000_000] * 10_000))
    found = await details_of(door, request.SerializeToString())
    assert found.info.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert found.info.metadata["prompt_tokens"] == "10000"


async def test_a_caller_without_a_token_is_answered_before_its_message_comes(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('"sk-good" = "acme"\n')
    dispatcher = ScriptedDispatcher([served_model(tmp_path)], plays([70]))
    async with open_door(dispatcher, gate=TokenGate(tokens)) as door:
        call = door.channel.stream_stream(GENERATE)()  # Its headers, and no message.
        assert await asyncio.wait_for(call.code(), 10) is grpc.StatusCode.UNAUTHENTICATED
        large = await refused(door, wire(1, wire(2, b"a" * 2 * MOST_REQUEST_BYTES)))
        assert refusal(large).info.reason == "UNAUTHENTICATED"


def test_bounds_follow_the_largest_context() -> None:
    contexts = [64]
    shape = BodyShape(lambda: [served_model("/m", max_context_tokens=one) for one in contexts])
    assert (shape.most_bytes(), shape.most_elements()) == (LEAST_REQUEST_BYTES, LEAST_ELEMENTS)
    contexts.append(131_072)
    assert (shape.most_bytes(), shape.most_elements()) == (32 * 131_072, 131_072)
    contexts.append(1 << 20)
    assert shape.most_bytes() == MOST_REQUEST_BYTES
    contexts.clear()
    assert shape.most_bytes() == LEAST_REQUEST_BYTES


def test_fields_are_counted_without_parsing() -> None:
    request = api.GenerateRequest(
        input=api.GenerationInput(
            chat=api.ChatPrompt(messages=[api.ChatMessage(role=2, content="a")] * 5)
        )
    )
    request.input.chat.template_variables.update({"a": [1, {"b": 2}]})
    data, kind = request.SerializeToString(), request.DESCRIPTOR
    assert count_fields(data, kind, 1000) == 30
    assert count_fields(data, kind, 3) == 4
    for malformed in (b"\xff" * 50, b"\x0a\xff\xff\xff\x7f", b"\x07", b"\x0a"):
        assert count_fields(malformed, kind, 1000) <= 1
