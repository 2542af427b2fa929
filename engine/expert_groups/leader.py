"""The thread of rank 0 that says when the workers of an expert group run a step.

1. Each worker says HELLO. When all have come they are told the name of the store by which they find
   each other.
2. Each worker says that it has loaded, and what. When all have, they are told so.
3. Each worker says that its experts are ready for steps. When all are, they are told so.
4. A worker that has a step asks for it, and says how large it is; and it says when the step has
   ended. The leader waits for those whose steps run, or have ended no longer than `GRACE_S` ago;
   then all workers run, those that did not ask without tokens. So steps begin on all workers in one
   order, and all know how large they are. A device has a step in its queue while one runs: workers
   that do not wait for each other would each run every second step alone.

Where a worker is gone, or was stopped for a while, all others are told that the group is lost.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Final
from uuid import uuid4

from engine.expert_groups.lines import Message, Reader, pid_of, send
from engine.hosts.lifeline import STOPPED_S
from engine.hosts.processes import StoppedRanks

log = logging.getLogger("baton.engine")

GRACE_S: Final = 0.005
"""A worker whose step has ended is waited for so long, seconds. Between two steps it plans and
samples, which takes a millisecond or two; who has nothing to do costs the others this once."""
SOCKET: Final = "turns"
_STORE: Final = "store-"
LOOK_S: Final = 0.5
"""It is looked this often whether a worker is stopped, seconds."""


class GroupError(Exception):
    """The group cannot form; the message says why."""


class Leader:
    """Serves the group's folder until `close`, or until a worker is gone."""

    def __init__(self, folder: Path, ranks: int) -> None:
        """Binds the socket.

        Raises:
            GroupError: another rank 0 serves this folder, or others than this user may use it.
            OSError: the folder cannot be used.
        """
        _make_own(folder)
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise GroupError(f"another worker is rank 0 of the expert group {folder}") from error
        for left in (folder / SOCKET, *folder.glob(f"{_STORE}*")):  # By a rank 0 that was killed.
            left.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen()
        self._folder, self._ranks = folder, ranks
        self._store = f"{_STORE}{uuid4().hex}"
        self._wake, self._waker = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}
        self._stopped = StoppedRanks(LOOK_S)
        self._hello: Message = {}
        self._loaded: dict[int, str] = {}
        self._finished: set[int] = set()
        self._wants: dict[int, list[int]] = {}
        self._run_now: Counter[int] = Counter()
        """Steps of each worker that have begun and not ended."""
        self._ended_s: dict[int, float] = {}
        """When the last step of each ended."""
        self._lost = ""
        self._thread = threading.Thread(target=self._run, name="baton-expert-turns", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the group."""
        os.write(self._waker, b"x")
        self._thread.join()
        for descriptor in (self._wake, self._waker, self._lock):
            os.close(descriptor)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._lost:
                for key, _ in self._selector.select(self._nap_s()):
                    if key.fileobj == self._wake:
                        self._lost = "rank 0 of the expert group has ended"
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._hear(*key.data)
                self._begin()
                self._look()
        finally:
            self._end()

    def _nap_s(self) -> float:
        """How long nothing is to be done, if nobody says anything."""
        patience_s = self._patience_s()
        return LOOK_S if patience_s is None else min(patience_s, LOOK_S)

    def _look(self) -> None:
        """Whether a worker is stopped. All others would wait for it."""
        if (rank := self._stopped.look(self._pids, STOPPED_S)) is not None:
            self._lost = self._lost or f"rank {rank} of the expert group is stopped"

    def _patience_s(self) -> float | None:
        """How long until a step begins, if no other worker asks; None: until somebody asks, or a
        step ends."""
        others = self._run_now.keys() - self._wants.keys()
        if not self._wants or any(self._run_now[rank] for rank in others):
            return None
        ended_s = max((self._ended_s[rank] for rank in others), default=0.0)
        return max(0.0, ended_s + GRACE_S - time.monotonic())

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        reader = Reader(connection)
        self._selector.register(connection, selectors.EVENT_READ, (connection, reader))

    def _hear(self, connection: socket.socket, reader: Reader) -> None:
        rank = next((r for r, known in self._members.items() if known is connection), None)
        messages = reader.read()
        if messages is None:
            self._selector.unregister(connection)
            connection.close()
            if rank is not None:
                self._lost = f"rank {rank} of the expert group is gone"
            return
        for message in messages:
            if rank is None:
                rank = self._meet(connection, message)
            elif "loaded" in message:
                self._take(rank, str(message["loaded"]))
            elif "finished" in message:
                self._finished.add(rank)
                self._tell_who_is_late(self._finished, {"open": True})
            elif "ended" in message:
                self._run_now[rank] -= 1
                self._ended_s[rank] = time.monotonic()
            elif "want" in message:
                self._wants[rank] = message["want"]

    def _meet(self, connection: socket.socket, hello: Message) -> int | None:
        """A worker's rank, if it may join."""
        rank, told = hello.get("rank"), {k: v for k, v in hello.items() if k != "rank"}
        if not isinstance(rank, int) or not 0 <= rank < self._ranks:
            why = f"rank {rank} is none of the {self._ranks} of the expert group"
        elif rank in self._members:
            why = f"another worker is rank {rank} of the expert group"
        elif self._hello and told != self._hello:
            differs = [name for name in told if told[name] != self._hello.get(name)]
            why = f"{', '.join(differs)} of rank {rank} differs from that of other workers"
        else:
            self._hello = told
            self._members[rank] = connection
            self._pids[rank] = pid_of(connection)
            self._tell_who_is_late(self._members, {"welcome": self._store})
            return rank
        send(connection, {"refused": why})
        return None

    def _take(self, rank: int, revision: str) -> None:
        self._loaded[rank] = revision
        if len(set(self._loaded.values())) > 1:
            self._lost = f"rank {rank} of the expert group has read other weights"
        else:
            self._tell_who_is_late(self._loaded, {"ready": True})

    def _tell_who_is_late(self, there: Container[int], all_there: Message) -> None:
        """Tells all whom the group waits for, or that it waits for nobody."""
        late = [rank for rank in range(self._ranks) if rank not in there]
        self._tell({"waits": late} if late else {"waits": list(range(self._ranks))} | all_there)

    def _begin(self) -> None:
        """Begins a step, if it is time."""
        if self._patience_s() != 0.0:
            return
        self._tell({"begin": self._wants})
        self._run_now.update(self._wants.keys())
        self._wants = {}

    def _tell(self, message: Message) -> None:
        for connection in self._members.values():
            send(connection, message)

    def _end(self) -> None:
        self._tell({"lost": self._lost or "rank 0 of the expert group failed"})
        for connection in self._members.values():
            connection.close()
        self._listener.close()
        self._selector.close()
        for name in (SOCKET, self._store):
            (self._folder / name).unlink(missing_ok=True)


def _make_own(folder: Path) -> None:
    """Makes the folder. One that is there must be no link, and only this user may use it: whoever
    reaches it could join the group.

    Raises:
        GroupError: it is another one.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = folder.lstat()
    if not stat.S_ISDIR(held.st_mode) or held.st_uid != os.geteuid() or held.st_mode & 0o077:
        raise GroupError(f"{folder} must be a folder of this user's own, with mode 0700")
