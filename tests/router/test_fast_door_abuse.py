"""The fast door to clients that break the protocol, or ask for more than they need.

Whatever they send: the door answers or closes, no exception is left over, no call stays, and
nothing waits in memory.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

import grpc
import pytest
from frontdoor_kit import ScriptedDispatcher, hangs, ids_input, plays, served_model
from http2_kit import HEAD, PREFACE, SOON_S, Answer, Kind, Raw, frame, framed, raw
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from waiting import until

from baton.inference.v1 import inference_pb2 as api
from router.doors.frontdoor import InferenceService
from router.doors.http2 import connection as connection_module
from router.doors.http2 import outgoing as outgoing_module
from router.doors.http2.connection import Http2Connection
from router.doors.http2.frames import END_HEADERS, END_STREAM, MOST_FRAME_BYTES
from router.doors.http2.server import FastDoor
from router.jobs import Job, JobEvent
from router.requests.bounds import BodyShape
from router.requests.tokenization import Tokenizers

REQUEST = api.StreamGenerateRequest(input=ids_input()).SerializeToString()
NO_ERROR = 0
ALLOWED_FRAMES, ALLOWED_RESETS = 60, 40
"""Fewer than the door allows, for the sake of time."""
SETTINGS = frame(Kind.SETTINGS, 0, 0)


class Served:
    """A door over a dispatcher whose model has no tokenizer."""

    def __init__(self) -> None:
        self.dispatcher = ScriptedDispatcher(
            [served_model("/none", max_context_tokens=4096)], hangs
        )
        self.door = FastDoor("127.0.0.1:0", BodyShape(self.dispatcher.models), 8, 60)
        InferenceService(self.dispatcher, Tokenizers()).add_to_server(self.door)

    async def gone(self) -> None:
        """Returns when no connection is left, and no task of a call."""
        await until(lambda: not self.door.connections and len(asyncio.all_tasks()) == 1)


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(connection_module, "ALLOWED_FRAMES", ALLOWED_FRAMES)
    monkeypatch.setattr(connection_module, "ALLOWED_RESETS", ALLOWED_RESETS)
    served = Served()
    await served.door.start()
    yield served
    await served.door.stop(0)


async def closed(served: Served, why: str, client: Raw) -> None:
    """The connection ends, for this reason alone."""
    await client.until_gone()
    assert served.door.closed_by == {why: 1}
    await served.gone()


async def test_too_many_pings(served: Served) -> None:
    async with raw(served.door.address) as client:
        client.greet()
        ping = frame(Kind.PING, 0, 0, bytes(8))
        client.write(ping * (ALLOWED_FRAMES + 500))
        await closed(served, "frames", client)
    assert client.pongs < ALLOWED_FRAMES + 200  # some are earned while they come


@pytest.mark.parametrize(
    "flood",
    [
        frame(Kind.SETTINGS, 0, 0),
        frame(Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)),
        frame(Kind.PRIORITY, 0, 9, bytes(4) + b"\1"),
        frame(0xFA, 0, 0, b"unknown"),
    ],
    ids=["settings", "windows", "priorities", "unknown"],
)
async def test_frames_without_a_need_are_counted(served: Served, flood: bytes) -> None:
    async with raw(served.door.address) as client:
        client.greet()
        client.write(flood * (ALLOWED_FRAMES + 500))
        await closed(served, "frames", client)


async def test_a_client_with_a_need_may_open_windows_on_and_on(served: Served) -> None:
    """Two for each frame that it got."""

    async def slowly(job: Job) -> AsyncIterator[JobEvent]:
        async for event in plays([70] * (2 * ALLOWED_FRAMES))(job):
            yield event
            await asyncio.sleep(0)

    served.dispatcher.script = slowly  # type: ignore[assignment]
    async with raw(served.door.address) as client:
        client.greet()
        stream = client.ask(REQUEST)
        await client.until_ended(stream)
        assert client.answers[stream].frames > ALLOWED_FRAMES
        assert client.answers[stream].status == (0, "")
    assert not served.door.closed_by


async def test_tiny_frames_of_data(served: Served) -> None:
    async with raw(served.door.address) as client:
        client.greet()
        stream = client.ask(None, end=False)
        client.write(frame(Kind.DATA, 0, stream, b"") * (ALLOWED_FRAMES + 500))
        await closed(served, "frames", client)


@pytest.mark.parametrize("kind", [Kind.DATA, Kind.HEADERS])
async def test_frames_behind_the_end_of_their_call_are_counted(served: Served, kind: Kind) -> None:
    """Each would end a call, and is answered."""
    async with raw(served.door.address) as client:
        client.greet()
        stream = client.ask(None, end=False)
        client.write(frame(Kind.DATA, 0, stream, b"\0\x7f\xff\xff\xff"))
        await client.until_ended(stream)
        client.write(frame(kind, END_STREAM | END_HEADERS, stream, b"") * (ALLOWED_FRAMES + 500))
        await closed(served, "frames", client)


async def test_a_window_that_opens_by_a_byte_earns_nothing(served: Served) -> None:
    served.dispatcher.script = plays([70] * ALLOWED_FRAMES)
    async with raw(served.door.address) as client:
        client.greet(1)
        client.ask(REQUEST)
        await closed(served, "frames", client)


async def test_frames_that_take_long_are_read_one_a_turn(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "TURN_S", -1)
    turns, take = 0, Http2Connection._take_turn

    def counted(self: Http2Connection) -> None:
        nonlocal turns
        turns += 1
        take(self)

    monkeypatch.setattr(Http2Connection, "_take_turn", counted)
    async with raw(served.door.address) as client:
        client.greet()
        client.write(frame(Kind.PING, 0, 0, bytes(8)) * 30)
        while client.pongs < 30:
            assert await client.turn()
    assert turns > 30


async def test_calls_begun_and_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "ALLOWED_FRAMES", 10**6)
    async with raw(served.door.address) as client:
        client.greet()
        for begun in range(ALLOWED_RESETS + 500):
            client.h2.reset_stream(client.ask(REQUEST))
            client.flush()
            if begun % 32 == 0:
                await asyncio.sleep(0.005)
            if served.door.closed_by:
                break
        await client.until_gone()
    assert served.door.closed_by == {"resets": 1}
    await served.gone()


async def test_no_more_calls_than_a_connection_may_have(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropped call counts until its task has ended, so dropping makes no room at once."""
    monkeypatch.setattr(connection_module, "MOST_CALLS", 4)
    async with raw(served.door.address) as client:
        client.greet()
        streams = [client.ask(REQUEST) for _ in range(6)]
        await client.until_ended(*streams[4:])
        assert [client.answers[one].reset for one in streams[4:]] == [7, 7]  # REFUSED_STREAM
        assert served.door.calls == 4
    await served.gone()


async def test_headers_without_an_end(served: Served) -> None:
    async with raw(served.door.address) as client:
        client.greet()
        client.write(frame(Kind.HEADERS, 0, 1, b""))
        client.write(frame(Kind.CONTINUATION, 0, 1, bytes(1 << 12)) * 20)
        await closed(served, "headers", client)


async def test_headers_that_are_large_when_they_are_read(served: Served) -> None:
    """A table's entry of 4 KB, named two hundred times by a byte each."""
    entry = b"\x40\x01a\x7f" + b"\xa1\x1e" + b"b" * 4000
    async with raw(served.door.address) as client:
        client.greet()
        client.write(frame(Kind.HEADERS, 5, 1, entry + b"\xbe" * 200))
        await closed(served, "headers", client)


@pytest.mark.parametrize("count", [40, 120])
async def test_large_metadata_are_a_status(served: Served, count: int) -> None:
    """The connection's other calls go on. The larger ones take several frames."""
    async with raw(served.door.address) as client:
        client.greet()
        stream = client.ask(REQUEST, [(f"x-{index}", "v" * 400) for index in range(count)])
        await client.until_ended(stream)
        code, message = client.answers[stream].status
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert "metadata" in message


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        (b"", grpc.StatusCode.UNIMPLEMENTED, "exactly one message"),
        (framed(REQUEST) * 2, grpc.StatusCode.UNIMPLEMENTED, "exactly one message"),
        (framed(REQUEST)[:-1], grpc.StatusCode.UNIMPLEMENTED, "exactly one message"),
        (b"\1" + framed(REQUEST)[1:], grpc.StatusCode.INTERNAL, "compressed"),
        (b"\0\x7f\xff\xff\xff", grpc.StatusCode.RESOURCE_EXHAUSTED, "more than 8388608"),
        (b"\0\0\x20\0\0", grpc.StatusCode.INVALID_ARGUMENT, "the request exceeds"),
        (framed(b"\xff\xff"), grpc.StatusCode.INVALID_ARGUMENT, "could not be parsed"),
    ],
)
async def test_bodies_that_are_no_message(
    served: Served, message: bytes, code: grpc.StatusCode, text: str
) -> None:
    """Refused by the prefix alone where that is wrong: the rest is not waited for."""
    async with raw(served.door.address) as client:
        client.greet()
        stream = client.ask(None, end=False)
        is_whole = "message" in text or "parsed" in text
        client.write(frame(Kind.DATA, int(is_whole), stream, message))
        await client.until_ended(stream)
        found, said = client.answers[stream].status
    assert found == code.value[0]
    assert text in said
    await served.gone()


async def test_a_slow_body_ends_at_its_pace(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.requests.bounds.BODY_GRACE_S", 0.2)
    async with raw(served.door.address) as client:
        client.greet()
        stream = client.ask(None, end=False)
        client.write(frame(Kind.DATA, 0, stream, framed(REQUEST)[:7]))
        await client.until_ended(stream)
        code, _ = client.answers[stream].status
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


@pytest.mark.parametrize(
    ("replaced", "status"),
    [({"_method": "GET"}, b"405"), ({"content_type": "application/json"}, b"415")],
)
async def test_what_is_no_call_has_a_status_of_http(
    served: Served, replaced: dict[str, str], status: bytes
) -> None:
    names = {"_method": "method", "content_type": "content_type"}
    async with raw(served.door.address) as client:
        client.greet()
        stream = client.ask(REQUEST, **{names[key]: value for key, value in replaced.items()})
        await client.until_ended(stream)
        assert client.answers[stream].headers[b":status"] == status


@pytest.mark.parametrize("more", [[(":path", "/b")], [(":other", "b")], []])
async def test_a_request_has_each_of_the_protocols_headers_once(
    served: Served, more: list[tuple[str, str]]
) -> None:
    """Else it is refused alone."""
    async with raw(served.door.address) as client:
        client.h2.config.validate_outbound_headers = False
        client.greet()
        stream = client.h2.get_next_available_stream_id()
        client.answers[stream] = Answer()
        head = [*more, *(HEAD if more else HEAD[1:])]
        client.h2.send_headers(stream, head, end_stream=True)
        client.flush()
        await client.until_ended(stream)
        assert client.answers[stream].headers[b":status"] == b"400"
    await served.gone()


@pytest.mark.parametrize("timeout", ["", "1", "123456789S", "1s", "-1S", "1S "])
async def test_timeouts_that_are_none(served: Served, timeout: str) -> None:
    async with raw(served.door.address) as client:
        client.h2.config.validate_outbound_headers = False
        client.h2.config.normalize_outbound_headers = False
        client.greet()
        stream = client.ask(REQUEST, [("grpc-timeout", timeout)])
        await client.until_ended(stream)
        assert client.answers[stream].status[0] == grpc.StatusCode.INTERNAL.value[0]
    await served.gone()


async def test_a_client_that_asks_and_does_not_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers to its pings would fill memory."""
    monkeypatch.setattr(connection_module, "ALLOWED_FRAMES", 10**9)
    monkeypatch.setattr(outgoing_module, "MOST_UNREAD_BYTES", 1 << 14)
    async with raw(served.door.address, buffer=4096) as client:
        client.greet()
        stream = client.ask(REQUEST)
        while not client.answers[stream].headers:
            assert await client.turn()
        for inner in served.door._open:
            socket = inner._transport.get_extra_info("socket")  # type: ignore[union-attr]
            socket.setsockopt(SOL_SOCKET, SO_SNDBUF, 4096)
        ping = frame(Kind.PING, 0, 0, bytes(8)) * 100
        async with asyncio.timeout(SOON_S):
            while not served.door.closed_by:
                client.write(ping)
                await asyncio.sleep(0)
    assert served.door.closed_by == {"unread": 1}
    await served.gone()


async def test_a_connection_that_closes_does_not_wait_for_its_client(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its calls, with an answer that the client does not read."""
    monkeypatch.setattr("router.requests.bounds.BODY_GRACE_S", 0.2)
    monkeypatch.setattr("router.requests.bounds.BODY_BYTES_A_SECOND", 1e9)
    async with raw(served.door.address, buffer=4096) as client:
        client.greet()
        await until(lambda: bool(served.door._open))
        (inner,) = served.door._open
        socket = inner._transport.get_extra_info("socket")  # type: ignore[union-attr]
        socket.setsockopt(SOL_SOCKET, SO_SNDBUF, 4096)
        inner.out.send(frame(0xFA, 0, 0, bytes(MOST_FRAME_BYTES)) * 12)
        inner.out.flush()
        assert inner.outer.waiting_bytes < outgoing_module.MOST_UNREAD_BYTES
        inner.leave()
        await asyncio.sleep(0.05)
        assert served.door.connections  # It still waits.
        await served.gone()
    assert not served.door.closed_by


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.1\r\n\r\nSM\r\n\r\n"])
async def test_what_is_not_http2_is_closed_at_once(served: Served, hello: bytes) -> None:
    async with raw(served.door.address) as client:
        client.write(hello)
        await closed(served, "preface", client)


async def test_settings_that_nobody_knows_fill_nothing(served: Served) -> None:
    """Nor does a large table of headers."""
    entries = b"".join(struct.pack(">HI", 0x100 + index, index) for index in range(2000))
    entries += struct.pack(">HI", 1, 1 << 31)
    async with raw(served.door.address) as client:
        client.greet()
        client.write(frame(Kind.SETTINGS, 0, 0, entries))
        stream = client.ask(REQUEST)
        while not client.answers[stream].headers:
            assert await client.turn()
        (inner,) = served.door._open
        assert len([*inner._h2.remote_settings]) < 10
        assert inner._h2.encoder.header_table_size == 4096


async def test_silent_and_old_connections_end(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers no ping while a call runs; one that is old, behind its last call."""
    monkeypatch.setattr(connection_module, "PING_S", 0.05)
    monkeypatch.setattr(connection_module, "PING_TIMEOUT_S", 0.1)
    async with raw(served.door.address) as client:
        client.greet()
        client.ask(REQUEST)
        async with asyncio.timeout(SOON_S):
            while not served.door.closed_by:
                await asyncio.sleep(0.01)
    assert served.door.closed_by == {"silent": 1}
    served.door.closed_by.clear()
    served.door.idle_s = 0.1
    async with raw(served.door.address) as client:
        client.greet()
        await closed(served, "idle", client)
    assert client.goaway == NO_ERROR


KINDS = st.one_of(st.sampled_from(Kind), st.integers(0, 255))
STREAMS = st.sampled_from([0, 1, 1, 1, 2, 3, 5, 0x7FFFFFFF, 0xFFFFFFFF])
BLOCK = b"".join(
    b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    for name, value in HEAD
)
PAYLOADS = st.one_of(
    st.binary(max_size=40),
    st.just(BLOCK),
    st.just(BLOCK[:30]),
    st.just(framed(REQUEST)),
    st.builds(struct.pack, st.just(">I"), st.integers(0, 2**32 - 1)),
    st.builds(struct.pack, st.just(">HI"), st.integers(0, 9), st.integers(0, 2**32 - 1)),
    st.binary(min_size=8, max_size=8),
)
FRAMES = st.builds(frame, KINDS, st.integers(0, 255), STREAMS, PAYLOADS)
OPENING = st.sampled_from([PREFACE + SETTINGS, PREFACE, PREFACE[:10], b""])
CALL = frame(Kind.HEADERS, 4, 1, BLOCK) + frame(Kind.DATA, 1, 1, framed(REQUEST))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    opening=OPENING,
    frames=st.lists(st.one_of(FRAMES, st.just(CALL), st.binary(max_size=30)), max_size=12),
    cuts=st.lists(st.integers(1, 400), max_size=4),
)
@example(PREFACE + SETTINGS, [CALL, frame(Kind.RST_STREAM, 0, 1, bytes(4)), CALL], [])
@example(PREFACE + SETTINGS, [frame(Kind.GOAWAY, 0, 0, bytes(8)), CALL], [])
def test_any_frames_leave_nothing_behind(
    runner: asyncio.Runner, opening: bytes, frames: list[bytes], cuts: list[int]
) -> None:
    async def send() -> None:
        served, wrong = Served(), list[Any]()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, what: wrong.append(what))
        served.dispatcher.script = plays([70, 71])
        await served.door.start()
        async with raw(served.door.address) as client:
            rest = opening + b"".join(frames)
            for cut in [*cuts, len(rest)]:
                client.write(rest[:cut])
                rest = rest[cut:]
                await asyncio.sleep(0)
            async with asyncio.timeout(SOON_S):
                with suppress(OSError):  # The door may have closed it.
                    client.writer.write_eof()
                    while await client.reader.read(1 << 16):
                        pass
        await served.gone()
        await served.door.stop(0)
        assert not wrong

    runner.run(send())
