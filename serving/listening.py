"""Ports that servers of this process's own event loop listen at."""

from __future__ import annotations

import socket


def bind(listen: str, *, reuse_port: bool) -> tuple[socket.socket, str]:
    """Binds HOST:PORT or [V6]:PORT and listens; port 0 takes a free one.

    Args:
        listen: the address.
        reuse_port: whether to share the port with other processes that set this.

    Returns:
        The socket, and the address with the port that it has.

    Raises:
        OSError: the address cannot be bound.
    """
    written, _, port = listen.rpartition(":")
    host = written.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.create_server((host, int(port)), family=family, reuse_port=reuse_port)
    return bound, f"{written}:{bound.getsockname()[1]}"
