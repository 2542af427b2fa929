"""Rank 0's sockets to the other ranks, and the agents of other hosts, if there are any."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import zmq

from engine.hosts.lifeline import LIFELINE, Lifeline
from engine.hosts.meetings import STORE
from engine.hosts.others import Heard, Order, OtherHosts
from engine.hosts.store import StoreServer
from engine.hosts.wires import MOST_WAITING, CurveWires, FolderWires, Wires, write_ends

_BEATS: Final = 0b10
_ALL_ELSE: Final = 0b01
"""Threads of zmq's that encrypt and write, by bit: beats wait for nothing large."""
Socket = zmq.Socket[bytes]


class Control:
    """See the module. `bound` all sockets, then `begin`.

    Args:
        folder: the private folder of this host.
        hosts: the agents of others; None: all ranks are here.
    """

    def __init__(self, folder: Path, hosts: OtherHosts | None) -> None:
        self.beat: Callable[[], None] | None = None
        """Says to other hosts that this process is well. For one thread."""
        self._folder = folder
        self._hosts = hosts
        self._context: zmq.Context[Socket] = zmq.Context(1 if hosts is None else 2)
        self._wires: Wires = FolderWires(folder)
        self._store: StoreServer | None = None

    def open(self) -> None:
        """Makes what all ranks share over hosts. Raises zmq.ZMQError."""
        if self._hosts is None:
            return
        self._wires = CurveWires(self._context, self._hosts.address, self._hosts.known)
        self._store = StoreServer(self._context, self.bound(zmq.ROUTER, STORE))
        self.beat = Lifeline(self.bound(zmq.PUB, LIFELINE)).beat

    def bound(self, kind: int, name: str) -> Socket:
        """A socket of a kind of zmq's, to which ranks connect. Raises zmq.ZMQError."""
        socket = self._context.socket(kind)
        socket.affinity = _BEATS if name == LIFELINE else _ALL_ELSE
        if kind == zmq.PAIR:
            socket.set_hwm(MOST_WAITING)
        self._wires.bind(socket, name)
        return socket

    def tell_ranks_here(self) -> None:
        """Leaves for the ranks of this host where the sockets are, once all are bound."""
        if self._hosts is not None and isinstance(self._wires, CurveWires):
            server, hosts = self._wires.keys.public, self._hosts
            where = hosts.keys, hosts.fabric, hosts.interface
            write_ends(self._folder, self._wires.addresses, server, *where)

    def started_here(self, pids: Collection[int]) -> None:
        """These processes are the ranks of this host."""
        if self._hosts is not None:
            self._hosts.keeps(pids)

    def begin_elsewhere(self, config: str, heard: Heard) -> None:
        """Has the agents start the ranks of their hosts, with this configuration."""
        if self._hosts is not None and isinstance(self._wires, CurveWires):
            order = Order(config, self._wires.addresses, self._wires.keys.public)
            self._hosts.begin(order, heard)

    def stop_elsewhere(self, reason: str) -> None:
        """Ends the ranks of other hosts: in order, where there is no reason."""
        if self._hosts is not None:
            self._hosts.stop(reason)

    def close(self) -> None:
        """Closes all sockets."""
        if self._store is not None:
            self._store.close()
        self._wires.close()
        self._context.destroy(linger=0)
