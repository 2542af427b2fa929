"""What waits to be written to one router, and how other threads reach the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from baton.worker.v1 import worker_pb2
from baton.worker_wire import append_tokens

logger = logging.getLogger(__name__)

MAX_QUEUED_ENTRIES: Final = 1 << 16
"""Messages, or rows of tokens within them, that a router may leave unread."""

Action = Callable[[], None]
CallOnLoop = Callable[[Action], None]
"""Runs an action on the event loop; called on any thread; keeps the order of each caller."""


class Outbox:
    """Messages to one router, in order.

    Life: OPEN -> CLOSED, by its stream or by overflowing, or OPEN -> FINISHED -> CLOSED, where what
    waits is still written.

    Invariants: two messages of tokens never follow each other, so all tokens of a step travel in
    one message, and those of several steps do while the router is slow; at most one load report
    waits, the newest. A closed or finished outbox takes nothing
    more.
    """

    def __init__(self, on_overflow: Action, max_entries: int = MAX_QUEUED_ENTRIES) -> None:
        self.closed = False
        self._untold: set[bytes] = set()
        """Attempts that no report has named yet as known."""
        self._on_overflow = on_overflow
        self._max_entries = max_entries
        self._finished = False
        self._entries = 0
        self._queue: deque[worker_pb2.WorkResponse] = deque()
        self._load: worker_pb2.WorkResponse | None = None
        """The load report that waits."""
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def send(self, message: worker_pb2.WorkResponse) -> None:
        """Queues a message."""
        self._put(message)

    def add_tokens(self, tokens: worker_pb2.Tokens) -> None:
        """Queues new tokens, together with others that wait."""
        if not self.closed and self._queue and self._queue[-1].HasField("tokens"):
            append_tokens(self._queue[-1].tokens, tokens)
            self._count(len(tokens.attempt_ids))
        else:
            self._put(worker_pb2.WorkResponse(tokens=tokens))

    def submitted(self, attempt_id: bytes) -> None:
        """An attempt came from that router: a report will say so, once it contains the attempt."""
        self._untold.add(attempt_id)

    def report(self, load: worker_pb2.Load, is_known: Callable[[bytes], bool]) -> None:
        """Queues a load report, in the place of one that still waits.

        Args:
            load: the same for all routers.
            is_known: whether the report contains an attempt.
        """
        if self._load is None and not self.closed:
            self._load = worker_pb2.WorkResponse()
            self._put(self._load)
        if self._load is not None:
            known = [attempt_id for attempt_id in self._untold if is_known(attempt_id)]
            self._untold.difference_update(known)
            unread = list(self._load.load.known_attempts)
            self._load.load.CopyFrom(load)
            self._load.load.known_attempts.extend(unread + known)

    async def get(self) -> worker_pb2.WorkResponse | None:
        """The next message, as soon as there is one; None where none will come any more."""
        while not self._queue:
            if self._finished:
                return None
            self._filled.clear()
            await self._filled.wait()
        message = self._queue.popleft()
        self._entries -= _entries_of(message)
        if message is self._load:
            self._load = None
        return message

    def finish(self) -> None:
        """Takes nothing more; what waits can still be got."""
        self.closed = self._finished = True
        self._filled.set()

    def close(self) -> None:
        """Drops everything, from now on as well."""
        self.closed = True
        self._queue.clear()
        self._load = None

    def _put(self, message: worker_pb2.WorkResponse) -> None:
        if not self.closed:
            self._queue.append(message)
            self._count(_entries_of(message))
            self._filled.set()

    def _count(self, entries: int) -> None:
        self._entries += entries
        if self._entries > self._max_entries:
            self.close()
            self._on_overflow()


def _entries_of(message: worker_pb2.WorkResponse) -> int:
    return max(1, len(message.tokens.attempt_ids))


class LoopInbox:
    """Actions that other threads want done on the event loop: one wake-up for all that wait.

    Invariant: a wake-up is under way whenever an action waits, but for those that were only `put`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._is_woken = False
        self._actions: list[Action] = []

    def call_on_loop(self, action: Action) -> None:
        """See `CallOnLoop`. After the loop has closed nothing happens: the process is ending."""
        self.put(action)
        self.wake()

    def put(self, action: Action) -> None:
        """Takes an action's place in the order; `wake` must follow. Between the two, other threads
        do not have to share the interpreter with the loop."""
        with self._lock:
            self._actions.append(action)

    def wake(self) -> None:
        """Has the loop run what was put."""
        with self._lock:
            wake = bool(self._actions) and not self._is_woken
            self._is_woken |= wake
        if wake and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        with self._lock:
            actions, self._actions, self._is_woken = self._actions, [], False
        for action in actions:
            try:
                action()
            except Exception:
                logger.exception("an event broke its handler")
