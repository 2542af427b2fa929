"""Which web pages may use the HTTP door, and under which names it answers.

A page in a browser can send requests to any address that the browser reaches, so also to a server
that listens on this machine alone. Three rules keep it out:

- A body is taken only with the content type `application/json`. A page may send that to another
  origin only after a preflight (`bodies`). A form may come without one: its origin is looked at
  (`refuse_foreign`).
- A preflight is answered with yes for the origins of `allowed_origins` alone, of which there are
  none by default.
- A door on a loopback address answers to the names of this machine alone. Otherwise a page could
  have its own name resolved to 127.0.0.1 (DNS rebinding) and be of the same origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from router import errors
from router.doors.http import statuses
from serving.embedded_http import local_alone

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp


def refuse_foreign(request: Request, allowed_origins: Sequence[str]) -> None:
    """Refuses a form that a page of another origin sent.

    Raises:
        RouterError: PERMISSION_DENIED.
    """
    origin = request.headers.get("origin")
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    if origin is not None and not {origin, "*"} & set(allowed_origins) and origin != own:
        raise errors.permission_denied("pages of this origin may not call")


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
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    message = "a door on a loopback address answers to localhost and loopback addresses alone"
    body = statuses.body(message, "permission_error", None, "wrong_host")
    return local_alone(application, listen, JSONResponse(body, 403))
