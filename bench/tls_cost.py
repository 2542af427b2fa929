"""What TLS costs at a router's doors: the time of a call, and calls a second.

    python -m bench.tls_cost [--seconds S]

The calls ask a router that has no worker for its models (gRPC) and for its health (HTTP), so hardly
anything but the connection takes time. Each line is measured in clear, over TLS, and over TLS with
a client's certificate, in turns, so that all meet the same machine. Clients are a process of their
own. `bench.stream_cost --crowd --tls` has the cost of streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from baton.client.channels import TLS_SCHEME, open_aio_channel
from baton.grpc_options import client_options
from baton.inference.v1 import inference_pb2 as api
from baton.inference.v1 import inference_pb2_grpc
from baton.tls import NO_FILES, TlsFiles, holders_files
from router.server import RouterServer
from router.settings import RouterSettings
from serving.event_loop import loop_factory
from serving.net.certificates import write_set

ANY: Final = "127.0.0.1:0"
TURNS: Final = 5
AT_ONCE: Final = 16
REQUEST: Final = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
Ask = Callable[[], Awaitable[object]]
WAYS: Final = ("in clear", "TLS", "TLS, client's certificate")


def settings(way: str, certs: str) -> RouterSettings:
    """Settings of a router whose doors go one of the ways."""
    files = holders_files(certs, "router") if way != WAYS[0] else NO_FILES
    return RouterSettings(
        listen=ANY,
        internal_listen=ANY,
        http_listen=ANY,
        admin=ANY,
        drain_grace_s=0,
        log_level="error",
        tls_door_cert=files.cert,
        tls_door_key=files.key,
        tls_client_ca=files.ca if way == WAYS[2] else "",
    )


async def measure(address: str, http: str, files: TlsFiles, seconds: float) -> dict[str, float]:
    """As a client: milliseconds of a call, and calls a second."""
    found = {}
    async with AsyncExitStack() as stack:
        scheme = TLS_SCHEME if any(files) else ""
        channels = [
            open_aio_channel(f"{scheme}{address}", client_options(retries=False), files)
            for _ in range(2)
        ]
        stubs = [
            inference_pb2_grpc.InferenceServiceStub(await stack.enter_async_context(one))
            for one in channels
        ]
        context = files.client_context() if any(files) else None
        pages = [await stack.enter_async_context(Page(http, context)) for _ in range(AT_ONCE)]

        async def dial_grpc() -> None:
            channel = open_aio_channel(f"{scheme}{address}", client_options(retries=False), files)
            async with channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                await stub.ListModels(api.ListModelsRequest())

        async def dial_http() -> None:
            async with Page(http, context) as page:
                await page.ask()

        grpc_calls: list[Ask] = [
            lambda stub=stub: stub.ListModels(api.ListModelsRequest())  # type: ignore[misc]
            for stub in stubs * (AT_ONCE // 2)
        ]
        measured: tuple[tuple[str, list[Ask]], ...] = (
            ("gRPC, new connection, ms", [dial_grpc]),
            ("HTTP, new connection, ms", [dial_http]),
            ("gRPC, open connection, ms", grpc_calls[:1]),
            ("HTTP, open connection, ms", [pages[0].ask]),
            ("gRPC, 16 at once, calls/s", grpc_calls),
            ("HTTP, 16 at once, calls/s", [page.ask for page in pages]),
        )
        for name, calls in measured:
            times_s, took_s = await called(calls, seconds)
            is_rate = len(calls) > 1
            found[name] = len(times_s) / took_s if is_rate else statistics.median(times_s) * 1e3
    return found


async def called(calls: list[Ask], seconds: float) -> tuple[list[float], float]:
    """Makes calls for a while, each again and again. Returns their times and the time in all."""
    times_s: list[float] = []
    began_s = time.perf_counter()

    async def again(call: Ask) -> None:
        while time.perf_counter() - began_s < seconds:
            sent_s = time.perf_counter()
            await call()
            times_s.append(time.perf_counter() - sent_s)

    await asyncio.gather(*map(again, calls))
    return times_s, time.perf_counter() - began_s


class Page:
    """A connection to the HTTP door."""

    def __init__(self, address: str, context: ssl.SSLContext | None) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._context = context

    async def __aenter__(self) -> Page:
        name = "localhost" if self._context else None
        self._reader, self._writer = await asyncio.open_connection(
            self._host, int(self._port), ssl=self._context, server_hostname=name
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()

    async def ask(self) -> None:
        """One request and its answer, which has no body."""
        self._writer.write(REQUEST)
        await self._reader.readuntil(b"\r\n\r\n")


async def run(certs: str, seconds: float) -> dict[str, dict[str, list[float]]]:
    """All ways in turns, by what is measured."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(TURNS):
        for way in WAYS:
            server = RouterServer(settings(way, certs))
            await server.start()
            files = holders_files(certs, "bench") if way != WAYS[0] else NO_FILES
            if way == WAYS[1]:
                files = TlsFiles(files.ca)
            order = json.dumps([server.address, server.http_address, *files[:3], seconds])
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.tls_cost", "--client", order),
                stdout=asyncio.subprocess.PIPE,
            )
            said, _ = await process.communicate()
            for name, figure in json.loads(said).items():
                found.setdefault(name, {}).setdefault(way, []).append(figure)
            await server.stop()
    return found


def main() -> None:
    """Prints a table: the median of the turns, and their range."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each figure")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if given.client:
            address, http, ca, cert, key, seconds = json.loads(given.client)
            files = TlsFiles(ca, cert, key)
            print(json.dumps(runner.run(measure(address, http, files, seconds))))
            return
        with tempfile.TemporaryDirectory() as certs:
            write_set(Path(certs), ("bench",), (), days=1)
            found = runner.run(run(certs, given.seconds))
    print(f"| | {' | '.join(WAYS)} |\n|---|---|---|---|")
    for name, ways in found.items():
        cells = (
            f"{statistics.median(got):.3g} ({min(got):.3g}-{max(got):.3g})"
            for got in (ways[way] for way in WAYS)
        )
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
