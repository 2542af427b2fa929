"""The fast door to a client that keeps to the protocol: gRPC's own interop cases, and windows."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import frontdoor_kit
import grpc
import grpc.aio
import pytest
import pytest_asyncio
from certificate_kit import of_router
from frontdoor_kit import (
    Door,
    ScriptedDispatcher,
    hangs,
    ids_input,
    open_door,
    plays,
    read,
    refusal,
    served_model,
    write_tokenizer,
)
from http2_kit import raw
from waiting import until

from baton.inference.v1 import inference_pb2 as api
from baton.inference.v1 import inference_pb2_grpc as api_grpc
from baton.tls import TlsFiles
from router.doors.http2 import heads
from router.doors.http2.frames import goaway
from router.doors.http2.server import FastDoor
from router.requests.bounds import BodyShape
from serving.net.tls import DoorCertificate

SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n100 %"
"""The message of gRPC's own case `special_status_message`."""
WORDS = [70 + index % 20 for index in range(200)]
REQUEST = api.StreamGenerateRequest(input=ids_input())


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    dispatcher = ScriptedDispatcher([served_model(folder, max_context_tokens=1 << 17)], hangs)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(frontdoor_kit, "DOORS", [frontdoor_kit.fast_door])
        async with open_door(dispatcher) as door:
            yield door


@pytest.fixture
def door(served: Door) -> Door:
    """As if nothing had happened there."""
    served.dispatcher.script = plays(WORDS)
    served.dispatcher.closed.clear()
    served.dispatcher.jobs.clear()
    return served


def ids_of(messages: list[api.StreamGenerateResponse]) -> list[int]:
    return [one for message in messages for one in message.delta.token_ids]


async def test_a_large_request_and_a_large_answer(door: Door) -> None:
    door.dispatcher.script = plays([70 + index % 20 for index in range(3000)])
    prompt = api.GenerationInput(token_ids=api.TokenIds(ids=[300] * 100_000))
    messages = await read(door.stub, prompt)
    assert len(ids_of(messages)) == 3000
    assert door.dispatcher.jobs[0].prompt_tokens == 100_000


async def test_many_streams_share_a_connection(door: Door) -> None:
    found = await asyncio.gather(*(read(door.stub, ids_input(71, index)) for index in range(100)))
    assert all(ids_of(messages) == WORDS for messages in found)


async def test_a_blocking_client_reads_a_stream(door: Door) -> None:
    def reads() -> list[api.StreamGenerateResponse]:
        with grpc.insecure_channel(door.address) as channel:
            stub = api_grpc.InferenceServiceStub(channel)
            return [*stub.StreamGenerate(REQUEST, timeout=20, metadata=[("x-a", "1")])]

    assert ids_of(await asyncio.to_thread(reads)) == WORDS


async def test_cancel_after_begin(door: Door) -> None:
    door.dispatcher.script = hangs
    call = door.stub.StreamGenerate(REQUEST)
    call.cancel()
    assert await call.code() == grpc.StatusCode.CANCELLED
    door.dispatcher.script = plays(WORDS)
    assert ids_of(await read(door.stub, ids_input())) == WORDS


async def test_cancel_after_the_first_response(door: Door) -> None:
    door.dispatcher.script = hangs
    call = door.stub.StreamGenerate(REQUEST)
    assert (await call.read()).HasField("started")
    call.cancel()
    await asyncio.wait_for(door.dispatcher.closed.wait(), 20)
    assert await call.code() == grpc.StatusCode.CANCELLED


async def test_timeout_on_a_sleeping_server(door: Door) -> None:
    door.dispatcher.script = hangs
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in door.stub.StreamGenerate(REQUEST, timeout=0.2):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(door.dispatcher.closed.wait(), 20)


async def test_the_router_ends_a_call_at_its_deadline_by_itself(door: Door) -> None:
    """A client whose own clock stands still gets the status of the ordinary port."""
    door.dispatcher.script = hangs
    async with raw(door.address) as client:
        client.greet()
        stream = client.ask(REQUEST.SerializeToString(), [("grpc-timeout", "100m")])
        await client.until_ended(stream)
        code, _ = client.answers[stream].status
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert b"grpc-status-details-bin" in client.answers[stream].trailers


async def says(request: api.StreamGenerateRequest, context: Any) -> None:
    """Ends with the message that the prompt is."""
    await context.abort(grpc.StatusCode.UNKNOWN, request.input.text)


@asynccontextmanager
async def other_service(dispatcher: ScriptedDispatcher) -> AsyncIterator[grpc.aio.Channel]:
    """A door whose method ends with a given message."""
    server = FastDoor("127.0.0.1:0", BodyShape(dispatcher.models), 4, 60)
    handler = grpc.unary_stream_rpc_method_handler(
        says, request_deserializer=api.StreamGenerateRequest.FromString
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.Says", {"Say": handler})]
    )
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel
    await server.stop(0)


@pytest.mark.parametrize("message", ["test status message", SPECIAL, ""])
async def test_status_code_and_message(door: Door, message: str) -> None:
    async with other_service(door.dispatcher) as channel:
        say = channel.unary_stream("/test.Says/Say", lambda one: one.SerializeToString())
        request = api.StreamGenerateRequest(input=api.GenerationInput(text=message))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in say(request):
                pass
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNKNOWN, message)


async def test_an_error_has_its_details(door: Door) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(door.stub, api.GenerationInput(model="other", text="x"))
    assert refusal(caught.value).info.reason == "MODEL_NOT_FOUND"


async def test_texts_of_metadata_are_sent_as_they_are() -> None:
    """Only binary ones lose the padding of their base64."""
    given = (("key", "YQ=="), ("key-bin", b"a"))
    sent = {bytes(name): bytes(value) for name, value in heads.end(grpc.StatusCode.OK, "", given)}
    assert sent == {b"grpc-status": b"0", b"key": b"YQ==", b"key-bin": b"YQ"}


async def test_metadata_have_all_names_but_the_protocols_own() -> None:
    own = [(b":method", b"POST"), (b":path", b"/a/B"), (b":scheme", b"http"), (b"te", b"trailers")]
    own += [(b"content-type", b"application/grpc"), (b"grpc-timeout", b"1S"), (b"a-bin", b"YQ")]
    callers = [(b"tenant", b"a"), (b"content-type-seen", b"b")]
    assert heads.Head.of(own + callers).metadata == (("tenant", "a"), ("content-type-seen", "b"))


@pytest.mark.parametrize(
    "metadata",
    [
        (("x-grpc-test-echo-initial", "initial"), ("x-grpc-test-echo-bin", b"\xab\xab\xab")),
        (("authorization", "Bearer a "), ("x-a", " v ")),
        (("connection", "close"), ("host", "other"), ("keep-alive", "1")),
    ],
)
async def test_custom_metadata_is_taken(
    door: Door, metadata: tuple[tuple[str, str | bytes], ...]
) -> None:
    """Also what HTTP/2 would not have, and gRPC's own clients send and servers take."""
    call = door.stub.StreamGenerate(REQUEST, metadata=metadata, timeout=20)
    assert ids_of([message async for message in call]) == WORDS


@pytest.mark.parametrize(
    "method", ["/baton.inference.v1.InferenceService/Nothing", "/grpc.health.v1.Health/Check"]
)
async def test_what_is_not_served_here_names_the_other_port(door: Door, method: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await door.channel.unary_unary(method)(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "gRPC port (listen)" in (caught.value.details() or "")


async def test_methods_with_one_answer_are_served(door: Door) -> None:
    whole = await door.stub.Generate(api.GenerateRequest(input=ids_input()))
    assert list(whole.choices[0].output.token_ids) == WORDS
    assert (await door.stub.ListModels(api.ListModelsRequest())).models[0].name == "tiny"


async def test_compressed_messages_are_refused_as_grpc_says(door: Door) -> None:
    call = door.stub.StreamGenerate(REQUEST, compression=grpc.Compression.Gzip)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    async with raw(door.address) as client:
        client.greet()
        stream = client.ask(b"", [("grpc-encoding", "gzip")])
        await client.until_ended(stream)
        assert client.answers[stream].headers[b"grpc-accept-encoding"] == b"identity"


async def test_pings_are_answered(door: Door) -> None:
    async with raw(door.address) as client:
        client.greet()
        for _ in range(3):
            client.h2.ping(b"12345678")
        client.flush()
        while client.pongs < 3:
            assert await client.turn()


@pytest.mark.parametrize("window", [7, 100])
async def test_a_tiny_window_gets_the_same_messages(door: Door, window: int) -> None:
    """It is opened by as much as came."""
    door.dispatcher.script = plays(WORDS[:40])
    usual = await read(door.stub, ids_input())
    async with raw(door.address) as client:
        client.greet(window)
        stream = client.ask(REQUEST.SerializeToString())
        await client.until_ended(stream)
    found = [api.StreamGenerateResponse.FromString(one) for one in client.answers[stream].messages]
    assert ids_of(found) == ids_of(usual)
    assert "".join(one.delta.text for one in found) == "".join(one.delta.text for one in usual)
    assert client.answers[stream].frames >= 100 // window
    assert client.answers[stream].status == (0, "")


async def test_streams_that_share_a_small_window_all_end(door: Door) -> None:
    """The connection's window is smaller than the answers; none of them keeps it for itself."""
    door.dispatcher.script = plays(WORDS * 40)
    async with raw(door.address) as client:
        client.greet(1 << 20)
        client.opens_windows = False
        streams = [client.ask(REQUEST.SerializeToString()) for _ in range(8)]
        opened, stalls = 0, 0
        while not all(client.answers[one].ended for one in streams):
            try:
                async with asyncio.timeout(0.1):
                    assert await client.turn()
            except TimeoutError:
                stalls += 1
                taken = sum(len(one.data) for one in client.answers.values())
                if taken > opened:
                    client.h2.increment_flow_control_window(taken - opened)
                    opened = taken
                    client.flush()
        assert stalls
    assert {client.answers[one].status for one in streams} == {(0, "")}
    for one in streams:
        messages = map(api.StreamGenerateResponse.FromString, client.answers[one].messages)
        assert ids_of([*messages]) == WORDS * 40


async def test_a_connection_that_opens_while_the_door_stops_is_sent_away(tmp_path: Path) -> None:
    """Its handshake had not ended."""
    files = of_router(tmp_path)
    dispatcher = ScriptedDispatcher([served_model("/none")], hangs)
    own = DoorCertificate(TlsFiles(cert=files.cert, key=files.key)).http2
    door = FastDoor("127.0.0.1:0", BodyShape(dispatcher.models), 4, 60, tls=own)
    await door.start()
    host, _, port = door.address.rpartition(":")
    bare, trusted = socket.create_connection((host, int(port))), TlsFiles(files.ca)
    await until(lambda: bool(door._connections._open))
    await door.stop(5)
    reader, writer = await asyncio.open_connection(
        sock=bare, ssl=trusted.client_context(), server_hostname="localhost"
    )
    said = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert said.endswith(goaway(0))


async def test_a_door_that_stops_lets_streams_end_and_sends_new_calls_away() -> None:
    goes_on = asyncio.Event()

    async def waits(job: Any) -> AsyncIterator[Any]:
        async for event in plays(WORDS)(job):
            yield event
            await goes_on.wait()

    dispatcher = ScriptedDispatcher([served_model("/none")], waits)  # type: ignore[arg-type]
    service = frontdoor_kit.InferenceService(dispatcher, frontdoor_kit.Tokenizers())
    server, address = await frontdoor_kit.fast_door(service)
    async with raw(address) as client:
        client.greet()
        stream = client.ask(REQUEST.SerializeToString())
        while not client.answers[stream].headers:
            await client.turn()
        stopping = asyncio.create_task(server.stop(20))
        while client.goaway is None:
            assert await client.turn()
        assert client.goaway == 0
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address.split(":"))
        goes_on.set()
        await client.until_ended(stream)
        await asyncio.wait_for(stopping, 20)
    found = map(api.StreamGenerateResponse.FromString, client.answers[stream].messages)
    assert ids_of([*found]) == WORDS
