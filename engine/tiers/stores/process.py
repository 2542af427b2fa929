"""A store as the worker sees it: a child process, its questions, and its restarts.

Life of a child: started -> opened -> answers -> gone -> (back-off) -> started. The first opening
is waited for; if it fails the worker does not start. Later ones happen beside the work, and the
store misses meanwhile.

Questions come from the step loop and never block it. When a child is gone, all its questions have
failed. That is reported only after its process has ended, by its pidfd, because until then it may
still write into host slots. A child that answers nothing for 10 s is killed.

The kernel kills a child when the thread that started it ends (`engine.parent`). So when a worker
has died, a child that hangs does not keep its disk from the next worker. One thread starts all
children of a store, and lives as long as they.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

from engine.averages import averaged
from engine.tiers.stores.messages import LOAD, Answer, Opening, Question, receive, send
from engine.tiers.stores.objects import HEADER_BYTES
from engine.tiers.stores.opening import scheme_of
from engine.tiers.stores.protocol import StoreError
from engine.types import PageIds

log = logging.getLogger("baton.store")

OPEN_S: Final = 30.0
"""A store that cannot be opened in this time is unreachable."""
STUCK_S: Final = 10.0
"""A child that owes an answer and gives none for so long is killed."""
BACK_OFF_S: Final = (0.2, 1.0, 5.0, 30.0)
MOST_OPEN: Final = 64
"""Questions without an answer; beyond that the step loop's are dropped."""
_END_S: Final = 2.5
"""A child that is closed ends within 2 s (`engine.tiers.stores.child`), unless it stands still."""


@dataclass(eq=False, slots=True)
class Job:
    """A question of the step loop, and later its answer."""

    verb: str
    keys: list[bytes]
    slots: list[PageIds] = field(default_factory=list)
    due_s: float = 0.0
    late: bool = False
    good: list[bool] = field(default_factory=list)
    damaged: int = 0
    failed: bool = False
    seconds: float = 0.0


class StoreProcess:
    """One store. `ask` and `name` are for the step loop; everything else has its own threads.

    Args:
        opening: what the child is sent.
        done: gets each job once it is answered or has failed. Then `wake` is called, on another
            thread.
        stuck_s: see the module.

    Raises:
        StoreError: the store cannot be opened.
    """

    def __init__(
        self,
        opening: Opening,
        done: queue.SimpleQueue[tuple[StoreProcess, Job]],
        stuck_s: float = STUCK_S,
    ) -> None:
        self.name = scheme_of(opening.address)
        self.address = opening.address
        self.wake: Callable[[], None] = lambda: None
        self._opening = opening
        self._done = done
        part_bytes = HEADER_BYTES + opening.pages * opening.slot_bytes
        self.object_bytes = len(opening.memory_fds) * part_bytes
        """Bytes of an object, all ranks' parts together."""
        self.bytes_per_s = 1.0
        """Rate of loads: measured at the start, then a moving average."""
        self.loading_objects = 0
        """Objects in loads without an answer."""
        self._stuck_s = stuck_s
        self._jobs: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._numbers = 0
        self._to_send: queue.SimpleQueue[tuple[Connection, Question] | None] = queue.SimpleQueue()
        self._connection: Connection | None = None
        """None while there is no child that answers."""
        self._ending = threading.Event()
        self._last_answer_s = 0.0
        opened: queue.SimpleQueue[StoreError | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(opened,), daemon=True, name="baton-store"),
            threading.Thread(target=self._send, daemon=True, name="baton-store-send"),
        ]
        self._threads[0].start()
        if (error := opened.get()) is not None:
            raise error
        self._threads[1].start()

    def expected_s(self, objects: int) -> float:
        """Seconds until so many objects would be loaded, behind those that are."""
        return (self.loading_objects + objects) * self.object_bytes / self.bytes_per_s

    def settle(self, job: Job) -> None:
        """Counts a job that has ended, on the step loop's thread."""
        if job.verb == LOAD:
            self.loading_objects -= len(job.keys)
            if sum(job.good):
                rate = sum(job.good) * self.object_bytes / max(job.seconds, 1e-6)
                self.bytes_per_s = averaged(self.bytes_per_s, rate)

    def ask(self, job: Job) -> bool:
        """Queues a job. False: the store has too many, or no child that answers."""
        with self._lock:
            connection = self._connection
            if connection is None or len(self._jobs) >= MOST_OPEN:
                return False
            if not self._jobs:
                self._last_answer_s = time.monotonic()
            self._numbers += 1
            self._jobs[self._numbers] = job
            question = Question(
                self._numbers,
                job.verb,
                [key.hex() for key in job.keys],
                [slots.tolist() for slots in job.slots],
            )
        if job.verb == LOAD:
            self.loading_objects += len(job.keys)
        self._to_send.put((connection, question))
        return True

    @property
    def pid(self) -> int:
        """The child's process, or the last one's."""
        return self._child.pid

    def stop(self) -> None:
        """Ends the child, which has a moment to close its store. Jobs that are open fail."""
        self._ending.set()
        self._to_send.put(None)
        with self._lock:
            if self._connection is not None:
                _hang_up(self._connection)
        self._threads[0].join(_END_S)
        with suppress(ProcessLookupError):
            self._child.kill()
        for thread in self._threads:
            thread.join(_END_S)

    # -- the child --------------------------------------------------------------------------------

    def _start(self) -> Connection:
        """Starts a child and waits until it has opened the store.

        Raises:
            StoreError: it could not.
        """
        ours, theirs = socket.socketpair()
        connection = Connection(ours.detach())
        fds = (theirs.fileno(), *self._opening.memory_fds)
        command = [sys.executable, "-P", "-m", "engine.tiers.stores.child"]
        arguments = [str(theirs.fileno()), str(os.getpid())]
        self._child = subprocess.Popen(
            [*command, *arguments], pass_fds=fds, stdin=subprocess.DEVNULL
        )
        theirs.close()
        try:
            send(connection, self._opening)
            answer = Answer(0, error=f"{self.address}: it does not answer")
            if connection.poll(OPEN_S):
                answer = receive(connection, Answer)
            error = answer.error
        except (EOFError, OSError):
            error = f"{self.address}: its process ended"
        if error:
            self._child.kill()
            self._child.wait()
            connection.close()
            raise StoreError(f"the store cannot be used: {error}")
        self.bytes_per_s = self.object_bytes / max(answer.seconds, 1e-6)
        self._opening.failpoints = ""  # They are for the first child.
        with self._lock:
            self._connection = connection
        return connection

    def _run(self, opened: queue.SimpleQueue[StoreError | None]) -> None:
        try:
            connection: Connection | None = self._start()
        except StoreError as error:
            opened.put(error)
            return
        opened.put(None)
        attempt = 0
        while True:
            if connection is not None:
                attempt = attempt if self._listen(connection) == 0 else 0
                self._bury(connection)
            if self._ending.wait(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)]):
                return
            attempt += 1
            try:
                connection = self._start()
            except StoreError as error:
                log.warning("%s", error)
                connection = None

    def _listen(self, connection: Connection) -> int:
        """Reads answers until the child is gone or stuck. Returns their number."""
        answers = 0
        with suppress(EOFError, OSError):
            while not self._is_stuck():
                if connection.poll(min(0.5, self._stuck_s / 4)):
                    self._take(receive(connection, Answer))
                    answers += 1
        return answers

    def _is_stuck(self) -> bool:
        with self._lock:
            waits = bool(self._jobs) and time.monotonic() - self._last_answer_s > self._stuck_s
        if waits:
            log.error("a store does not answer: its process is killed", extra={"store": self.name})
        return waits

    def _take(self, answer: Answer) -> None:
        with self._lock:
            self._last_answer_s = time.monotonic()
            job = self._jobs.pop(answer.number, None)
        if job is not None:
            job.good, job.damaged, job.seconds = answer.good, answer.damaged, answer.seconds
            job.failed = bool(answer.error)
            self._hand_back(job)

    def _bury(self, connection: Connection) -> None:
        """Waits for the child's end. Only then have its jobs failed: it writes no slot any more."""
        with self._lock:
            self._connection = None
        self._child.kill()
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self._child.pid)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll()  # As long as it takes: see the module.
            finally:
                os.close(pidfd)
        status = self._child.wait()
        connection.close()
        if not self._ending.is_set():
            name = signal.Signals(-status).name if status < 0 else str(status)
            log.warning("a store's process ended", extra={"store": self.name, "status": name})
        with self._lock:
            jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.failed, job.good = True, [False] * len(job.keys)
            self._hand_back(job)

    def _hand_back(self, job: Job) -> None:
        self._done.put((self, job))
        self.wake()

    def _send(self) -> None:
        while (item := self._to_send.get()) is not None:
            with suppress(OSError, ValueError):  # The child is gone: `_bury` ends its jobs.
                send(*item)


def _hang_up(connection: Connection) -> None:
    """Nothing more will be sent. The other end reads that, and this one may still read."""
    with socket.socket(fileno=os.dup(connection.fileno())) as ours, suppress(OSError):
        ours.shutdown(socket.SHUT_WR)
