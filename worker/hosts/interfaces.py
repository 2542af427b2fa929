"""The addresses of this host with their network interfaces, and which of these is used."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Interface(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3), as far as it is read."""


_Pointer = ctypes.POINTER(_Interface)
_Interface._fields_ = [
    ("next", _Pointer),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]
_PLACES: Final = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}
"""Where an address lies in a `sockaddr`: offset and bytes."""

DEVICES: Final = ("UCX_NET_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables that name the network devices of the data plane's libraries."""
RDMA: Final = ("NCCL_IB_HCA", "NCCL_NET")
"""Variables by which an operator chooses how NCCL leaves the host. Without them it would take all
InfiniBand and RoCE devices that it finds, whatever its sockets' interface is."""


def addresses() -> dict[Address, str]:
    """Names of interfaces by address. Raises OSError."""
    library, first = ctypes.CDLL(None, use_errno=True), _Pointer()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        return dict(_each(first))
    finally:
        library.freeifaddrs(first)


def _each(one: ctypes._Pointer[_Interface]) -> Iterator[tuple[Address, str]]:
    while one:
        interface = one.contents
        if interface.address:
            family = ctypes.c_ushort.from_address(interface.address).value
            if family in _PLACES:
                offset, count = _PLACES[family]
                packed = ctypes.string_at(interface.address + offset, count)
                yield ipaddress.ip_address(packed), interface.name.decode()
        one = interface.next


def keep_data_plane_on(interface: str) -> None:
    """Keeps the sockets of UCX, NCCL and Gloo on one network, and NCCL to sockets, unless the
    operator named devices. Without that they listen on every interface."""
    for variable in DEVICES:
        os.environ.setdefault(variable, interface)
    if not any(variable in os.environ for variable in RDMA):
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
