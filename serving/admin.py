"""The admin port of a process: metrics, health, and further pages of the process.

It asks for no token: bind it to an address that only operators and Prometheus reach. On a loopback
address it answers to names of this machine alone, so that no web page reads it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from faults import failpoints
from serving.embedded_http import EmbeddedHttpServer, local_alone

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.requests import Request

    Page = Callable[[Request], Awaitable[Response]]


class AdminServer(EmbeddedHttpServer):
    """Serves /metrics, /health/live, /health/ready and the routes given.

    Args:
        listen: HOST:PORT; port 0 takes a free one.
        registry: the metrics that /metrics shows.
        ready: whether /health/ready answers 200, else 503. /health/live answers as long as the
            event loop runs.
        routes: further routes.
    """

    def __init__(
        self,
        listen: str,
        registry: CollectorRegistry,
        ready: Callable[[], bool] = lambda: True,
        routes: Sequence[BaseRoute] = (),
    ) -> None:
        own = (
            metrics_route(registry),
            Route("/health/live", _health_page(lambda: True)),
            Route("/health/ready", _health_page(ready)),
        )
        tests = [_failpoints_route()] if failpoints.is_live() else []
        application = Starlette(routes=[*own, *tests, *routes])
        words = (
            "an admin port on a loopback address answers to localhost, 127.0.0.1 and [::1] alone"
        )
        refusal = PlainTextResponse(f"{words}\n", 403)
        super().__init__(listen, local_alone(application, listen, refusal), "admin-server")


def metrics_route(registry: CollectorRegistry) -> Route:
    """Makes the route `/metrics`, which answers in a format that the caller accepts.

    It collects on the event loop, to which the snapshots belong.
    """

    async def page(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return Route("/metrics", page)


def _failpoints_route() -> Route:
    """Makes the route `/failpoints`: POST arms failpoints, GET counts hits. See `failpoints`."""

    async def page(request: Request) -> Response:
        if request.method == "POST":
            specification = (await request.body()).decode(errors="replace")
            try:
                failpoints.arm(f"{failpoints.LIVE},{specification}")
            except failpoints.FailpointsError as error:
                return PlainTextResponse(f"{error}\n", status_code=400)
        return JSONResponse(failpoints.counts())

    return Route("/failpoints", page, methods=["GET", "POST"])


def _health_page(healthy: Callable[[], bool]) -> Page:
    async def page(request: Request) -> Response:
        if healthy():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not ready\n", status_code=503)

    return page
