"""Channels as they are opened everywhere."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.grpc_options import channel_options, server_options
from serving.grpc_services import add_health_and_reflection

SLOW_S = 0.6
"""A handshake over a long way, or on a busy machine."""


async def test_a_slow_handshake_is_no_unreachable_server() -> None:
    """gRPC takes its least time between attempts to connect for the time that one may take."""
    server = grpc.aio.server(options=server_options())
    await add_health_and_reflection(server, ())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(SLOW_S)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    slow = await asyncio.start_server(relay, "127.0.0.1", 0)
    address = f"127.0.0.1:{slow.sockets[0].getsockname()[1]}"
    try:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        slow.close()
        await server.stop(None)
