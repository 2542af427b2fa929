"""The admin port of a process: metrics, health, and further pages of the process.

It asks for no token: bind it to an address that only operators and Prometheus reach. On a loopback
address it answers to names of this machine alone, so that no web page reads it.

It asks for a token where something would change: every method but GET and HEAD needs an operator's,
the setting `operator_token`. Without one set nothing can be changed there. The one exception is the
page of failpoints, which only tests have.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from faults import failpoints
from serving.embedded_http import EmbeddedHttpServer, local_alone

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    Page = Callable[[Request], Awaitable[Response]]


FAILPOINTS: Final = "/failpoints"


class AdminServer(EmbeddedHttpServer):
    """Serves /metrics, /health/live, /health/ready and the routes given.

    Args:
        listen: HOST:PORT; port 0 takes a free one.
        registry: the metrics that /metrics shows.
        ready: whether /health/ready answers 200, else 503. /health/live answers as long as the
            event loop runs.
        routes: further routes.
        operator_token: what callers show who change something; empty: nobody may.
    """

    def __init__(
        self,
        listen: str,
        registry: CollectorRegistry,
        ready: Callable[[], bool] = lambda: True,
        routes: Sequence[BaseRoute] = (),
        operator_token: str = "",
    ) -> None:
        own = (
            metrics_route(registry),
            Route("/health/live", _health_page(lambda: True)),
            Route("/health/ready", _health_page(ready)),
        )
        tests = [_failpoints_route()] if failpoints.is_live() else []
        application = OperatorsAlone(Starlette(routes=[*own, *tests, *routes]), operator_token)
        words = (
            "an admin port on a loopback address answers to localhost and loopback addresses alone"
        )
        refusal = PlainTextResponse(f"{words}\n", 403)
        super().__init__(listen, local_alone(application, listen, refusal), "admin-server")


def is_operator(token: str, authorization: str) -> bool:
    """Whether a caller shows the operator's token, as `Bearer TOKEN`: one rule for all commands
    that change something."""
    return bool(token) and hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())


class OperatorsAlone:
    """Refuses requests that would change something, unless an operator sends them."""

    def __init__(self, application: ASGIApp, token: str) -> None:
        self._application = application
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        changes = scope["type"] == "http" and scope["method"] not in ("GET", "HEAD")
        shown = Headers(scope=scope).get("authorization", "") if changes else ""
        if changes and scope["path"] != FAILPOINTS and not is_operator(self._token, shown):
            refusal = PlainTextResponse("this needs the token of the setting operator_token\n", 403)
            await refusal(scope, receive, send)
            return
        await self._application(scope, receive, send)


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

    return Route(FAILPOINTS, page, methods=["GET", "POST"])


def _health_page(healthy: Callable[[], bool]) -> Page:
    async def page(request: Request) -> Response:
        if healthy():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not ready\n", status_code=503)

    return page
