"""A worker's side of the turns of an expert group."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from engine.expert_groups.leader import LOOK_S, SOCKET
from engine.expert_groups.lines import Message, Reader, pid_of, send
from engine.hosts.lifeline import STOPPED_S
from engine.hosts.processes import StoppedRanks
from engine.step.collective import CollectiveError
from engine.step.dispatch import Asks

log = logging.getLogger("baton.engine")

FORM_S: Final = 120.0
"""Rank 0 comes within this many seconds, and all others within as many again. Not tuned."""
LOAD_S: Final = 3600.0
"""All have loaded within this many seconds: a large model over a slow disk takes minutes."""
TOLD_S: Final = 5.0
"""After so many seconds the log says for whom a worker waits. Not tuned."""
_TRY_S: Final = 0.1
"""Rank 0's socket is looked for this often, seconds."""


class Member:
    """Connects to the leader. A thread hears what that says, and never waits for a step: the end of
    another worker may be what a step waits for. A second one runs the steps for which this worker
    has no tokens."""

    def __init__(
        self, hello: Message, folder: Path, without_tokens: Callable[[Asks], None]
    ) -> None:
        """Args:
        hello: the worker's `rank`, and what must be alike on all workers.
        folder: the group's.
        without_tokens: runs a step for which others have asked.
        """
        self._hello, self._folder = hello, folder
        self._without_tokens = without_tokens
        self._socket: socket.socket | None = None
        self.let_go: Callable[[], None] = lambda: None
        """Is called when the group is lost: nobody shall wait for this worker any more."""
        self._changed = threading.Condition()
        self._found: Message = {}
        self._begun: queue.SimpleQueue[Asks | None] = queue.SimpleQueue()
        """Steps in their order; None: there will be no more."""
        self._granted: Asks | None = None
        """What the step that runs is for, if it is one of this worker's."""
        self._is_closed = self._is_told = False
        self.lost = ""
        self.on_lost: Callable[[str], None] = lambda _: None
        """Is called once, on the thread, when the group is lost."""
        self._thread = threading.Thread(target=self._hear_all, name="baton-expert-ear", daemon=True)
        self._steps = threading.Thread(target=self._run, name="baton-expert-steps", daemon=True)

    def start(self) -> None:
        """Goes to meet the others. It returns at once."""
        self._thread.start()
        self._steps.start()

    def meet(self) -> Path:
        """Waits until all workers have come; returns the store by which they find each other.

        Raises:
            CollectiveError: not all came, or this one was refused.
        """
        return self._folder / str(self._wait("welcome", 2 * FORM_S, f"come to {self._folder}"))

    def loaded(self, revision: str) -> None:
        """Says what has been loaded, and waits until all have.

        Raises:
            CollectiveError: another one has ended, or has read other weights.
        """
        assert self._socket is not None
        send(self._socket, {"loaded": revision})
        self._wait("ready", LOAD_S, "load")

    def finished(self) -> None:
        """Says that this worker can run a step without tokens, and waits until all can.

        Raises:
            CollectiveError: another one has ended.
        """
        assert self._socket is not None
        send(self._socket, {"finished": True})
        self._wait("open", LOAD_S, "finish loading")

    def take(self, ask: list[int]) -> Asks:
        """See `Turns`."""
        with self._changed:
            self._check()
            assert self._socket is not None
            send(self._socket, {"want": ask})
            self._changed.wait_for(lambda: self._granted is not None or self.lost)
            self._check()
            assert self._granted is not None
            return self._granted

    def done(self) -> None:
        """See `Turns`."""
        with self._changed:
            self._granted = None
            self._changed.notify_all()

    def ended(self) -> None:
        """See `Turns`."""
        assert self._socket is not None
        send(self._socket, {"ended": True})

    def lose(self, why: str) -> None:
        """See `Turns`."""
        with self._changed:
            self.lost = self.lost or why
            self._changed.notify_all()
            is_new, self._is_told = not self._is_told, True
        if is_new and not self._is_closed and "open" in self._found:
            log.error("the expert group is lost: %s", self.lost)
        self.let_go()
        if self._socket is not None:
            _shut(self._socket)

    def close(self) -> None:
        """Leaves the group, which is lost for the others."""
        self._is_closed = True
        self.lose("the worker has ended")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _check(self) -> None:
        if self.lost:
            raise CollectiveError(self.lost)

    def _wait(self, name: str, seconds: float, what: str) -> Any:
        told_s = min(TOLD_S, seconds)
        with self._changed:
            done = self._changed.wait_for(lambda: name in self._found or self.lost, told_s)
            if not done:
                log.info("the expert group waits for %s to %s", self._late(), what)
                left_s = seconds - told_s
                done = self._changed.wait_for(lambda: name in self._found or self.lost, left_s)
            self._check()
        if not done:
            self.lose(f"the expert group has waited {seconds:.0f} s for {self._late()} to {what}")
            self._check()
        return self._found[name]

    def _late(self) -> str:
        """Whom the group waits for; rank 0 knows, and who does not reach it waits for it."""
        ranks = self._found.get("waits", [0])
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"

    # -- the threads ----------------------------------------------------------------------------

    def _hear_all(self) -> None:
        try:
            self._connect()
            assert self._socket is not None
            stopped, leads = StoppedRanks(LOOK_S), {0: pid_of(self._socket)}

            def look() -> None:
                if stopped.look(leads, STOPPED_S) is not None:
                    self.lose("rank 0 of the expert group is stopped")

            for message in Reader(self._socket).all(LOOK_S, look):
                self._hear(message)
            self.lose("rank 0 of the expert group is gone")
        except Exception as error:
            self.lose(f"the expert group failed: {error}")
        finally:
            self._begun.put(None)
            if self._socket is not None:
                self._socket.close()
        if not self._is_closed:
            self.on_lost(self.lost)

    def _connect(self) -> None:
        deadline_s = time.monotonic() + FORM_S
        while self._socket is None:
            own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                own.connect(str(self._folder / SOCKET))
                self._socket = own
            except OSError:
                own.close()
                if self.lost or time.monotonic() > deadline_s:
                    late = f"rank 0 has not come to {self._folder} within {FORM_S:.0f} s"
                    raise TimeoutError(late) from None
                time.sleep(_TRY_S)
        send(self._socket, self._hello)

    def _hear(self, message: Message) -> None:
        if "begin" in message:
            self._begun.put({int(rank): ask for rank, ask in message["begin"].items()})
            return
        with self._changed:
            self._found |= message
            self.lost = self.lost or message.get("lost") or message.get("refused") or ""
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (asks := self._begun.get()) is not None:
                self._step(asks)
        except Exception as error:
            log.exception("a step without tokens failed")
            self.lose(f"a step without tokens failed: {type(error).__name__}")

    def _step(self, asks: Asks) -> None:
        if self._hello["rank"] not in asks:
            self._without_tokens(asks)
            return
        with self._changed:
            self._granted = asks
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._granted is None or self.lost)


def _shut(connection: socket.socket) -> None:
    """Wakes whoever reads from it, at both ends."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
