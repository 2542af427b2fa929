"""Clients that close their own side of an HTTP connection behind a request, and read on.

That looks like a client that has left. So the connection stays until the answer is out, and is
written to meanwhile: the system of a client that has left answers with a reset, and the next write
fails. With TLS, HTTP/1.0, several requests in a row, or one that is not whole, the client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from router.doors.closing import close

_INTERIM: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Any client of HTTP/1.1 skips it."""
_GAPS_S: Final = (0.1, 0.9)
"""Times between interim answers; not tuned. The first one provokes the reset, one of the others
finds it, also on a long way. Go's clients take five."""


def awaited(inner: asyncio.Protocol) -> Any:
    """uvicorn's state of the request whose answer a client that sends no more may await; None:
    there is none."""
    cycle = getattr(inner, "cycle", None)
    if cycle is None or cycle.more_body or cycle.response_complete:
        return None
    is_alone = not getattr(inner, "pipeline", None)
    return cycle if is_alone and cycle.scope["http_version"] == "1.1" else None


class HalfClosed:
    """A connection that stays until an answer is out, or the client has left.

    Args:
        transport: that of the connection.
        cycle: uvicorn's state of the request.
        write: writes to the connection, in the order of all that is written.
        filler: what may be written within the answer; empty: nothing.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        cycle: Any,
        write: Callable[[bytes], None],
        filler: Callable[[], bytes],
    ) -> None:
        self._transport = transport
        self._cycle = cycle
        self._write, self._filler = write, filler
        self._write_interim(_GAPS_S)

    def close_if_answered(self) -> None:
        """A request has ended."""
        if self._cycle.response_complete:
            close(self._transport)

    def _write_interim(self, gaps_s: tuple[float, ...]) -> None:
        """Finds out whether the client has left, while no other write does."""
        if self._transport.is_closing() or self._cycle.response_complete:
            return
        if interim := self._filler() if self._cycle.response_started else _INTERIM:
            self._write(interim)
        if gaps_s:
            later = asyncio.get_running_loop().call_later
            later(gaps_s[0], self._write_interim, gaps_s[1:])
