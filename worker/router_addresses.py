"""The addresses of routers, for as long as a worker lives.

`--routers` has names or addresses. Life of a name:

1. It is looked up at once, and again every few seconds.
2. All of its addresses are listed. The next lookup replaces them.
3. If a lookup fails or finds nothing, the addresses known last stay listed.

IP addresses and `localhost` are listed as they are.

Each name has a thread, and nothing waits for it. The system's resolver may take minutes to give up,
and a worker that has drained must be able to end.
"""

from __future__ import annotations

import ipaddress
import logging
import random
import socket
import threading
from collections.abc import Sequence
from typing import Final, Self

from baton.addresses import bracketed, host_of

logger = logging.getLogger(__name__)

LOOKUP_INTERVAL_S: Final = 5.0
UNKNOWN_INTERVAL_S: Final = 1.0
"""The interval until the first lookup of a name has succeeded."""
_JITTER: Final = 0.2
"""An interval is shorter or longer by up to this share: so workers do not all ask at once."""


class RouterAddresses:
    """The addresses behind `--routers`. Looks names up while entered."""

    def __init__(self, routers: Sequence[str]) -> None:
        """Lists the IP addresses among `routers`; names follow once it is entered.

        Args:
            routers: HOST:PORT each. A host may be a name that stands for several addresses.
        """
        self._over = threading.Event()
        self._said: dict[str, _Name | None] = {
            router: _Name(router, self._over) if _is_name(host_of(router)) else None
            for router in routers
        }

    def __enter__(self) -> Self:
        for name in self._said.values():
            if name is not None:
                name.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def listed(self) -> list[str]:
        """All addresses known now, each once."""
        known = ([said] if name is None else name.found for said, name in self._said.items())
        return list(dict.fromkeys(address for addresses in known for address in addresses))


class _Name(threading.Thread):
    """Looks one name up until `over` is set."""

    def __init__(self, router: str, over: threading.Event) -> None:
        super().__init__(name=f"lookup-{router}", daemon=True)
        self.found: list[str] = []
        """The addresses. This thread replaces the whole list; others read it."""
        self._router = router
        self._over = over
        self._is_missed = False

    def run(self) -> None:
        """Returns once `over` is set and the lookup under way has ended."""
        while True:
            self._look()
            interval_s = LOOKUP_INTERVAL_S if self.found else UNKNOWN_INTERVAL_S
            if self._over.wait(interval_s * random.uniform(1 - _JITTER, 1 + _JITTER)):
                return

    def _look(self) -> None:
        try:
            found = _addresses_of(self._router)
        except (OSError, UnicodeError) as error:  # UnicodeError: it cannot be a host's name
            if not self._is_missed:
                cause = str(getattr(error, "strerror", None) or error)
                details = {"router": self._router, "cause": cause}
                logger.warning("no address found for routers, trying on", extra=details)
            self._is_missed = True
            return
        self._is_missed = False
        if found != self.found:
            details = {"router": self._router, "addresses": ",".join(found)}
            logger.info("addresses of routers found", extra=details)
        self.found = found


def _addresses_of(router: str) -> list[str]:
    """Looks a name up: `V4:PORT` and `[V6]:PORT`, in the families that this host has.

    Raises:
        OSError: no address was found.
        UnicodeError: it cannot be a host's name.
    """
    port = router.rpartition(":")[2]
    known = socket.getaddrinfo(
        host_of(router), port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    hosts = sorted({str(address[0]) for *_, address in known})
    return [f"{bracketed(host)}:{port}" for host in hosts]


def _is_name(host: str) -> bool:
    """Whether a host has to be looked up. `localhost` does not: gRPC tries both families."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False
