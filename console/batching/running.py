"""Runs the lines of a batch against a server, some at a time, and keeps their results.

A request that the server cannot take now (429, 502, 503, 504, or nobody answers) is sent again, for
up to `PATIENCE_S`. Any other error is the line's result. If patience ends, or the server takes no
request of this caller, the batch stops; started again, it goes on.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from baton.tls import TlsFiles
from console.batching.journal import Journal
from console.batching.lines import BatchError, Line, answered, refused

PATIENCE_S: Final = 600.0
"""Longest time for which a server may not answer: a router that is replaced is back in minutes."""
LONGEST_WAIT_S: Final = 30.0
"""Longest wait between two tries."""
ANSWER_S: Final = 3600.0
"""Longest wait for an answer. The server's own bound on a request is the one that counts."""
LATER: Final = frozenset((429, 502, 503, 504))
"""Statuses that say: not now."""
STOPS: Final = frozenset((401, 403))
"""Statuses that every request would get."""
LOWEST_PRIORITY: Final = 100
"""Lower numbers run first, as in vLLM's server; this is the last."""


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    request_id: str
    body: Any
    retry_after_s: float | None


class Server:
    """A server to which requests are sent. Each thread has a connection of its own."""

    def __init__(self, url: str, key: str = "", files: TlsFiles | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._path = parts.netloc, parts.path.rstrip("/").removesuffix("/v1")
        self._context = None
        if parts.scheme == "https":
            self._context = (files or TlsFiles()).client_context()
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._own = threading.local()

    def send(self, url: str, body: Any) -> Answer:
        """Sends a request.

        Raises:
            OSError, HTTPException: nobody answers, or the connection ended.
        """
        connection = self._connection()
        try:
            connection.request("POST", self._path + url, json.dumps(body), self._headers)
            answer = connection.getresponse()
            data = answer.read()
        except BaseException:
            self._own.connection = None
            connection.close()
            raise
        try:
            content = json.loads(data)
        except ValueError:
            content = {"error": {"message": "the answer is no JSON"}}
        after = answer.getheader("retry-after", "")
        wait_s = float(after) if after.replace(".", "", 1).isdigit() else None
        return Answer(answer.status, answer.getheader("x-request-id", ""), content, wait_s)

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


def run(
    lines: Iterable[Line],
    journal: Journal,
    send: Callable[[str, Any], Answer],
    *,
    at_once: int,
    priority: int = LOWEST_PRIORITY,
    patience_s: float = PATIENCE_S,
    told: Callable[[bool], None] = lambda _: None,
) -> None:
    """Runs the lines that are not done.

    Args:
        lines: of the batch, all of them.
        journal: the results.
        send: sends a request.
        at_once: most requests under way at the same time.
        priority: of lines that set none.
        patience_s: see `PATIENCE_S`.
        told: is called with each line that is done, and whether it went well, on any thread.

    Raises:
        BatchError: the results are of another batch, or the batch stopped.
    """
    _Run(journal, send, at_once, priority, patience_s, told).all(lines)


class _Run:
    def __init__(
        self,
        journal: Journal,
        send: Callable[[str, Any], Answer],
        at_once: int,
        priority: int,
        patience_s: float,
        told: Callable[[bool], None],
    ) -> None:
        self._journal = journal
        self._send = send
        self._at_once = at_once
        self._priority = priority
        self._patience_s = patience_s
        self._told = told
        self._room = threading.Semaphore(2 * at_once)
        """Lines that are read: those under way, and as many more."""
        self._stopped = threading.Event()
        self._why: BaseException | None = None

    def all(self, lines: Iterable[Line]) -> None:
        with ThreadPoolExecutor(self._at_once, thread_name_prefix="baton-batch") as threads:
            try:
                for line in lines:
                    if self._stopped.is_set():
                        break
                    if line.id in self._journal.done:
                        self._check_alike(line)
                        continue
                    self._room.acquire()
                    threads.submit(self._one, line)
            except BaseException as error:
                self._stop(error)
        if self._why is not None:
            raise self._why

    def _check_alike(self, line: Line) -> None:
        if self._journal.done[line.id] != line.custom_id:
            raise BatchError(
                f"line {line.number} has another custom_id than its result: the results are of"
                " another file"
            )

    def _stop(self, why: BaseException) -> None:
        self._why = self._why or why
        self._stopped.set()

    def _one(self, line: Line) -> None:
        try:
            if self._stopped.is_set():
                return
            if line.wrong:
                self._journal.write(refused(line))
                self._told(False)
                return
            answer = self._answer(line)
            if answer is not None:
                self._journal.write(answered(line, answer.status, answer.request_id, answer.body))
                self._told(answer.status < 400)
        except BaseException as error:
            self._stop(error)
        finally:
            self._room.release()

    def _answer(self, line: Line) -> Answer | None:
        """The answer that is the line's result; None: the batch has stopped."""
        body = {"priority": self._priority, **(line.body or {})}
        ends_s, wait_s = time.monotonic() + self._patience_s, 0.5
        while not self._stopped.is_set():
            why, asked_s = "nobody answers", None
            try:
                answer = self._send(line.url, body)
            except (OSError, http.client.HTTPException):
                pass
            else:
                if answer.status in STOPS:
                    raise BatchError(f"the server takes no request of this caller: {answer.status}")
                if answer.status not in LATER:
                    return answer
                why, asked_s = f"the server answers {answer.status}", answer.retry_after_s
            if time.monotonic() > ends_s:
                raise BatchError(f"{why} for {self._patience_s:g} s; start it again to go on")
            self._stopped.wait(min(asked_s or wait_s * random.uniform(0.5, 1), LONGEST_WAIT_S))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return None
