"""Picks free ports of this machine for processes that start later."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Sequence
from typing import Final

from baton.addresses import check_free

HOST: Final = "127.0.0.1"
PORTS_TRIED: Final = 100
ANY_PORT: Final = range(20_000, 32_768)
"""The range for arbitrary ports. It lies below the ports that the kernel hands out: one of those
could go to another process before ours has started, or while ours restarts."""


class PortTakenError(Exception):
    """Another process has the wanted port."""


class PortPicker:
    """Picks free ports.

    It holds each port until the last one is picked, so that none is picked twice. Its claims keep
    other pickers off these ports, also later.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self.claims: list[socket.socket] = []

    def __enter__(self) -> PortPicker:
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.close()

    def pick(
        self, wanted: int | None, usual: int, host: str = HOST, never: Collection[int] = ()
    ) -> str:
        """Returns HOST:PORT with a free port.

        Args:
            wanted: the port; 0: any port; None: the first free one from `usual` upwards.
            usual: where to begin for None.
            host: an address of this machine.
            never: ports that are not taken for None, since others expect something else there.

        Raises:
            PortTakenError: no such port is free.
            CannotListenError: the host is no address of this machine.
        """
        match wanted:
            case None:
                tried = range(usual, usual + PORTS_TRIED)
                ports: Sequence[int] = [port for port in tried if port not in never]
            case 0:
                ports = [*random.SystemRandom().sample(ANY_PORT, PORTS_TRIED), 0]
            case _:
                ports = [wanted]
        is_v6 = ":" in host
        at = f"[{host}]" if is_v6 else host
        check_free(host=f"{at}:0")
        for port in ports:
            holder = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
            claim = socket.socket(socket.AF_UNIX)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((host, port))
                holder.listen(1)  # Only listening sockets exclude each other.
                port = holder.getsockname()[1]
                claim.bind(f"\0baton-up-port-{port}")
            except OSError:
                holder.close()
                claim.close()
                continue
            self._held.append(holder)
            self.claims.append(claim)
            return f"{at}:{port}"
        raise PortTakenError(f"port {ports[0]} is taken")
