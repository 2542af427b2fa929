"""Where routers are: the addresses behind what `--routers` says, for as long as a worker lives.

Life of a name: looked up at once, and again every few seconds -> all addresses that it stands for
are listed -> from the next lookup on, those that it stands for then. While it stands for nothing,
or cannot be looked up, what was known last stays listed. IP addresses and `localhost` are listed as
they are.

Each name has a thread, which nobody waits for: the system's resolver may take minutes to give up,
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

from baton.addresses import host_of

logger = logging.getLogger(__name__)

LOOKUP_INTERVAL_S: Final = 5.0
UNKNOWN_INTERVAL_S: Final = 1.0
"""The same until a name has stood for something."""
_JITTER: Final = 0.2
"""Share by which an interval is shorter or longer, so that a pool of workers does not ask at once.
"""


class RouterAddresses:
    """What `--routers` stands for; looks names up while entered."""

    def __init__(self, routers: Sequence[str]) -> None:
        """Addresses that stand for themselves are listed from now on.

        Args:
            routers: HOST:PORT, where the host may be a name of several.
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
        """Every address known now, once."""
        known = ([said] if name is None else name.found for said, name in self._said.items())
        return list(dict.fromkeys(address for addresses in known for address in addresses))


class _Name(threading.Thread):
    """Looks one name up until it is over."""

    def __init__(self, router: str, over: threading.Event) -> None:
        super().__init__(name=f"lookup-{router}", daemon=True)
        self.found: list[str] = []
        """Set as a whole by this thread, read by others."""
        self._router = router
        self._over = over
        self._is_missed = False

    def run(self) -> None:
        """Returns after the last lookup that had begun."""
        while True:
            self._look()
            interval_s = LOOKUP_INTERVAL_S if self.found else UNKNOWN_INTERVAL_S
            if self._over.wait(interval_s * random.uniform(1 - _JITTER, 1 + _JITTER)):
                return

    def _look(self) -> None:
        try:
            found = _addresses_of(self._router)
        except (OSError, UnicodeError) as error:  # the latter where it cannot be a host's name
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
    """All that a name and a port stand for: `V4:PORT` and `[V6]:PORT`, of families that this host
    has. Raises OSError or UnicodeError where there are none."""
    port = router.rpartition(":")[2]
    known = socket.getaddrinfo(
        host_of(router), port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    hosts = sorted({str(address[0]) for *_, address in known})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


def _is_name(host: str) -> bool:
    """`localhost` is this host, in whichever family the router listens."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False
