"""Which web pages may use the HTTP door, and under which names it answers.

A page in a browser can send requests to any address that the browser reaches, so also to a server
that listens on this machine alone. Three rules keep it out:

- A body is taken only with the content type `application/json`. A page may send that to another
  origin only after a preflight (`bodies`).
- A preflight is answered with yes for the origins of `allowed_origins` alone, of which there are
  none by default.
- A door on a loopback address answers to the names of this machine alone. Otherwise a page could
  have its own name resolved to 127.0.0.1 (DNS rebinding) and be of the same origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from baton.addresses import host_of, is_loopback
from router.doors.http import statuses

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL_NAMES: Final = frozenset(("localhost", "127.0.0.1", "::1"))
"""Names under which a door on a loopback address is called."""


def guarded(application: ASGIApp, listen: str, allowed_origins: Sequence[str]) -> ASGIApp:
    """The application behind both checks.

    Args:
        application: the door.
        listen: its HOST:PORT.
        allowed_origins: such as `https://chat.example`; `*` is any.
    """
    if allowed_origins:
        application = CORSMiddleware(
            application,
            allow_origins=list(allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return LocalNames(application) if is_loopback(host_of(listen)) else application


class LocalNames:
    """Refuses requests whose `Host` is not a name of this machine."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        host = _named(Headers(scope=scope).get("host", "")) if scope["type"] == "http" else ""
        if not host or host.lower() in LOCAL_NAMES:
            await self._application(scope, receive, send)
            return
        message = "a door on a loopback address answers to localhost, 127.0.0.1 and [::1] alone"
        body = statuses.body(message, "permission_error", None, "wrong_host")
        await JSONResponse(body, 403)(scope, receive, send)


def _named(header: str) -> str:
    """The name in a `Host` header; "" where there is none, as browsers never do it."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
