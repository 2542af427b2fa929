"""What a bound address is called by those who connect to it."""

from __future__ import annotations

import socket
from typing import Final

_ALL_INTERFACES: Final = ("0.0.0.0", "::")


def reachable(bound: str, host: str = "") -> str:
    """The address under which others reach what is bound here.

    Args:
        bound: HOST:PORT with its real port.
        host: stands for all interfaces; "": this machine's name does.
    """
    own, _, port = bound.rpartition(":")
    is_any = own.strip("[]") in _ALL_INTERFACES
    return f"{host or socket.gethostname()}:{port}" if is_any else bound


def advertised(bound: str, advertise: str) -> str:
    """What others are told: `advertise` where it is set, its port 0 meaning the bound one."""
    host, _, port = advertise.rpartition(":")
    if not host:
        return reachable(bound)
    return f"{host}:{bound.rpartition(':')[2]}" if port == "0" else advertise
