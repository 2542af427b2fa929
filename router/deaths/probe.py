"""Whether a worker's process is gone, as far as this host's kernel knows."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
from typing import Final

from router.workers.life import Loss

_PROBE_TIMEOUT_S: Final = 2.0
"""For an answer of this host's own kernel."""
_PROBE_AGAIN_S: Final = 0.01
"""A listener's port may answer for a moment after its process has ended."""


async def process_is_gone(address: str, loss: Loss, hello: bytes = b"") -> bool:
    """Whether the worker's process is proven to be gone.

    Args:
        address: where it listened.
        loss: how its stream ended.
        hello: what makes a living server answer; b"" if it speaks first.

    Pages that it could still write stay quarantined until that is certain, so any doubt means no.
    It is certain if all of this holds:

    - The worker's kernel closed the connection, without the goodbye that gRPC sends when a server
      stops. The kernel closes a process's sockets when its last thread has left user mode. A ping
      timeout or a counter that stands still proves nothing: a stopped process still has its memory
      mapped and goes on with its writes when it wakes.
    - Connecting to its address is refused, so nobody listens there any more. A process that lost
      only this one connection would still listen.
    - The address is this host's own, so both facts come from this kernel and not from a proxy.

    A dying process loses its connections before its listening socket. So if the port still accepts,
    this connects and reads. A living server sends first, or answers the `hello`. A connection that
    a dead one had accepted is reset.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if loss is not Loss.SOCKET_CLOSED or not _is_loopback(host):
        return False
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            while not await _has_a_word(host, int(port), hello):
                await asyncio.sleep(_PROBE_AGAIN_S)
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False


async def _has_a_word(host: str, port: int, hello: bytes) -> bool:
    """Whether a server sends before it closes.

    Raises:
        OSError: nobody listens there.
    """
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(hello)
        return bool(await reader.read(1))
    except (ConnectionResetError, BrokenPipeError):
        return False
    finally:
        writer.close()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
