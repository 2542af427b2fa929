"""A router between workers that have certificates, some of them of somebody else."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from certificate_kit import (
    EXPIRED,
    of_pool,
    of_router,
    settings_of_door,
    settings_of_member,
    written,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from router_kit import a_router
from scripted_worker import DECODE, ScriptedWorker, until

from baton.client.clients import AsyncClient
from baton.errors import UnreachableError
from baton.tls import NO_FILES, TlsFiles
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from console.cli import explain
from console.health import SERVING, check_at
from router.requests.bounds import ConnectionLimits
from router.server import RouterServer
from serving.event_loop import loop_factory
from serving.net.internal_net import ROUTER_NAME, TlsNet, agent_name
from serving.net.refusals import Refusals
from worker.announcer import announce_forever
from worker.router_addresses import RouterAddresses
from worker.stream import WorkerServicer

Announce = Callable[[TlsFiles, worker_pb2.WorkerIdentity], Awaitable[Any]]


def net_of(files: TlsFiles) -> TlsNet:
    return TlsNet(files, Refusals())


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[RouterServer]:
    async with a_router(**settings_of_member(of_router(tmp_path / "router"))) as router:
        yield router


async def a_worker(name: str, net: TlsNet) -> ScriptedWorker:
    worker = ScriptedWorker(name, DECODE)
    worker.identity.endpoint.agent_name = agent_name(name, worker.identity.epoch)
    await worker.start(net=net)
    return worker


async def announced(
    router: RouterServer, files: TlsFiles, worker: worker_pb2.WorkerIdentity
) -> str:
    """What the router answers: `OK`, or a status and its details."""
    async with net_of(files).open_aio(router.internal_address, ROUTER_NAME) as channel:
        registry = worker_pb2_grpc.RegistryServiceStub(channel)
        try:
            await registry.Announce(worker_pb2.AnnounceRequest(worker=worker), timeout=5)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "OK"


def refused(router: RouterServer, cause: str) -> float | None:
    return router.metrics.registry.get_sample_value("baton_peers_refused_total", {"cause": cause})


async def test_a_worker_joins_by_its_own_name_alone(
    router: RouterServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = net_of(of_pool(tmp_path / "decode", "decode"))
    worker = await a_worker("decode-0", net)
    with RouterAddresses([router.internal_address]) as routers:
        announcing = asyncio.create_task(announce_forever(routers, worker.identity, net))
        await until(lambda: [link.worker_id for link in router.registry.members] == ["decode-0"])
        announcing.cancel()

    foreign = of_pool(tmp_path / "prefill", "prefill")
    said = await announced(router, foreign, worker.identity)
    assert said.startswith("PERMISSION_DENIED: worker decode-0 refused: its certificate is not of")
    assert refused(router, "name") == 1
    told = next(one for one in caplog.records if one.message == "peer refused")
    assert told.worker == "decode-0"  # type: ignore[attr-defined]
    assert "prefill-*" in told.cause  # type: ignore[attr-defined]

    posing = worker_pb2.WorkerIdentity()
    posing.CopyFrom(worker.identity)
    posing.worker_id = "prefill-0"  # its own name, and the agent of another
    assert "its agent calls itself decode-0-" in await announced(router, foreign, posing)
    assert refused(router, "name") == 2
    await worker.stop()


async def test_a_worker_that_names_the_port_of_another_is_refused(
    router: RouterServer, tmp_path: Path
) -> None:
    """By its certificate, before the router has sent a word."""
    real = await a_worker("decode-0", net_of(of_pool(tmp_path / "decode", "decode")))
    posing = worker_pb2.WorkerIdentity()
    posing.CopyFrom(real.identity)
    posing.worker_id, posing.endpoint.agent_name = "prefill-0", ""
    files = of_pool(tmp_path / "prefill", "prefill")
    assert await announced(router, files, posing) == "OK"
    await until(lambda: refused(router, "certificate"))
    assert router.registry.members == []
    assert real.history == []
    await real.stop()


@pytest.mark.parametrize("made", [{"by": "foreign"}, EXPIRED, None], ids=["foreign", "old", "none"])
async def test_who_has_no_valid_certificate_is_refused_named_and_counted(
    router: RouterServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    made: dict[str, Any] | None,
) -> None:
    monkeypatch.setattr("serving.net.refusals.FIRST_CALL_S", 0.2)
    files = written(tmp_path / "worker", ("decode", "decode-*"), **(made or {}))
    if made is None:
        files = files._replace(cert="", key="")
    shown = files.channel_credentials()
    options = [("grpc.ssl_target_name_override", ROUTER_NAME), ("grpc.enable_retries", 0)]
    async with grpc.aio.secure_channel(router.internal_address, shown, options) as channel:
        registry = worker_pb2_grpc.RegistryServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await registry.Announce(worker_pb2.AnnounceRequest(), timeout=5)
    await until(lambda: refused(router, "handshake"))
    told = next(one for one in caplog.records if one.message.startswith("connections refused"))
    assert told.hosts == "127.0.0.1"  # type: ignore[attr-defined]


async def test_a_router_in_clear_is_told_from_one_with_tls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And so is somebody who poses as a router: a worker gives its announcement to no one else."""
    net = net_of(of_pool(tmp_path / "decode", "decode"))
    heard: list[str] = []

    class Rogue(worker_pb2_grpc.RegistryServiceServicer):
        async def Announce(self, request: Any, context: Any) -> worker_pb2.AnnounceResponse:
            heard.append(request.worker.worker_id)
            return worker_pb2.AnnounceResponse()

    rogue = grpc.aio.server()
    worker_pb2_grpc.add_RegistryServiceServicer_to_server(Rogue(), rogue)
    address = net_of(of_pool(tmp_path / "prefill", "prefill")).bind(rogue, "127.0.0.1:0")
    await rogue.start()
    worker = await a_worker("decode-0", net)
    with RouterAddresses([address]) as routers:
        announcing = asyncio.create_task(announce_forever(routers, worker.identity, net))
        await until(lambda: net.refusals.counts["certificate"])
        announcing.cancel()
    assert heard == []
    assert "it shows no valid certificate of a router" in [
        getattr(one, "cause", "") for one in caplog.records
    ]
    await rogue.stop(None)
    await worker.stop()


async def test_a_worker_serves_routers_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = net_of(of_pool(tmp_path / "decode", "decode"))
    identity = worker_pb2.WorkerIdentity(worker_id="decode-0")
    server = grpc.aio.server()
    servicer = WorkerServicer(identity, None, None, net)  # type: ignore[arg-type]  # unreached
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    address = net.bind(server, "127.0.0.1:0")
    await server.start()

    async def work(files: TlsFiles) -> str:
        async with net_of(files).open_aio(address, "decode") as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Work(timeout=5)
            try:
                await call.write(worker_pb2.WorkRequest())
                await call.read()
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            return f"{(await call.code()).name}: {await call.details()}"

    said = await work(of_pool(tmp_path / "prefill", "prefill"))
    assert said.startswith("PERMISSION_DENIED: its certificate lacks baton://router")
    assert net.refusals.counts["not_a_router"] == 1
    assert "prefill-*" in next(
        one.cause  # type: ignore[attr-defined]
        for one in caplog.records
        if one.message == "peer refused"
    )
    said = await work(of_router(tmp_path / "router"))
    assert said == "INVALID_ARGUMENT: the first message is attach"  # a router gets further
    await server.stop(None)


SERVER = """
import asyncio, sys
import grpc.aio
from serving.net.internal_net import TlsNet
from serving.net.refusals import Refusals
from baton.tls import TlsFiles

async def main():
    server = grpc.aio.server()
    print(TlsNet(TlsFiles(*sys.argv[1:4]), Refusals()).bind(server, "127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@asynccontextmanager
async def a_server(files: TlsFiles) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process that shakes hands, and its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, *files),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "GRPC_VERBOSITY": "info"},
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_grpcs_log_has_the_reason_of_each_refused_handshake(tmp_path: Path) -> None:
    async with a_server(of_router(tmp_path / "router")) as (process, address):
        wrong = {"has expired": EXPIRED, "local issuer certificate": {"by": "foreign"}}
        for why, made in wrong.items():
            files = written(tmp_path / "worker", ("decode", "decode-*"), **made)  # type: ignore[arg-type]
            options = (("grpc.ssl_target_name_override", ROUTER_NAME),)
            credentials = files.channel_credentials()
            async with grpc.aio.secure_channel(address, credentials, options) as channel:
                registry = worker_pb2_grpc.RegistryServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError):
                    await registry.Announce(worker_pb2.AnnounceRequest(), timeout=5)
            assert process.stderr is not None
            async with asyncio.timeout(10):
                while why not in (await process.stderr.readline()).decode():
                    pass


async def test_spans_are_taken_from_members_alone(tmp_path: Path) -> None:
    settings = settings_of_member(of_router(tmp_path / "router"))
    async with a_router(trace_store=True, **settings) as router:

        async def export(channel: grpc.aio.Channel) -> None:
            stub = trace_service_pb2_grpc.TraceServiceStub(channel)
            await stub.Export(trace_service_pb2.ExportTraceServiceRequest(), timeout=5)

        net = net_of(of_pool(tmp_path / "decode", "decode"))
        async with net.open_aio(router.internal_address, ROUTER_NAME) as channel:
            await export(channel)
        async with grpc.aio.insecure_channel(router.internal_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await export(channel)
        foreign = written(tmp_path / "foreign", ("decode",), by="foreign")
        options = (("grpc.ssl_target_name_override", ROUTER_NAME),)
        async with grpc.aio.secure_channel(
            router.internal_address, foreign.channel_credentials(), options
        ) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await export(channel)


@pytest.mark.parametrize("client_ca", [False, True], ids=["anybody", "with a certificate"])
async def test_doors_speak_tls(tmp_path: Path, client_ca: bool) -> None:
    files = of_router(tmp_path / "router")
    settings = settings_of_door(files) | ({"tls_client_ca": files.ca} if client_ca else {})
    own = of_pool(tmp_path / "client", "client")
    async with a_router(**settings, fast_listen="127.0.0.1:0") as router:
        assert router.fast_door is not None
        for address in (router.address, router.fast_door.address):
            async with AsyncClient(
                f"grpcs://{address}", tls_ca=files.ca, tls_cert=own.cert, tls_key=own.key
            ) as client:
                assert await client.models() == ()
        mine, others = TlsFiles(ca=files.ca), of_pool(tmp_path / "other", "other")
        assert await said_over_https(router.http_address, own) == 503  # no model yet
        for wrong in (mine,) if client_ca else ():
            with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
                await said_over_https(router.http_address, wrong)
            for address in (router.address, router.fast_door.address):
                async with AsyncClient(
                    f"grpcs://{address}", tls_ca=wrong.ca, retries=False
                ) as client:
                    with pytest.raises(UnreachableError):
                        await client.models(timeout_s=10.0)
        if not client_ca:
            assert await said_over_https(router.http_address, mine) == 503
        health = await asyncio.to_thread(check_at, f"grpcs://{router.address}", "", 5.0, others)
        assert health == SERVING
        in_clear = await asyncio.to_thread(check_at, router.address, "", 1.0, NO_FILES)
        assert in_clear != SERVING
        for address, why in (
            (router.address, "speaks TLS"),
            (f"grpcs://{router.address}", "is not trusted: --tls-ca names its CA"),
            (router.admin.address, "speaks HTTP/1 and was asked by gRPC"),
        ):
            async with AsyncClient(address, retries=False) as client:
                with pytest.raises(UnreachableError) as caught:
                    await client.models(timeout_s=10.0)
            told = await asyncio.to_thread(explain, caught.value)
            assert told is not None
            assert why in told[0]


def test_the_door_opens_on_the_event_loop_of_processes_too(tmp_path: Path) -> None:
    """uvloop, which reads the first bytes sooner."""

    async def ask() -> list[int]:
        files = of_router(tmp_path)
        async with a_router(**settings_of_door(files)) as router:
            asked = (said_over_https(router.http_address, TlsFiles(files.ca)) for _ in range(20))
            return await asyncio.gather(*asked)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert runner.run(ask()) == [503] * 20


async def said_over_https(address: str, files: TlsFiles) -> int:
    """The status of /health."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=files.client_context(), server_hostname="localhost"
    )
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        line = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
        return int(line.split()[1])
    finally:
        writer.close()
        with suppress(ssl.SSLError, ConnectionError):
            await writer.wait_closed()


async def test_a_client_that_never_shakes_hands_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.doors.http.connections.HEADERS_S", 0.3)
    async with a_router(**settings_of_door(of_router(tmp_path))) as router:
        host, _, port = router.http_address.rpartition(":")
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(words)
            with suppress(ConnectionError):
                while await asyncio.wait_for(reader.read(100), 10):
                    pass
            writer.close()


async def test_a_client_that_does_not_shake_hands_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as a connection from the begin, as in clear."""
    one = ConnectionLimits(grpc=1, http=1)
    monkeypatch.setattr("router.doors.openai.server.most_connections", lambda: one)
    files = of_router(tmp_path)
    async with a_router(**settings_of_door(files)) as router:
        host, _, port = router.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(0.1)
        assert await said_over_https(router.http_address, TlsFiles(files.ca)) == 503
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(1), 5) == b""
        writer.close()


async def test_figures_and_descriptions_stay_inside_if_wanted(tmp_path: Path) -> None:
    async def get(router: RouterServer) -> int:
        host, _, port = router.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        writer.close()
        return status

    async def describes(router: RouterServer) -> bool:
        async with grpc.aio.insecure_channel(router.address) as channel:
            call = channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
            )()
            try:
                await call.write(b"")
                return await call.read() is not grpc.aio.EOF
            except grpc.aio.AioRpcError as error:
                return error.code() is not grpc.StatusCode.UNIMPLEMENTED

    async with a_router() as router:
        assert (await get(router), await describes(router)) == (200, True)
    async with a_router(door_metrics=False, reflection=False) as router:
        assert (await get(router), await describes(router)) == (404, False)
