"""Runs the lines of a batch, some at a time, and keeps their results.

A request that the server cannot take now (429, 502, 503, 504, or nobody answers) is sent again, for
up to `PATIENCE_S`. Any other error is the line's result, and so is one that says that it is final:
a request that kills workers is not sent to the next ones. If patience ends, or the server takes no
request of this caller, the batch stops; started again, it goes on. One line may be forbidden alone,
such as by its model: that is its result.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

from router.batching.lines import BatchError, Line, answered, refused

PATIENCE_S: Final = 600.0
"""Longest time for which a server may not answer: a router that is replaced is back in minutes."""
LONGEST_WAIT_S: Final = 30.0
"""Longest wait between two tries."""
LATER: Final = frozenset((429, 502, 503, 504))
"""Statuses that say: not now."""
UNKNOWN_CALLER: Final = 401
"""The status that every request would get."""
FORBIDDEN: Final = 403
"""The status of a request that this caller may not send; it may send others."""
MOST_FORBIDDEN: Final = 8
"""So many first answers that forbid, and none that does not, are about the caller; not tuned."""
LOWEST_PRIORITY: Final = 100
"""Lower numbers run first, as in vLLM's server; this is the last."""
READ_AT_ONCE: Final = 8
"""Lines that are read in one go on a thread, unless they are large; not tuned."""
MOST_READ_BYTES: Final = 1 << 20
"""Bytes of lines beyond which no further one is read in one go."""
MOST_BYTES: Final = 32 << 20
"""Bytes of lines under way, or one line that is larger. As objects they take several times that."""


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    request_id: str
    body: Any
    retry_after_s: float | None
    is_final: bool = False
    """Whether the server says that the request is not to be sent again, whatever its status."""


class NobodyError(Exception):
    """Nobody answers."""


Send = Callable[[str, Any], Awaitable[Answer]]
"""Sends a body to a url. Raises NobodyError."""


class Results(Protocol):
    """Keeps results."""

    @property
    def done(self) -> Mapping[str, str]:
        """The custom_id of each line that had a result at first, by the result's id."""
        ...

    def write(self, result: Mapping[str, Any]) -> object:
        """Keeps a result. Called on any thread."""
        ...


async def run(
    lines: Iterator[Line],
    results: Results,
    send: Send,
    *,
    at_once: int,
    priority: int = LOWEST_PRIORITY,
    patience_s: float = PATIENCE_S,
    on_line: Callable[[bool], None] = lambda _: None,
    ended: asyncio.Event | None = None,
) -> None:
    """Runs the lines that are not done.

    Args:
        lines: of the batch, all of them. They are read on threads.
        results: of the batch.
        send: sends a request.
        at_once: most requests under way at the same time.
        priority: of lines that set none.
        patience_s: see `PATIENCE_S`.
        on_line: is called with each line that is done, and whether it went well.
        ended: if it is set, no further request is sent, and those under way end.

    Raises:
        BatchError: the results are of another batch, or the batch stopped.
    """
    ended = ended or asyncio.Event()
    one = _Run(results, send, priority, patience_s, on_line, ended)
    await one.all(lines, asyncio.Semaphore(at_once))
    if one.why is not None:
        raise one.why


def _some(lines: Iterator[Line]) -> list[Line]:
    """The next lines: `READ_AT_ONCE`, or as many as have `MOST_READ_BYTES`."""
    some: list[Line] = []
    size = 0
    for line in islice(lines, READ_AT_ONCE):
        some.append(line)
        size += line.size
        if size > MOST_READ_BYTES:
            break
    return some


class _Run:
    def __init__(
        self,
        results: Results,
        send: Send,
        priority: int,
        patience_s: float,
        on_line: Callable[[bool], None],
        ended: asyncio.Event,
    ) -> None:
        self._results = results
        self._send = send
        self._priority = priority
        self._patience_s = patience_s
        self._on_line = on_line
        self._ended = ended
        self.why: Exception | None = None
        self._bytes = 0
        """Bytes of the lines under way."""
        self._freed = asyncio.Condition()
        self._forbidden: int | None = 0
        """Answers that forbade; None: there was another one."""

    def _fits(self, size: int) -> bool:
        return not self._bytes or self._bytes + size <= MOST_BYTES

    async def all(self, lines: Iterator[Line], room: asyncio.Semaphore) -> None:
        left = filter(self._is_left, lines)
        async with asyncio.TaskGroup() as tasks:
            try:
                while read := await asyncio.to_thread(_some, left):
                    while read:
                        line = read.pop(0)
                        await room.acquire()
                        async with self._freed:
                            await self._freed.wait_for(partial(self._fits, line.size))
                            self._bytes += line.size
                        if self._ended.is_set():
                            return
                        task = tasks.create_task(self._one(line))
                        task.add_done_callback(lambda _: room.release())
                        del line
            except (BatchError, OSError) as error:
                self._stop(error)

    def _is_left(self, line: Line) -> bool:
        custom_id = self._results.done.get(line.id)
        if custom_id not in (None, line.custom_id):
            raise BatchError(
                f"line {line.number} has another custom_id than its result: the results are of"
                " another file"
            )
        return custom_id is None

    def _stop(self, why: Exception) -> None:
        self.why = self.why or why
        self._ended.set()

    async def _one(self, line: Line) -> None:
        try:
            if line.wrong:
                await self._keep(refused(line), went_well=False)
            elif (answer := await self._answer(line)) is not None:
                result = answered(line, answer.status, answer.request_id, answer.body)
                await self._keep(result, went_well=answer.status < 400)
        except Exception as error:
            self._stop(error)
        finally:
            self._bytes -= line.size
            async with self._freed:
                self._freed.notify_all()

    async def _keep(self, result: Mapping[str, Any], *, went_well: bool) -> None:
        await asyncio.to_thread(self._results.write, result)
        self._on_line(went_well)

    def _check_caller(self, status: int) -> None:
        if status != FORBIDDEN:
            self._forbidden = None
        elif self._forbidden is not None:
            self._forbidden += 1
        if status == UNKNOWN_CALLER or (self._forbidden or 0) >= MOST_FORBIDDEN:
            raise BatchError(f"the server takes no request of this caller: {status}")

    async def _answer(self, line: Line) -> Answer | None:
        """The answer that is the line's result; None: the batch has ended."""
        body = {"priority": self._priority, **(line.body or {})}
        clock = asyncio.get_running_loop().time
        ends_s, wait_s = clock() + self._patience_s, 0.5
        while not self._ended.is_set():
            why, asked_s = "nobody answers", None
            with suppress(NobodyError):
                answer = await self._send(line.url, body)
                self._check_caller(answer.status)
                if answer.is_final or answer.status not in LATER:
                    return answer
                why, asked_s = f"the server answers {answer.status}", answer.retry_after_s
            if clock() > ends_s:
                raise BatchError(f"{why} for {self._patience_s:g} s; start it again to go on")
            rest_s = min(asked_s or wait_s * random.uniform(0.5, 1), LONGEST_WAIT_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), rest_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return None
