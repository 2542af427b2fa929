"""Addresses of the form HOST:PORT: reading them, checking that one is free, announcing one."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

_ALL_INTERFACES: Final = ("0.0.0.0", "::")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_PROXIES: Final = frozenset(("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"))
_HOSTS: Final = 1024
"""Names of hosts that are read once: every HTTP request has one. Not tuned."""

ROUTER_ADDRESS: Final = "127.0.0.1:50051"
"""Default address at which a router serves clients."""
ROUTER_INTERNAL_ADDRESS: Final = "127.0.0.1:50050"
"""Default address at which workers announce themselves to a router."""


class CannotListenError(Exception):
    """An address cannot be bound; the message names it and the option that set it."""


def port_of(address: str) -> int | None:
    """The port of `HOST:PORT` or `[V6]:PORT`; None where the address is neither."""
    host, _, port = address.rpartition(":")
    is_host = bool(host) and not set("/:[]") & set(host)
    is_host = is_host or (host[:1] == "[" and host[-1:] == "]" and _is_v6(host[1:-1]))
    return int(port) if is_host and port.isdecimal() and int(port) < 1 << 16 else None


def host_of(address: str) -> str:
    """The host of `HOST:PORT` or `[V6]:PORT`, without the brackets."""
    return address.rpartition(":")[0].strip("[]")


def _is_v6(host: str) -> bool:
    try:
        return ip_address(host).version == 6
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """A host as it stands before `:PORT`: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


@lru_cache(_HOSTS)
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host of that name or address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def ask_loopback_directly(environment: MutableMapping[str, str]) -> None:
    """Exempts this machine from the proxies that the environment names (`http_proxy`), for this
    process and its children. No proxy reaches a port that only this machine reaches."""
    if any(name.lower() in _PROXIES for name in environment):
        exempt = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
        for name in ("no_proxy", "NO_PROXY"):
            environment[name] = ",".join(
                dict.fromkeys([*filter(None, exempt.split(",")), *_LOOPBACK])
            )


def check_free(*, reuse_port: bool = False, **addresses: str) -> None:
    """Checks that addresses can be bound, before minutes go into loading a model.

    Args:
        reuse_port: other processes may listen there if they share the port, too.
        addresses: HOST:PORT by setting; port 0 is always free.

    Raises:
        CannotListenError: an address cannot be bound.
    """
    for setting, address in addresses.items():
        host, port = host_of(address), address.rpartition(":")[2]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family) as probe:  # It never listens: a client might connect.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
                probe.bind((host, int(port)))
        except OSError as error:
            why = str(error.strerror).lower()
            option = setting.replace("_", "-")
            raise CannotListenError(f"cannot listen on {address} (--{option}): {why}") from None


def reachable(bound: str, host: str = "") -> str:
    """The address under which others reach a bound address.

    Args:
        bound: HOST:PORT with its real port.
        host: replaces a host that means all interfaces; "": this machine's name does.
    """
    port = bound.rpartition(":")[2]
    is_any = host_of(bound) in _ALL_INTERFACES
    return f"{host or socket.gethostname()}:{port}" if is_any else bound


def local(bound: str) -> str:
    """The address under which this machine reaches a bound address of its own."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host_of(bound))
    return f"{loopback}:{port_of(bound)}" if loopback else bound


def advertised(bound: str, advertise: str) -> str:
    """The address to announce: `advertise` where it is set. Its port 0 means the bound port."""
    host, _, port = advertise.rpartition(":")
    if not host:
        return reachable(bound)
    return f"{host}:{bound.rpartition(':')[2]}" if port == "0" else advertise
