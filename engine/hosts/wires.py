"""The sockets between rank 0 and the other ranks: of files where all are on one host, else of TCP.

Over TCP every frame is encrypted, and both ends are known (CurveZMQ). Rank 0 has a new pair of keys
for each start, and each host has one for its ranks, whose secret half never leaves that host. So a
rank of an earlier start can neither read nor say anything.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator

WIRES: Final = "wires.json"
DOMAIN: Final = "ranks"
"""ZAP's, of all sockets."""
MOST_WAITING: Final = 0
"""Messages of steps that may wait at either end. This is zmq's word for any number: with a bound, a
rank that is behind would miss steps."""
Socket = zmq.Socket[bytes]


class Keys(NamedTuple):
    """A pair of Curve keys, in Z85."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> Keys:
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class Wires(Protocol):
    """Rank 0's ends. They bind, and the ranks connect."""

    def bind(self, socket: Socket, name: str) -> None:
        """Binds a socket under a name. Raises zmq.ZMQError."""
        ...

    def close(self) -> None:
        """The sockets are closed."""
        ...


class FolderWires:
    """In a private folder of the host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def bind(self, socket: Socket, name: str) -> None:
        """See `Wires`."""
        socket.bind(f"ipc://{self._folder / name}")

    def close(self) -> None:
        """See `Wires`."""


class CurveWires:
    """On an address of this host, at ports that the system chooses.

    Args:
        context: of all sockets that are bound.
        address: where they listen.
        known: public keys of those who may connect.
    """

    def __init__(self, context: zmq.Context[Socket], address: str, known: Collection[str]) -> None:
        self.keys = Keys.new()
        self.addresses: dict[str, str] = {}
        """By name."""
        self._address = address
        self._known = frozenset(known)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, self)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether the holder of this key may connect. pyzmq's name."""
        return key.decode() in self._known

    def bind(self, socket: Socket, name: str) -> None:
        """See `Wires`."""
        socket.curve_server = True
        # A socket of no domain takes every key where the authenticator has ended.
        socket.zap_domain = DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.curve_secretkey = self.keys.secret.encode()
        socket.ipv6 = ":" in self._address
        host = f"[{self._address}]" if ":" in self._address else self._address
        self.addresses[name] = f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}"

    def close(self) -> None:
        """See `Wires`."""
        self._authenticator.stop()


def write_ends(
    folder: Path,
    addresses: Mapping[str, str],
    server: str,
    own: Keys,
    fabric: str,
    interface: str,
) -> None:
    """Leaves for the ranks of this host how they reach rank 0.

    Args:
        folder: the private folder of the host.
        addresses: of rank 0's sockets, by name.
        server: rank 0's public key.
        own: the keys of this host.
        fabric: this host's address in the network of the ranks' own data.
        interface: which has that address.
    """
    content = {"addresses": dict(addresses), "server": server, **own._asdict()}
    content |= {"fabric": fabric, "interface": interface}
    path = folder / WIRES
    path.touch(0o600)
    path.write_text(json.dumps(content), encoding="utf-8")


class Ends:
    """A rank's ends, from its host's private folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / WIRES
        self._told: dict[str, Any] | None = None
        if path.exists():
            self._told = json.loads(path.read_text(encoding="utf-8"))

    @property
    def over_hosts(self) -> bool:
        """Whether the ranks are on several hosts."""
        return self._told is not None

    @property
    def fabric(self) -> str:
        """This host's address for what other hosts send; empty: there are none."""
        return self._told["fabric"] if self._told else ""

    @property
    def interface(self) -> str:
        """The network interface that has it."""
        return self._told["interface"] if self._told else ""

    def connect(self, socket: Socket, name: str) -> None:
        """Connects a socket to that of rank 0."""
        if self._told is None:
            socket.connect(f"ipc://{self._folder / name}")
            return
        socket.curve_serverkey = self._told["server"].encode()
        socket.curve_publickey = self._told["public"].encode()
        socket.curve_secretkey = self._told["secret"].encode()
        address = self._told["addresses"][name]
        socket.ipv6 = "[" in address
        socket.connect(address)
