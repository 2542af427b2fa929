"""Copies between the pool and host memory, where each rank has a part of every page.

Rank 0 decides, and every rank copies its part between its own pages and slots of its own. A copy
has ended when all ranks have ended theirs, and has failed when one has. So a part that comes late
makes the whole copy late.

A rank has a thread with a socket to rank 0 for each direction. A message is two arrays of int32,
the places that are read and those that are written. The answer is `DONE` or `FAILED`.

The child process of a store maps the slots of all ranks (`engine.tiers.stores.child`), and rank 0
starts it. So each rank sends its memory file over a socket in the private folder, before it reports
`READY`.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import zmq

from engine.ranks.keeper import RankError
from engine.tiers.movers import PageMover
from engine.types import PageIds
from faults import failpoints

log = logging.getLogger("baton.engine")

Socket = zmq.Socket[bytes]
SAVE: Final = "save"
LOAD: Final = "load"
DIRECTIONS: Final = (SAVE, LOAD)
DONE: Final = b"done"
FAILED: Final = b"failed"
MEMORY: Final = "memory"
_RANK: Final = struct.Struct("<i")
LOOK_MS: Final = 500
"""Rank 0 looks this often whether the ranks are lost."""


class SharedMover:
    """A mover of all ranks. Each direction is for one thread.

    Args:
        own: rank 0's part.
        saves: sockets to the other ranks.
        loads: the same for the other direction.
        lost: why the ranks are lost; empty while they are not.
    """

    def __init__(
        self,
        own: PageMover,
        saves: Sequence[Socket],
        loads: Sequence[Socket],
        lost: Callable[[], str],
    ) -> None:
        self._own = own
        self._saves = saves, threading.Lock()
        self._loads = loads, threading.Lock()
        self._lost = lost

    def save(self, pages: PageIds, slots: PageIds) -> None:
        """See `PageMover`."""
        self._together(self._saves, self._own.save, pages, slots)

    def load(self, slots: PageIds, pages: PageIds) -> None:
        """See `PageMover`."""
        self._together(self._loads, self._own.load, slots, pages)

    def close(self) -> None:
        """Closes the sockets, once no copy uses them: those under way fail, since the ranks are
        lost. Later copies fail, too."""
        for sockets, lock in (self._saves, self._loads):
            with lock:
                for socket in sockets:
                    socket.close(linger=0)

    def _together(
        self,
        ranks: tuple[Sequence[Socket], threading.Lock],
        move: Callable[[PageIds, PageIds], None],
        read: PageIds,
        written: PageIds,
    ) -> None:
        message = [np.ascontiguousarray(places, np.int32).tobytes() for places in (read, written)]
        sockets, lock = ranks
        with lock:
            for socket in sockets:
                # A rank that is gone must not keep the thread here.
                socket.send_multipart(message, zmq.DONTWAIT)
            try:
                move(read, written)
            finally:
                answers = [self._answer(socket) for socket in sockets]
        failed = [rank for rank, answer in enumerate(answers, 1) if answer != DONE]
        if failed:
            raise RankError(f"ranks that could not copy their parts: {failed}")

    def _answer(self, socket: Socket) -> bytes:
        while not socket.poll(LOOK_MS):
            if reason := self._lost():
                raise RankError(reason)
        return socket.recv()


def begin_copying(rank: int, mover: PageMover, connect: Callable[[str], Socket]) -> None:
    """Begins the two threads of another rank.

    Args:
        rank: this one.
        mover: its part.
        connect: opens the socket of a direction to rank 0.
    """
    for direction, move in ((SAVE, mover.save), (LOAD, mover.load)):
        arguments = rank, connect(direction), move
        name = f"baton-kv-{direction}"
        threading.Thread(target=_copy_forever, args=arguments, name=name, daemon=True).start()


def _copy_forever(rank: int, socket: Socket, move: Callable[[PageIds, PageIds], None]) -> NoReturn:
    while True:
        read, written = (np.frombuffer(places, np.int32) for places in socket.recv_multipart())
        try:
            failpoints.hit("rank.copy", str(rank))
            move(read, written)
        except Exception:
            log.exception("KV pages could not be copied")
            socket.send(FAILED)
        else:
            socket.send(DONE)


class MemoryInbox:
    """Rank 0's side.

    Args:
        folder: the private folder.
        size: number of ranks.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._others = size - 1
        self._files: dict[int, int] = {}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(folder / MEMORY))
        self._socket.listen(self._others)

    def receive(self) -> list[int]:
        """The memory files of ranks 1, 2, ..., which have sent them. `close` closes them."""
        for _ in range(self._others):
            connection, _ = self._socket.accept()
            with connection:
                message, files, _, _ = socket.recv_fds(connection, _RANK.size, 1)
                (rank,) = _RANK.unpack(message)
                (self._files[rank],) = files
        return [self._files[rank] for rank in range(1, self._others + 1)]

    def close(self) -> None:
        """Closes the socket and the files."""
        self._socket.close()
        while self._files:
            os.close(self._files.popitem()[1])


def send_memory(folder: Path, rank: int, file: int) -> None:
    """Sends a rank's memory file."""
    with socket.socket(socket.AF_UNIX) as to_rank_0:
        to_rank_0.connect(str(folder / MEMORY))
        socket.send_fds(to_rank_0, [_RANK.pack(rank)], [file])
