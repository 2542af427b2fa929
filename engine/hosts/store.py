"""A store of torch's for ranks on several hosts, over the wires of `engine.hosts.wires`.

torch's own store over TCP listens for whoever connects, and tells and takes all in clear. Here rank
0's process keeps the values (`StoreServer`), and every rank asks it (`WireStore`). A request is a
word and its arguments; the answer is one frame, which comes when the value is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
import zmq

_dist: Any = dist
SET: Final = b"set"
GET: Final = b"get"
ADD: Final = b"add"
CHECK: Final = b"check"
YES: Final = b"yes"
NO: Final = b"no"
Socket = zmq.Socket[bytes]


class StoreServer:
    """Keeps the values, on a thread of its own.

    Args:
        context: of the socket that ends the thread.
        socket: a bound ROUTER, which belongs to the thread from now on.
    """

    def __init__(self, context: zmq.Context[Socket], socket: Socket) -> None:
        self._socket = socket
        self._values: dict[bytes, bytes] = {}
        self._waiting: list[tuple[bytes, bytes]] = []
        """Who waits for a value, and for which."""
        self._end = context.socket(zmq.PAIR)
        self._end.bind(f"inproc://{id(self)}")
        self._thread = threading.Thread(
            target=self._run, args=(context,), name="baton-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and closes the sockets."""
        self._end.send(b"")
        self._thread.join()
        self._end.close(linger=0)

    def _run(self, context: zmq.Context[Socket]) -> None:
        end = context.socket(zmq.PAIR)
        end.connect(f"inproc://{id(self)}")
        poller = zmq.Poller()
        poller.register(end, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while end not in (ready := dict(poller.poll())):
            if self._socket in ready:
                asker, word, *arguments = self._socket.recv_multipart()
                self._take(asker, word, arguments)
        end.close(linger=0)
        self._socket.close(linger=0)

    def _take(self, asker: bytes, word: bytes, arguments: list[bytes]) -> None:
        key = arguments[0]
        if word == GET and key not in self._values:
            self._waiting.append((asker, key))
            return
        if word == SET:
            self._values[key] = arguments[1]
        if word == ADD:
            sum_of_both = int(self._values.get(key, b"0")) + int(arguments[1])
            self._values[key] = str(sum_of_both).encode()
        answer = YES if word == SET else self._values.get(key, b"")
        if word == CHECK:
            answer = YES if all(one in self._values for one in arguments) else NO
        self._socket.send_multipart([asker, answer])
        ready = [(who, wanted) for who, wanted in self._waiting if wanted in self._values]
        self._waiting = [one for one in self._waiting if one not in ready]
        for who, wanted in ready:
            self._socket.send_multipart([who, self._values[wanted]])


class WireStore(_dist.Store):  # type: ignore[misc]  # torch's stubs lack it.
    """A rank's end. One thread at a time asks; whoever waits has the turn until the value comes.

    Args:
        connect: makes a connected DEALER for the calling thread.
    """

    def __init__(self, connect: Callable[[], Socket]) -> None:
        super().__init__()
        self._connect = connect
        self._own = threading.local()

    def set(self, key: str, value: bytes) -> None:
        """See torch's `Store`; so for the others."""
        self._ask(SET, key.encode(), bytes(value))

    def get(self, key: str) -> bytes:
        """Waits until there is a value."""
        return self._ask(GET, key.encode())

    def add(self, key: str, value: int) -> int:
        """Adds to a number, which begins with 0."""
        return int(self._ask(ADD, key.encode(), str(value).encode()))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all have values."""
        return self._ask(CHECK, *(key.encode() for key in keys)) == YES

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all have values."""
        for key in keys:
            self.get(key)

    def delete_key(self, key: str) -> bool:
        """Nothing is deleted: it ends with the start of the ranks."""
        return False

    def clone(self) -> WireStore:
        """This store itself."""
        return self

    def _ask(self, word: bytes, *arguments: bytes) -> bytes:
        if not hasattr(self._own, "socket"):
            self._own.socket = self._connect()
        socket: Socket = self._own.socket
        socket.send_multipart([word, *arguments])
        return socket.recv()
