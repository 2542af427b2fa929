"""Names that stand for what a test says, in a process's lookups: see the fixture `names`."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

SystemLookup = Callable[..., list[Any]]
"""`socket.getaddrinfo`."""
Names = dict[str, Sequence[str]]
"""Addresses by name."""
NAMES: Final = "STAND_IN_NAMES"
"""The variable that tells a process of the nursery where its names stand."""


def look_up_in(file: Path) -> None:
    """From now on this process looks names up as a container does: in a JSON file of addresses by
    name, read anew for each lookup."""
    socket.getaddrinfo = lookup(lambda: json.loads(file.read_text()), socket.getaddrinfo)


def lookup(known: Callable[[], Names], system: SystemLookup) -> SystemLookup:
    """What stands in for `socket.getaddrinfo`.

    Args:
        known: addresses by name. A name that is not there is looked up as ever, one that has none
            is not found.
        system: the real one.
    """

    def getaddrinfo(host: Any, port: Any, *args: Any, **options: Any) -> list[Any]:
        addresses = known().get(host)
        if addresses is None:
            return system(host, port, *args, **options)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        options["flags"] = socket.AI_NUMERICHOST
        return [one for address in addresses for one in system(address, port, *args, **options)]

    return getaddrinfo
