"""An HTTP server in the process's own event loop. The process keeps its signal handlers.

Life: `start` binds the port and serves. `leave_port` stops listening; requests under way go on.
`stop` frees the port and gives requests under way a second to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, cast

import uvicorn
from starlette.datastructures import Headers

from baton.addresses import host_of, is_loopback
from serving.listening import bind

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LAST_WORDS_S: Final = 1
STOP_TIMEOUT_S: Final = 2.0
KEEP_ALIVE_S: Final = 75
"""Seconds that idle connections stay open. Clients close theirs earlier, so none is closed just
when a request comes."""
_POLL_S: Final = 0.005
"""So often it is looked whether uvicorn listens; it says so by a flag alone."""


class EmbeddedHttpServer:
    """Serves an ASGI application. Belongs to the event loop that started it.

    Args:
        listen: HOST:PORT or [V6]:PORT; port 0 takes a free one.
        application: the application to serve.
        name: name of the server's task.
        reuse_port: whether to share the port with other processes that set this.
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
        self._listen = listen
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
        bound, self.address = bind(self._listen, reuse_port=self._reuse_port)
        self._task = asyncio.create_task(self._server.serve([bound]), name=self._name)
        while not self._server.started and not self._task.done():
            await asyncio.sleep(_POLL_S)
        if self._task.done():
            await self._task

    def leave_port(self, grace_s: float) -> None:
        """Stops listening and closes idle connections. The others close when their request has
        ended, after `grace_s` seconds at the latest."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True

    async def stop(self) -> None:
        """Stops the server."""
        if self._task is None:
            return
        self._server.should_exit = True
        _, late = await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
        for task in late:
            task.cancel()


class _SignalsLeftAlone(uvicorn.Server):
    """A server that installs no signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def local_alone(application: ASGIApp, listen: str, refusal: ASGIApp) -> ASGIApp:
    """The application. If it listens on a loopback address, requests whose `Host` is not a name of
    this machine get the refusal. A web page could have its own name resolved to 127.0.0.1 (DNS
    rebinding). Then a browser takes what listens there for a part of that page's site, and lets
    the page read it. An address in `Host` is no such name."""
    return _LocalNames(application, refusal) if is_loopback(host_of(listen)) else application


class _LocalNames:
    def __init__(self, application: ASGIApp, refusal: ASGIApp) -> None:
        self._application = application
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = _named(Headers(scope=scope).get("host", "")) if scope["type"] == "http" else ""
        is_ours = not host or is_loopback(host)
        await (self._application if is_ours else self._refusal)(scope, receive, send)


def _named(header: str) -> str:
    """The name in a `Host` header; "" where there is none, as browsers never do it."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
