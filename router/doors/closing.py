"""Closes connections behind what was written to them, within some time."""

from __future__ import annotations

import asyncio

from router.requests.bounds import BODY_BYTES_A_SECOND, BODY_GRACE_S


def close(transport: asyncio.Transport) -> None:
    """Closes a connection. Its client may read what waits for it, at the pace of a body."""
    if waiting_bytes := transport.get_write_buffer_size():
        rest_s = BODY_GRACE_S + waiting_bytes / BODY_BYTES_A_SECOND
        asyncio.get_running_loop().call_later(rest_s, transport.abort)
    transport.close()
