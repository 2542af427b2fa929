"""A server over HTTP, to which the lines of a batch are sent."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Self
from urllib.parse import urlsplit

from baton.tls import TlsFiles
from console.tls_hint import over_http
from router.batching.lines import BatchError
from router.batching.running import Answer, NobodyError
from serving.output import stderr

_NO_SUCH_PATH: Final = (404, 405)
"""Statuses of servers that have no such path at all, where their body is no JSON."""
_NO_ROUTER: Final = (200, 403, 501)
"""Statuses of servers that are no router, where no body so far is JSON: of pages, a router's admin
port, a server of files. Later a proxy may answer so to one line."""
ANSWER_S: Final = 3600.0
"""Longest wait for an answer. The server's own bound on a request is the one that counts."""


def is_url(text: str) -> bool:
    """Whether requests can be sent there."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # Its port is no number.
        return False


class Server:
    """A server. Each thread has a connection of its own.

    Args:
        url: of its API, with or without /v1.
        at_once: most requests at the same time.
        key: token to show.
        files: of TLS.
    """

    def __init__(self, url: str, at_once: int, key: str = "", files: TlsFiles | None = None):
        parts = urlsplit(url)
        self._host, self._path = parts.netloc, parts.path.rstrip("/").removesuffix("/v1")
        self._url, self._is_silent = url, False
        self._is_api = False
        """Whether an answer was JSON."""
        self._context = None
        if parts.scheme == "https":
            self._context = (files or TlsFiles()).client_context()
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="baton-batch")
        self._own = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    async def send(self, url: str, body: Any) -> Answer:
        """Sends a request.

        Raises:
            NobodyError: nobody answers, or the connection ended.
            BatchError: what answers there never will by this URL.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._send, url, body)

    def _send(self, url: str, body: Any) -> Answer:
        connection = self._connection()
        try:
            connection.request("POST", self._path + url, json.dumps(body), self._headers)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._own.connection = None
            connection.close()
            if why := over_http(error):
                raise BatchError(f"{self._url} {why}") from None
            self._tell_of_silence()
            raise NobodyError from None
        try:
            content = json.loads(data)
            self._is_api = True
        except (ValueError, RecursionError):
            if answer.status in (_NO_SUCH_PATH if self._is_api else _NO_SUCH_PATH + _NO_ROUTER):
                raise BatchError(
                    f"{self._url} answered {answer.status}: is this a router's HTTP port?"
                ) from None
            content = {"error": {"message": "the answer is no JSON"}}
        after = answer.getheader("retry-after", "")
        is_number = after.isascii() and after.replace(".", "", 1).isdigit()
        wait_s = float(after) if is_number else None
        is_final = answer.getheader("x-should-retry") == "false"  # As routers say; proxies do not.
        request_id = answer.getheader("x-request-id", "")
        return Answer(answer.status, request_id, content, wait_s, is_final)

    def _tell_of_silence(self) -> None:
        """Says it once: tries go on for minutes."""
        if not self._is_silent:
            self._is_silent = True
            stderr.print(f"no answer from {self._url}, trying on")

    def _connection(self) -> http.client.HTTPConnection:
        held: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if held is None:
            if self._context is None:
                held = http.client.HTTPConnection(self._host, timeout=ANSWER_S)
            else:
                context = self._context
                held = http.client.HTTPSConnection(self._host, timeout=ANSWER_S, context=context)
            self._own.connection = held
        return held
