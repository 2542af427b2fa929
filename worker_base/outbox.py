"""The way out of a worker's event loop, and the way in.

`Outbox` holds the messages that wait to be written to one router. `LoopInbox` brings actions of
other threads to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from baton.worker.v1 import worker_pb2
from worker_base.messages import joined_tokens

logger = logging.getLogger(__name__)

MAX_QUEUED_ENTRIES: Final = 1 << 16
"""A router may leave this many messages unread. In messages of tokens each row counts."""

Action = Callable[[], None]
CallOnLoop = Callable[[Action], None]
"""Runs an action on the event loop; called on any thread; keeps the order of each caller."""


class Outbox:
    """Messages to one router, in order.

    Life: OPEN -> CLOSED, by its stream or by overflowing. Or OPEN -> FINISHED -> CLOSED: then the
    messages that wait are still written.

    Invariants: `get` never returns two messages of tokens in a row. So all tokens of a step travel
    in one message, and while the router is slow the tokens of several steps do. At most one load
    report waits, the newest. A closed or finished outbox takes nothing more.
    """

    def __init__(
        self,
        on_overflow: Action,
        max_entries: int = MAX_QUEUED_ENTRIES,
        *,
        keeps_peers: bool = False,
        knows_no_token: bool = True,
    ) -> None:
        """An empty outbox. `keeps_peers`: the router remembers the peers of the last report."""
        self.closed = False
        self.knows_no_token = knows_no_token
        """The router knows FAILURE_REASON_NO_TOKEN."""
        self._keeps_peers = keeps_peers
        self._peers: list[worker_pb2.PeerHealth] = []
        """Peers that the last report named."""
        self._unreported: set[bytes] = set()
        """Attempts that no report has named yet."""
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
        """Queues a message. An outbox with too many entries closes."""
        if self.closed:
            return
        self._queue.append(message)
        self._filled.set()
        self._entries += _entries_of(message)
        if self._entries > self._max_entries:
            self.close()
            self._on_overflow()

    def submitted(self, attempt_id: bytes) -> None:
        """Notes an attempt of that router. The first report that contains it will name it."""
        self._unreported.add(attempt_id)

    def report(self, load: worker_pb2.Load, is_known: Callable[[bytes], bool]) -> None:
        """Queues a load report. It takes the place of one that still waits.

        Args:
            load: the same for all routers.
            is_known: whether the report contains an attempt.
        """
        if self._load is None and not self.closed:
            self._load = worker_pb2.WorkResponse()
            self.send(self._load)
        if self._load is not None:
            known = [attempt_id for attempt_id in self._unreported if is_known(attempt_id)]
            self._unreported.difference_update(known)
            unread = list(self._load.load.known_attempts)
            self._load.load.CopyFrom(load)
            self._load.load.known_attempts.extend(unread + known)

    async def get(self) -> worker_pb2.WorkResponse | None:
        """Waits for the next message and returns it; None if no more will come.

        Messages of tokens that wait one behind the other are returned as one.
        """
        while not self._queue:
            if self._finished:
                return None
            self._filled.clear()
            await self._filled.wait()
        message = self._next()
        if message is self._load:
            self._load = None
            self._leave_out_known(message.load)
        if not (message.HasField("tokens") and self._tokens_wait()):
            return message
        tokens = [message.tokens]
        while self._tokens_wait():
            tokens.append(self._next().tokens)
        return worker_pb2.WorkResponse(tokens=joined_tokens(tokens))

    def finish(self) -> None:
        """Takes nothing more. The messages that wait can still be got."""
        self.closed = self._finished = True
        self._filled.set()

    def close(self) -> None:
        """Drops everything that waits and everything that comes."""
        self.closed = True
        self._queue.clear()
        self._load = None

    def _tokens_wait(self) -> bool:
        return bool(self._queue) and self._queue[0].HasField("tokens")

    def _leave_out_known(self, load: worker_pb2.Load) -> None:
        """Leaves peers out of a report that a router knows from the one before. There may be a
        thousand, and each of them reports ten times a second."""
        peers = list(load.peers)
        load.same_peers = self._keeps_peers and peers == self._peers
        if load.same_peers:
            del load.peers[:]
        else:
            self._peers = peers

    def _next(self) -> worker_pb2.WorkResponse:
        message = self._queue.popleft()
        self._entries -= _entries_of(message)
        return message


def _entries_of(message: worker_pb2.WorkResponse) -> int:
    return max(1, len(message.tokens.attempt_ids))


class LoopInbox:
    """Actions that other threads want done on the event loop. One wake-up serves all that wait.

    Invariant: a wake-up is under way whenever an action waits that `wake` has followed.
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
        """Queues an action; `wake` must follow. Between the two, the loop does not compete with
        other threads for the interpreter."""
        with self._lock:
            self._actions.append(action)

    def wake(self) -> None:
        """Makes the loop run the queued actions."""
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
