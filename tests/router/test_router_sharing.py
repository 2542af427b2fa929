"""Two routers that listen at the same addresses: who gets a connection, what a drain does to it.

Their workers serve models of different names, which tell who answered.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import grpc
import pytest
from router_kit import a_router, announce
from scripted_worker import BOTH, ScriptedWorker
from waiting import WAIT_S, until

from baton.client.clients import Client
from baton.grpc_options import client_options
from baton.inference.v1 import inference_pb2 as api
from baton.inference.v1 import inference_pb2_grpc as api_grpc
from router.server import RouterServer

MOST_CONNECTIONS = 64
"""A kernel that gives every one of them to the same router of two has something against the other.
"""


@pytest.fixture
def doors() -> Iterator[dict[str, Any]]:
    """Settings of routers that share their ports, which nobody else gets meanwhile."""
    with closing(socket.socket()) as grpc_port, closing(socket.socket()) as http_port:
        for held in (grpc_port, http_port):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", 0))
        listen, http_listen = (
            f"127.0.0.1:{held.getsockname()[1]}" for held in (grpc_port, http_port)
        )
        yield {"listen": listen, "http_listen": http_listen, "reuse_port": True}


@asynccontextmanager
async def sharing(
    name: str, doors: dict[str, Any]
) -> AsyncIterator[tuple[RouterServer, ScriptedWorker]]:
    """A router that serves, and its worker; both of the name, and the model too."""
    worker = ScriptedWorker(name, BOTH, model=name)
    async with a_router(name=name, drain_s=WAIT_S, **doors) as server:
        await worker.start()
        try:
            await announce(server, worker.identity)
            await until(lambda: server._can_run)
            yield server, worker
        finally:
            await server.stop()
            await worker.stop()


class Caller:
    """One gRPC connection."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=client_options(retries=True))
        self.stub = api_grpc.InferenceServiceStub(self._channel)

    @classmethod
    async def connect(cls, address: str) -> Caller:
        return cls(address)  # with its first call

    async def close(self) -> None:
        await self._channel.close()

    async def router(self) -> str:
        """Who answers."""
        answer = await self.stub.ListModels(api.ListModelsRequest(), timeout=WAIT_S)
        (model,) = answer.models
        return model.name


class Browser:
    """One HTTP connection that is kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, address: str) -> Browser:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def router(self) -> str:
        """Who answers."""
        self.ask("GET", "/v1/models")
        (model,) = json.loads(await self.answer())["data"]
        return str(model["id"])

    def ask(self, method: str, path: str, body: object = None) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
        self._writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + content)

    async def answer(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            lines = head.decode().lower().split("\r\n")
            (length,) = (line.split(": ")[1] for line in lines if "content-length" in line)
            return await self._reader.readexactly(int(length))

    async def until_closed(self) -> None:
        async with asyncio.timeout(WAIT_S):
            assert await self._reader.read() == b""

    async def close(self) -> None:
        self._writer.close()


async def one_of_each(
    stack: AsyncExitStack, kind: type[Caller] | type[Browser], address: str
) -> dict[str, Any]:
    """A connection to each of the two, by the router's name."""
    found: dict[str, Any] = {}
    for _ in range(MOST_CONNECTIONS):
        made = await kind.connect(address)
        stack.push_async_callback(made.close)
        found.setdefault(await made.router(), made)
        if len(found) == 2:
            return found
    raise AssertionError(f"only {found} got connections")


def prompt(max_tokens: int = 2) -> api.StreamGenerateRequest:
    wanted = api.GenerationInput(token_ids=api.TokenIds(ids=[1, 2, 3]))
    wanted.stop.max_tokens = max_tokens
    return api.StreamGenerateRequest(input=wanted)


async def begin(caller: Caller, worker: ScriptedWorker, model: str) -> tuple[Any, bytes]:
    """A stream whose first token has come, and its attempt."""
    asked = prompt()
    asked.input.model = model
    call = caller.stub.StreamGenerate(asked)
    attempt = (await worker.heard("submit")).attempt_id
    worker.first_token(attempt, 10)
    await call.read()
    return call, attempt


async def last_of(call: Any) -> api.StreamGenerateResponse:
    """The rest of a stream is read."""
    last = None
    while (message := await call.read()) is not grpc.aio.EOF:
        last = message
    assert last is not None
    return last


async def test_nobody_is_sent_to_a_router_that_can_run_nothing(doors: dict[str, Any]) -> None:
    async with a_router(**doors) as idle:
        with pytest.raises(ConnectionRefusedError):
            await Browser.connect(doors["http_listen"])
        async with sharing("one", doors):
            for _ in range(8):
                browser = await Browser.connect(doors["http_listen"])
                assert await browser.router() == "one"
                await browser.close()
        assert not idle.address
        await asyncio.wait_for(idle.drain(), WAIT_S)


async def test_a_drain_leaves_new_connections_to_the_other_and_breaks_no_request(
    doors: dict[str, Any],
) -> None:
    async with (
        sharing("one", doors) as (one, worker),
        sharing("two", doors) as (two, _),
        AsyncExitStack() as stack,
    ):
        callers = await one_of_each(stack, Caller, doors["listen"])
        idle = (await one_of_each(stack, Browser, doors["http_listen"]))["one"]
        busy = (await one_of_each(stack, Browser, doors["http_listen"]))["one"]
        call, attempt = await begin(callers["one"], worker, "one")
        busy.ask("POST", "/v1/completions", {"model": "one", "prompt": [1, 2], "max_tokens": 2})
        asked = (await worker.heard("submit")).attempt_id
        draining = asyncio.create_task(one.drain())
        await idle.until_closed()
        for caller in callers.values():  # one of them connects anew
            assert await caller.router() == "two"
        for _ in range(8):
            browser = await Browser.connect(doors["http_listen"])
            stack.push_async_callback(browser.close)
            assert await browser.router() == "two"
        assert not draining.done()
        worker.tokens(attempt, 1, 11)
        worker.finished(attempt, 2)
        assert (await last_of(call)).finished.usage.output_tokens == 2
        worker.first_token(asked, 10)
        worker.tokens(asked, 1, 11)
        worker.finished(asked, 2)
        assert json.loads(await busy.answer())["usage"]["completion_tokens"] == 2
        await busy.until_closed()
        await asyncio.wait_for(draining, WAIT_S)
        assert await one.stop()
        assert two.dispatcher.active_jobs == 0


async def test_calls_that_a_drain_meets_on_their_way_go_to_the_other(
    doors: dict[str, Any],
) -> None:
    """gRPC cancels those that it has received and not yet handed out; clients send them again."""
    async with sharing("one", doors) as (one, _):
        with Client(doors["listen"], timeout_s=WAIT_S) as client:
            await asyncio.to_thread(client.models)
            async with sharing("two", doors):
                calls = [asyncio.create_task(asyncio.to_thread(client.models)) for _ in range(4)]
                await asyncio.sleep(0)  # they run; what they send waits for this loop
                time.sleep(0.5)  # noqa: ASYNC251
                await one.drain()
                async with asyncio.timeout(WAIT_S):
                    answers = await asyncio.gather(*calls)
                assert "two" in {model.name for models in answers for model in models}


async def test_who_does_not_share_gets_no_shared_port_and_shares_none(
    doors: dict[str, Any],
) -> None:
    alone = doors | {"reuse_port": False}
    async with sharing("one", doors):
        with pytest.raises(RuntimeError, match="bind"):
            async with a_router(**alone):
                pass


async def test_a_router_that_comes_to_a_port_that_is_not_shared_ends() -> None:
    """When it is there to serve: before, it does not listen."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        async with a_router(listen=listen, reuse_port=True) as server:
            worker = ScriptedWorker("one", BOTH)
            await worker.start()
            serving = asyncio.create_task(server.serve_until(asyncio.Event()))
            await announce(server, worker.identity)
            with pytest.raises(RuntimeError, match="bind"):
                await asyncio.wait_for(serving, WAIT_S)
            await worker.stop()
