"""The admin port of a process: metrics, health, and what else the process shows there.

Runs inside the process's event loop and leaves its signal handlers alone. Nothing here needs a
token: bind it to an address that only operators and Prometheus reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import uvicorn
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.requests import Request

    Page = Callable[[Request], Awaitable[Response]]

STOP_TIMEOUT_S: Final = 2.0


class AdminServer:
    """Serves /metrics, /health/live, /health/ready and the routes given.

    Args:
        host: to bind to.
        port: 0 takes a free one; see `port`.
        registry: what /metrics shows.
        ready: whether /health/ready answers 200, else 503. /health/live answers as long as the
            event loop runs.
        routes: beside these.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        ready: Callable[[], bool] = lambda: True,
        routes: Sequence[BaseRoute] = (),
    ) -> None:
        self._host = host
        self._wanted_port = port
        self.port = 0
        """Set by `start`."""
        own = (
            Route("/metrics", _metrics_page(registry)),
            Route("/health/live", _health_page(lambda: True)),
            Route("/health/ready", _health_page(ready)),
        )
        config = uvicorn.Config(
            Starlette(routes=[*own, *routes]),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = _EmbeddedServer(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port, once it serves."""
        return f"{self._host}:{self.port}"

    async def start(self) -> None:
        """Binds and serves.

        Raises:
            OSError: the address cannot be bound.
        """
        bound = socket.create_server((self._host, self._wanted_port), family=_family(self._host))
        self.port = bound.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([bound]), name="admin-server")
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        """Ends it; requests under way get a second."""
        if self._task is None:
            return
        self._server.should_exit = True
        _, late = await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
        for task in late:
            task.cancel()


class _EmbeddedServer(uvicorn.Server):
    """Leaves signals to the process that it is part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _metrics_page(registry: CollectorRegistry) -> Page:
    """Collects on the event loop, where the snapshots that it asks for are kept."""

    async def page(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return page


def _health_page(healthy: Callable[[], bool]) -> Page:
    async def page(request: Request) -> Response:
        if healthy():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not ready\n", status_code=503)

    return page


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
