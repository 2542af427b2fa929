"""What rank 0 needs of the agents of other hosts, each of which keeps the ranks there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from engine.hosts.wires import Keys


class Order(NamedTuple):
    """What agents start ranks with."""

    config: str
    """The content of `CONFIG` of `engine.ranks.process`, but for what each host has by itself."""
    addresses: Mapping[str, str]
    """Addresses of rank 0's sockets, by name."""
    server: str
    """Rank 0's public key."""


class Heard(NamedTuple):
    """Whom to tell what comes from agents, on any thread."""

    rows: Callable[[int, bytes], None]
    """Figures of the ranks of a host from this one on (`engine.ranks.stats`)."""
    stopped: Callable[[int, Collection[int]], None]
    """The ranks of a host that are stopped; it is named by its first rank."""
    lost: Callable[[str], None]
    """The ranks are lost, and why. Only the first word counts."""


class OtherHosts(Protocol):
    """The agents of all other hosts. They have joined."""

    nodes: int
    """Hosts, this one included."""
    address: str
    """This host's, at which the others reach rank 0's sockets."""
    fabric: str
    """This host's in the network of the ranks' own data."""
    interface: str
    """Which has that address."""
    keys: Keys
    """Keys of the ranks of this host."""

    @property
    def known(self) -> Sequence[str]:
        """The public keys of all hosts."""
        ...

    def keeps(self, pids: Collection[int]) -> None:
        """These processes are ranks of this host, and none of them has been reaped yet."""
        ...

    def begin(self, order: Order, heard: Heard) -> None:
        """Has all agents start their ranks."""
        ...

    def stop(self, reason: str) -> None:
        """Ends the ranks of all other hosts: in order, where there is no reason."""
        ...
