"""Idle, slow and unread HTTP connections end, and leave room for others."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from frontdoor_kit import hangs
from openai_kit import Port, answers, open_port, says
from waiting import until

from router.doors.http.connections import Connection, Connections, _Socket
from router.jobs import Job, JobEvent
from router.requests import bounds, deadlines
from router.requests.bounds import FEWEST_CONNECTIONS, RESERVED_FILES, most_connections
from router.requests.validation import Limits
from telemetry.metrics.router import RouterLoad, RouterMetrics
from telemetry.names import Metric

COMPLETIONS = "/v1/completions"
SHORT_S = 0.3
"""In place of the bounds on time."""
LONG_S = 20.0
"""Nothing here takes so long, but where a connection stays."""
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.doors.http.connections.HEADERS_S", SHORT_S)


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with open_port(tmp_path, says("a")) as port:
        yield port


class Client:
    """A bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, port: Port) -> Client:
        return cls(*await asyncio.open_connection(*port.address))

    async def ask(self, data: bytes = GET) -> int:
        """The status of an answer, whose headers and body are read."""
        self.writer.write(data)
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LONG_S)
        size = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        await self.reader.readexactly(int(size or 0))
        return int(head.split(b" ")[1])

    async def end(self) -> float:
        """Seconds until the server closes it."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(LONG_S):
                while await self.reader.read(1 << 16):
                    pass
        except ConnectionResetError:
            pass
        return time.monotonic() - began_s


JSON_TYPE = "content-type: application/json"


def post(*headers: str, body: bytes = b"") -> bytes:
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "host: localhost", JSON_TYPE, *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.mark.usefixtures("hasty")
async def test_a_silent_connection_is_closed(port: Port) -> None:
    client = await Client.of(port)
    assert await client.end() >= SHORT_S / 2


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("used", [False, True])
async def test_headers_that_do_not_end_are_not_waited_for(port: Port, used: bool) -> None:
    client = await Client.of(port)
    if used:
        assert await client.ask() == 200
    ended = asyncio.create_task(client.end())
    client.writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
    async with asyncio.timeout(LONG_S):
        while not ended.done():
            client.writer.write(b"a")
            await asyncio.sleep(SHORT_S / 10)


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_follows_a_request_with_two_lengths(port: Port, stream: bool) -> None:
    """A proxy may have taken the other one: what follows for it may be a part of the body."""
    client = await Client.of(port)
    body = b'{"prompt": "a", "max_tokens": 1, "stream": %b}' % str(stream).lower().encode()
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    both = post("transfer-encoding: chunked", f"content-length: {len(chunk)}", body=chunk)
    client.writer.write(both + post(f"content-length: {len(body)}", body=body))
    async with asyncio.timeout(LONG_S):
        answers = await client.reader.read()
    assert answers.count(b"HTTP/1.1 200") == answers.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answers.lower()


@pytest.mark.usefixtures("hasty")
async def test_who_has_asked_may_think_for_longer(port: Port) -> None:
    """Between two requests, and while an answer is under way."""
    client = await Client.of(port)
    for _ in range(2):
        assert await client.ask() == 200
        await asyncio.sleep(2 * SHORT_S)
    body = b'{"prompt": "a", "max_tokens": 1}'
    client.writer.write(post(f"content-length: {len(body)}"))
    await asyncio.sleep(2 * SHORT_S)
    assert await client.ask(body) == 200


async def test_who_waited_longest_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "router.doors.openai.server.most_connections", lambda: bounds.ConnectionLimits(3, 3)
    )
    async with open_port(tmp_path, says("a")) as port:
        silent = [await Client.of(port) for _ in range(2)]
        asking = await Client.of(port)
        assert await asking.ask() == 200
        newcomer = await Client.of(port)
        assert await newcomer.ask() == 200
        assert await silent[0].end() < LONG_S
        busy = [newcomer, asking, silent[1]]
        for client in busy:
            client.writer.write(post("content-length: 9"))
            await client.writer.drain()
        await asyncio.sleep(SHORT_S)
        turned_away = await Client.of(port)
        assert await turned_away.end() < LONG_S
        busy[0].writer.close()
        async with asyncio.timeout(LONG_S):
            while True:
                try:
                    assert await (await Client.of(port)).ask() == 200
                    break
                except (ConnectionResetError, asyncio.IncompleteReadError):
                    await asyncio.sleep(0.01)


async def test_the_rest_of_an_unwanted_body_is_not_read_for_ever(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.doors.http.connections.MOST_UNWANTED_BYTES", 1 << 20)
    client = await Client.of(port)
    assert await client.ask(post(f"content-length: {1 << 40}")) == 400
    ended, sent = asyncio.create_task(client.end()), 0
    async with asyncio.timeout(LONG_S):
        while not ended.done():
            client.writer.write(b" " * (1 << 16))
            sent += 1 << 16
            await asyncio.sleep(0)
    assert sent >= 1 << 20


async def test_a_body_comes_at_some_pace(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.requests.bounds.BODY_GRACE_S", SHORT_S)
    monkeypatch.setattr("router.requests.bounds.BODY_BYTES_A_SECOND", 10_000)
    body = b'{"prompt": "a", "max_tokens": 1}' + b" " * 19_968
    for piece_bytes, status in ((4000, 200), (40, 504)):
        client = await Client.of(port)
        client.writer.write(post(f"content-length: {len(body)}"))
        answer = asyncio.create_task(client.ask(b""))
        for at in range(0, len(body), piece_bytes):
            client.writer.write(body[at : at + piece_bytes])
            await asyncio.sleep(SHORT_S / 3)
            if answer.done():
                break
        assert await answer == status
        client.writer.close()


async def test_tiny_chunks_do_not_hold_up_the_event_loop(port: Port) -> None:
    client, gaps = await Client.of(port), list[float]()
    body = b'{"prompt": "a", "max_tokens": 1}'
    end = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    began_s = last_s = time.monotonic()
    chunks = b"1\r\n \r\n" * 200_000
    asked = asyncio.create_task(client.ask(post("transfer-encoding: chunked", body=chunks + end)))
    while not asked.done():
        await asyncio.sleep(0.001)
        now_s = time.monotonic()
        gaps.append(now_s - last_s)
        last_s = now_s
    assert asked.result() == 200
    assert max(gaps) < (last_s - began_s) / 8


@pytest.mark.parametrize("behind", [False, True])
async def test_no_more_is_taken_than_can_be_read(tmp_path: Path, behind: bool) -> None:
    """Neither of a body of tiny chunks, nor behind a request that is under way."""
    async with open_port(tmp_path, hangs) as port:
        client, body = await Client.of(port), b'{"prompt": "a"}'
        client.writer.write(
            post(f"content-length: {len(body)}", body=body)
            if behind
            else post("transfer-encoding: chunked")
        )
        await asyncio.sleep(SHORT_S)
        client.writer.write(b"1\r\n \r\n" * 8_000_000)
        await asyncio.sleep(SHORT_S)
        assert client.writer.transport.get_write_buffer_size() > 24_000_000
        client.writer.transport.abort()
        await asyncio.sleep(SHORT_S)


async def test_what_waits_for_its_turn_is_read_in_order(port: Port) -> None:
    client = await Client.of(port)
    client.writer.write(post("transfer-encoding: chunked") + b"1\r\n \r\n" * 5000)
    body = b'{"prompt": "a", "max_tokens": 1}'
    client.writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    assert await client.ask(b"") == 200
    assert await client.ask() == 200


def completion(**fields: object) -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": 1, **fields}).encode()
    return post(f"content-length: {len(body)}", body=body)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_closes_its_own_side_gets_its_answer(tmp_path: Path, stream: bool) -> None:
    seen = asyncio.Event()

    async def later(job: Job) -> AsyncGenerator[JobEvent, None]:
        await seen.wait()
        async for event in says("ab")(job):
            yield event

    async with open_port(tmp_path, later) as port:
        client = await Client.of(port)
        client.writer.write(completion(stream=stream))
        client.writer.write_eof()
        interim = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), LONG_S)
        assert interim.startswith(b"HTTP/1.1 100 "), "it was seen, and nobody has left"
        await until(lambda: port.dispatcher.jobs)
        seen.set()
        answer = await asyncio.wait_for(client.reader.read(), LONG_S)  # Up to its end.
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert answer.endswith(b"0\r\n\r\n" if stream else b"}")


class Answers(asyncio.Protocol):
    """In uvicorn's place: an answer that is the connection's last."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, _Socket)
        transport.write(bytes(16 << 20))
        transport.close()


async def test_a_connection_that_closes_does_not_wait_for_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.requests.bounds.BODY_GRACE_S", SHORT_S)
    monkeypatch.setattr("router.requests.bounds.BODY_BYTES_A_SECOND", 1e9)
    connections = Connections(4)

    def accept() -> Connection:
        connection = Connection(connections)
        connection.inner = Answers()
        return connection

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()):
        await until(lambda: connections._open)
        await until(lambda: not connections._open)
    server.close()


async def test_who_leaves_a_stream_that_stands_still_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has read all that came, so that its system does not say so by itself."""
    monkeypatch.setattr("router.doors.http.edge.SILENT_S", 10 * LONG_S)
    async with open_port(tmp_path, hangs) as port:
        client = await Client.of(port)
        client.writer.write(completion(stream=True))
        await asyncio.wait_for(client.reader.readuntil(b"data: "), LONG_S)
        await asyncio.sleep(0)
        client.writer.close()
        await asyncio.wait_for(port.dispatcher.closed.wait(), LONG_S)


async def test_an_answer_that_nobody_reads_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some time after the deadline. When that is over is said here: a machine that stands still
    would let it pass unseen."""
    monkeypatch.setattr(deadlines, "UNREAD_GRACE_S", 2 * LONG_S)
    waits: list[asyncio.Timeout] = []

    def timeout(delay_s: float) -> asyncio.Timeout:
        made = asyncio.timeout(delay_s)
        if delay_s > LONG_S:
            waits.append(made)
        return made

    monkeypatch.setattr(deadlines, "asyncio", SimpleNamespace(timeout=timeout))
    counted = RouterMetrics(RouterLoad)
    script = answers(lambda job, choice: [70] * 1000)
    limits = Limits(max_request_duration_s=LONG_S, max_unread_tokens=1 << 20)
    async with open_port(tmp_path, script, events=counted, limits=limits) as port:
        tasks = len(asyncio.all_tasks())
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, port.address)
            body = b'{"prompt": "a", "stream": true, "logprobs": 20, "n": 16, "max_tokens": 200}'
            await loop.sock_sendall(client, post(f"content-length: {len(body)}", body=body))
            await asyncio.wait_for(port.dispatcher.closed.wait(), LONG_S)
            assert counted.registry.get_sample_value(Metric.UNREAD_STREAMS + "_total") == 0
            (wait,) = waits
            wait.reschedule(loop.time())
            await until(
                lambda: counted.registry.get_sample_value(Metric.UNREAD_STREAMS + "_total") == 1
            )
            await until(lambda: len(asyncio.all_tasks()) <= tasks)


def test_parts_that_belong_together_leave_as_one_also_before_the_end() -> None:
    did: list[bytes] = []
    system = SimpleNamespace(
        write=did.append,
        close=lambda: did.append(b"closed"),
        get_write_buffer_size=lambda: 0,
    )
    connection = Connection(Connections(1))
    connection._transport = system  # type: ignore[assignment]
    uvicorns = _Socket(system, connection)  # type: ignore[arg-type]
    with connection.together():
        uvicorns.write(b"head")
        with connection.together():
            connection.write(b" part")
        assert not did
    with connection.together():
        uvicorns.write(b"end")
        uvicorns.close()
    connection.write(b"alone")
    assert did == [b"head part", b"end", b"closed", b"alone"]


def test_connections_leave_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for files in (300, 1024, 20_000, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        most = most_connections()
        if files != resource.RLIM_INFINITY:
            assert most.http + most.grpc <= files - RESERVED_FILES
        assert most.grpc >= FEWEST_CONNECTIONS
        assert most.http >= most.grpc
