"""The target of a request: its path, as the routes have it.

A target may be a whole URL, as proxies send it: a server must take it, and its host stands for the
header `Host` (RFC 9112, 3.2.2). A slash at the end of a path means nothing here: clients join paths
to base URLs that end in one, and do not follow a redirect with a body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class Targets:
    """Gives requests the paths that the application knows."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] == "http":
            scope = _plain(scope)
        await self._application(scope, receive, send)


def _plain(scope: Scope) -> Scope:
    path, headers = scope["path"], scope["headers"]
    if path.lower().startswith(("http://", "https://")):
        raw = scope["raw_path"].decode("latin-1")
        parts = urlsplit(raw)
        path = unquote(parts.path) or "/"
        others = [(name, value) for name, value in headers if name.lower() != b"host"]
        headers = [(b"host", parts.netloc.rpartition("@")[2].encode("latin-1")), *others]
    path = path.rstrip("/") or "/"
    if path == scope["path"]:
        return scope
    return {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
