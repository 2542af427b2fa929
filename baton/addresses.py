"""HOST:PORT: whether it is one, whether it is free, and what those who connect call it."""

from __future__ import annotations

import socket
from typing import Final

_ALL_INTERFACES: Final = ("0.0.0.0", "::")


class CannotListenError(Exception):
    """An address cannot be bound; the message names it and the option that set it."""


def port_of(address: str) -> int | None:
    """The port of `HOST:PORT` or `[V6]:PORT`; None where the address is neither."""
    host, _, port = address.rpartition(":")
    is_one = host and "/" not in host and port.isdecimal() and int(port) < 1 << 16
    return int(port) if is_one else None


def check_free(**addresses: str) -> None:
    """Finds out before anything is loaded, which may take minutes, what binding would find later.

    Args:
        addresses: HOST:PORT by setting; port 0 is always free.

    Raises:
        CannotListenError: one cannot be bound.
    """
    for setting, address in addresses.items():
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host, int(port)), family=family).close()
        except OSError as error:
            why = str(error.strerror).partition(" (while")[0].lower()  # the address comes before
            option = setting.replace("_", "-")
            raise CannotListenError(f"cannot listen on {address} (--{option}): {why}") from None


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
