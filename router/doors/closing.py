"""Closes connections behind what was written to them, within some time."""

from __future__ import annotations

import asyncio

from router.requests.bounds import body_s


def close(transport: asyncio.Transport) -> None:
    """Closes a connection. Its client may read what waits for it, at the pace of a body."""
    if waiting_bytes := transport.get_write_buffer_size():
        asyncio.get_running_loop().call_later(body_s(waiting_bytes), transport.abort)
    transport.close()
