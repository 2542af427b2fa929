"""An HTTP server in the process's own event loop, whose signals it leaves to the process.

Life: bound and serving after `start`; after `leave_port` requests under way go on; after `stop` the
port is free, and they have had a second to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, cast

import uvicorn

if TYPE_CHECKING:
    from starlette.types import ASGIApp

LAST_WORDS_S: Final = 1
STOP_TIMEOUT_S: Final = 2.0
KEEP_ALIVE_S: Final = 75
"""Longer than clients keep idle connections, so that none is closed under a request."""
_POLL_S: Final = 0.005


class EmbeddedHttpServer:
    """Serves an ASGI application. Belongs to the event loop that started it.

    Args:
        listen: HOST:PORT or [V6]:PORT; port 0 takes a free one.
        application: what is served.
        name: of its task.
        reuse_port: share the port with other processes that do so.
        protocol: makes what uvicorn takes for the class of its protocol; None for its own.
    """

    def __init__(
        self,
        listen: str,
        application: ASGIApp,
        name: str,
        *,
        reuse_port: bool = False,
        protocol: Callable[..., asyncio.Protocol] | None = None,
    ) -> None:
        self._host, _, self._port = listen.rpartition(":")
        self._name = name
        self._reuse_port = reuse_port
        self.address = ""
        """HOST:PORT, set by `start`."""
        self._server = _SignalsLeftAlone(
            uvicorn.Config(
                application,
                http=cast("type[asyncio.Protocol]", protocol) if protocol else "auto",
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Binds and serves.

        Raises:
            OSError: the address cannot be bound.
        """
        host = self._host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        where = (host, int(self._port))
        bound = socket.create_server(where, family=family, reuse_port=self._reuse_port)
        self.address = f"{self._host}:{bound.getsockname()[1]}"
        self._task = asyncio.create_task(self._server.serve([bound]), name=self._name)
        while not self._server.started and not self._task.done():
            await asyncio.sleep(_POLL_S)
        if self._task.done():
            await self._task

    def leave_port(self, grace_s: float) -> None:
        """Listens no more and closes idle connections; the others close when the request under way
        has ended, which may take `grace_s` seconds."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True

    async def stop(self) -> None:
        """Ends it."""
        if self._task is None:
            return
        self._server.should_exit = True
        _, late = await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
        for task in late:
            task.cancel()


class _SignalsLeftAlone(uvicorn.Server):
    """Takes no signal handler away."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
