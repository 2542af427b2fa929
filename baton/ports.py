"""Ports of this machine for processes that are still to be started."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from typing import Final

HOST: Final = "127.0.0.1"
PORTS_TRIED: Final = 100
ANY_PORT: Final = range(20_000, 32_768)
"""Where a port comes from that may be any: below those that the kernel hands out, which anybody
could be given before the process that is to listen there has started, or while it starts again."""


class PortTakenError(Exception):
    """Somebody else has the port that was asked for."""


class PortPicker:
    """Picks free ports, all held until the last is picked so that none is picked twice, and claims
    them towards others that pick meanwhile or later."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self.claims: list[socket.socket] = []

    def __enter__(self) -> PortPicker:
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.close()

    def pick(self, wanted: int | None, usual: int) -> str:
        """HOST:PORT of the wanted port, any for 0, or from the usual one upwards the first that is
        free.

        Raises:
            PortTakenError: there is none.
        """
        match wanted:
            case None:
                ports: Sequence[int] = range(usual, usual + PORTS_TRIED)
            case 0:
                ports = [*random.SystemRandom().sample(ANY_PORT, PORTS_TRIED), 0]
            case _:
                ports = [wanted]
        for port in ports:
            holder = socket.socket()
            claim = socket.socket(socket.AF_UNIX)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((HOST, port))
                holder.listen(1)  # two sockets that do not listen may share a port
                port = holder.getsockname()[1]
                claim.bind(f"\0baton-up-port-{port}")
            except OSError:
                holder.close()
                claim.close()
                continue
            self._held.append(holder)
            self.claims.append(claim)
            return f"{HOST}:{port}"
        raise PortTakenError(f"port {ports[0]} is taken")
