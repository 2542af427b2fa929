"""Copies between the pool and host memory, where each rank has a part of every page.

Rank 0 decides, and every rank copies its part between its own pages and slots of its own. A copy
has ended when all ranks have ended theirs, and has failed when one has. So a part that comes late
makes the whole copy late.

A rank has a thread with a socket to rank 0 for each direction. A message is the number of a group
of layers and two arrays of int32, the places that are read and those that are written. The answer
is `DONE` or `FAILED`. So copies of several groups go one behind the other.

The child process of a store maps the slots of all ranks (`engine.tiers.stores.child`), and rank 0
starts it. So each rank sends its memory files, one for each group, over a socket in the private
folder, before it reports `READY`.
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
from prefixes.index import MOST_GROUPS

log = logging.getLogger("baton.engine")

Socket = zmq.Socket[bytes]
Move = Callable[[PageIds, PageIds], None]
"""Copies a rank's part: from places that are read to those that are written."""
SAVE: Final = "save"
LOAD: Final = "load"
DIRECTIONS: Final = (SAVE, LOAD)
DONE: Final = b"done"
FAILED: Final = b"failed"
MEMORY: Final = "memory"
_NUMBER: Final = struct.Struct("<i")
"""A number of a group or a rank."""
LOOK_MS: Final = 500
"""Rank 0 looks this often whether the ranks are lost."""


class SharedMover:
    """A mover of all ranks, of one group.

    Args:
        own: rank 0's part.
        ranks: the other ranks.
        group: number of the group.
    """

    def __init__(self, own: PageMover, ranks: CopyingRanks, group: int = 0) -> None:
        self._own = own
        self._ranks = ranks
        self._group = group

    def save(self, pages: PageIds, slots: PageIds) -> None:
        """See `PageMover`."""
        self._ranks.save(self._group, self._own.save, pages, slots)

    def load(self, slots: PageIds, pages: PageIds) -> None:
        """See `PageMover`."""
        self._ranks.load(self._group, self._own.load, slots, pages)


class CopyingRanks:
    """The other ranks, as movers use them, on any thread.

    Args:
        saves: sockets to them.
        loads: the same for the other direction.
        lost: why the ranks are lost; empty while they are not.
    """

    def __init__(
        self, saves: Sequence[Socket], loads: Sequence[Socket], lost: Callable[[], str]
    ) -> None:
        self._saves = saves, threading.Lock()
        self._loads = loads, threading.Lock()
        self._lost = lost

    def save(self, group: int, own: Move, pages: PageIds, slots: PageIds) -> None:
        """Saves on all ranks; `own` does this rank's part.

        Raises:
            RankError: a rank could not copy its part, or the ranks are lost.
        """
        self._together(self._saves, group, own, pages, slots)

    def load(self, group: int, own: Move, slots: PageIds, pages: PageIds) -> None:
        """Likewise in the other direction."""
        self._together(self._loads, group, own, slots, pages)

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
        group: int,
        move: Move,
        read: PageIds,
        written: PageIds,
    ) -> None:
        places = (np.ascontiguousarray(each, np.int32).tobytes() for each in (read, written))
        message = [_NUMBER.pack(group), *places]
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


def begin_copying(rank: int, movers: Sequence[PageMover], connect: Callable[[str], Socket]) -> None:
    """Begins the two threads of another rank.

    Args:
        rank: this one.
        movers: its part of each group.
        connect: opens the socket of a direction to rank 0.
    """
    saves, loads = [mover.save for mover in movers], [mover.load for mover in movers]
    for direction, moves in ((SAVE, saves), (LOAD, loads)):
        arguments = rank, connect(direction), moves
        name = f"baton-kv-{direction}"
        threading.Thread(target=_copy_forever, args=arguments, name=name, daemon=True).start()


def _copy_forever(rank: int, socket: Socket, moves: Sequence[Move]) -> NoReturn:
    while True:
        number, *places = socket.recv_multipart()
        read, written = (np.frombuffer(each, np.int32) for each in places)
        try:
            failpoints.hit("rank.copy", str(rank))
            moves[_NUMBER.unpack(number)[0]](read, written)
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
        self._files: dict[int, list[int]] = {}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(folder / MEMORY))
        self._socket.listen(self._others)

    def receive(self) -> list[list[int]]:
        """The memory files of ranks 1, 2, ..., by group, which have sent them. `close` closes
        them."""
        for _ in range(self._others):
            connection, _ = self._socket.accept()
            with connection:
                message, files, _, _ = socket.recv_fds(connection, _NUMBER.size, MOST_GROUPS)
                (rank,) = _NUMBER.unpack(message)
                self._files[rank] = list(files)
        return [self._files[rank] for rank in range(1, self._others + 1)]

    def close(self) -> None:
        """Closes the socket and the files."""
        self._socket.close()
        while self._files:
            for file in self._files.popitem()[1]:
                os.close(file)


def send_memory(folder: Path, rank: int, files: Sequence[int]) -> None:
    """Sends a rank's memory files, by group."""
    with socket.socket(socket.AF_UNIX) as to_rank_0:
        to_rank_0.connect(str(folder / MEMORY))
        socket.send_fds(to_rank_0, [_NUMBER.pack(rank)], list(files))
