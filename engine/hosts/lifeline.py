"""Ranks of other hosts end when rank 0's process does, or when nothing comes from there any more.

Their agent kills them then, too. But an agent may be stopped, and a rank may wait in the kernel: so
each of both looks by itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

import zmq

LIFELINE: Final = "lifeline"
SILENT_S: Final = 3.0
"""Whoever says nothing for so long is lost, seconds: six beats. Until all its ranks have
ended, a group may take four."""
STOPPED_S: Final = 1.5
"""A rank that was stopped for so long is lost, seconds: all others wait for it. With the time to
tell them this takes no longer than silence. A debugger that looks on holds a process for less."""
BEAT_S: Final = 0.5
"""Who is well says so this often, seconds: some may be late before SILENT_S is over. Not tuned."""
EXIT_ALONE: Final = 5
"""Status of a rank that ends so, as the log has it. A worker's watchdog has 3 and 4."""
Socket = zmq.Socket[bytes]


class Lifeline:
    """Rank 0's end: a bound PUB, which one thread beats."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    def beat(self) -> None:
        """This process is well."""
        self._socket.send(b"")


def hold_on(connect: Callable[[Socket], None]) -> None:
    """Ends this process, from a thread of its own, once the beats stop.

    Args:
        connect: connects a SUB to rank 0's end.
    """

    def watch() -> None:
        socket = zmq.Context().socket(zmq.SUB)
        socket.subscribe(b"")
        connect(socket)
        while socket.poll(int(SILENT_S * 1e3)):
            socket.recv()
        os._exit(EXIT_ALONE)

    threading.Thread(target=watch, name="baton-lifeline", daemon=True).start()
