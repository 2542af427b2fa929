"""What `baton bench` makes of addresses and of answers, whole and broken."""

from __future__ import annotations

import json

import pytest

from baton.inference.v1 import inference_pb2 as pb
from console.loadgen.endpoints import Asked, Kept, Target, parse_url
from console.loadgen.errors import BenchError
from console.loadgen.grpc_endpoint import GrpcEndpoint
from console.loadgen.openai_endpoint import OpenAiEndpoint

ASKED = Asked(model="m", force_length=True, timeout_s=5.0, api_key="secret")


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("127.0.0.1:50051", Target("grpc", "127.0.0.1:50051")),
        ("grpc://[::1]:7", Target("grpc", "[::1]:7")),
        ("grpcs://router:443", Target("grpc", "grpcs://router:443")),
        ("http://peer:8000", Target("openai", "http://peer:8000/v1")),
        ("http://peer:8000/v1/", Target("openai", "http://peer:8000/v1")),
        ("https://peer/some/v1", Target("openai", "https://peer/some/v1")),
    ],
)
def test_addresses(url: str, target: Target) -> None:
    assert parse_url(url) == target


@pytest.mark.parametrize(
    "url", ["peer", "grpc://peer", "peer:99999", "ftp://peer:1", "http://", ""]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(BenchError, match="neither grpc"):
        parse_url(url)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def choice(text: str, finish: str | None = None) -> dict[str, object]:
    return {"index": 0, "text": text, "finish_reason": finish}


STREAM = (
    event(choices=[choice("a")])
    + b": a comment\r\n\r\n"
    + event(choices=[choice("")])  # half a character
    + event(choices=[choice("bc")])
    + event(choices=[choice("", "length")])
    + event(choices=[], usage={"completion_tokens": 5})
    + b"data: [DONE]\n\n"
)


@pytest.fixture
async def endpoint():
    made = OpenAiEndpoint("http://peer/v1", ASKED)
    yield made
    await made.close()


async def test_events_are_stamped_by_the_read_that_completed_them(endpoint) -> None:
    for size in range(1, len(STREAM)):
        parts = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
        reading = endpoint.read(Kept([float(i) for i in range(len(parts))], parts, "t"))
        assert (reading.tokens, reading.whole, reading.trace_id) == (5, True, "t")
        assert len(reading.arrivals_s) == 3
        assert reading.arrivals_s == sorted(reading.arrivals_s)
        first_end = STREAM.index(b"\n") + 1
        assert reading.arrivals_s[0] == (first_end - 1) // size


async def test_answers_without_usage_count_events(endpoint) -> None:
    parts = [event(choices=[choice("a")]), event(choices=[choice("b", "stop")]), b"data: [DONE]\n"]
    assert endpoint.read(Kept([1.0, 2.0, 3.0], parts)).tokens == 2


@pytest.mark.parametrize(
    "stream",
    [
        event(choices=[choice("a")]),
        event(choices=[choice("a")]) + event(error={"message": "no"}) + b"data: [DONE]\n\n",
        event(choices=[choice("a")]) + b"data: {half\n\n",
    ],
)
async def test_answers_that_are_not_whole(endpoint, stream: bytes) -> None:
    reading = endpoint.read(Kept([1.0], [stream]))
    assert not reading.whole
    assert reading.arrivals_s == [1.0]


async def test_requests_ask_for_what_was_planned(endpoint) -> None:
    body = json.loads(endpoint.write([1, 2, 3], 7))
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (7, 7, True)
    assert body["stream_options"] == {"include_usage": True}
    grpc = GrpcEndpoint("127.0.0.1:1", ASKED._replace(force_length=False))
    request = pb.StreamGenerateRequest.FromString(grpc.write([1, 2, 3], 7)).input
    assert list(request.token_ids.ids) == [1, 2, 3]
    assert (request.model, request.stop.max_tokens, request.stop.ignore_eos) == ("m", 7, False)
    assert not request.stop.HasField("min_tokens")
    await grpc.close()
