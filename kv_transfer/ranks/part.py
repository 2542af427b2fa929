"""One rank's part of a group: what it writes, what came to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, cast

from kv_transfer.transports.pool import whole_pages
from kv_transfer.types import (
    Endpoint,
    KvTransport,
    Notification,
    PageIds,
    Pieces,
    PieceTransport,
    PushState,
    TransportError,
)


class Told(NamedTuple):
    """What became known at a rank since it was asked last."""

    ended: Sequence[tuple[int, PushState]] = ()
    """Pushes that left IN_PROGRESS, by the handles that the group gave them."""
    notifications: Sequence[Notification] = ()


NOTHING: Final = Told()
"""Most looks find this. It costs no new object, and the group has nothing to do for it."""


class Part(Protocol):
    """A rank, as its group sees it. Belongs to the transfer thread."""

    @property
    def endpoint(self) -> Endpoint:
        """Where peers can write this rank's pool."""
        ...

    def open(self, peer: Endpoint, pieces: Sequence[Pieces]) -> None:
        """Wires up to a rank of a peer, with pieces for each group. Errors are those of
        `KvTransport.open`."""
        ...

    def path(self, agent_name: str) -> str:
        """See `KvTransport`."""
        ...

    def push(
        self,
        handle: int,
        agent_name: str,
        source: PageIds,
        target: PageIds,
        payload: bytes,
        group: int,
    ) -> None:
        """Starts writing its pieces of these pages. How that ended is told.

        Raises:
            TransportError: nothing was started, and nothing will be told.
        """
        ...

    def notify(self, agent_name: str, payload: bytes) -> None:
        """See `KvTransport`. Only rank 0 is asked to."""
        ...

    def ask(self) -> None:
        """Asks what is new. `told` must follow."""
        ...

    def told(self) -> Told:
        """Waits for the answer. It does not come while the rank stands still."""
        ...

    def close(self, agent_name: str) -> None:
        """See `KvTransport`."""
        ...

    def shutdown(self) -> None:
        """See `KvTransport`."""
        ...


class LocalPart:
    """A rank of this process."""

    def __init__(self, transport: KvTransport) -> None:
        self.transport = transport
        self._handles: dict[int, int] = {}

    @property
    def endpoint(self) -> Endpoint:
        """See `Part`."""
        return self.transport.endpoint

    def open(self, peer: Endpoint, pieces: Sequence[Pieces]) -> None:
        """See `Part`."""
        if tuple(pieces) == whole_pages(self.endpoint) == whole_pages(peer):
            self.transport.open(peer)
        elif hasattr(self.transport, "moves_pieces"):
            cast(PieceTransport, self.transport).open(peer, pieces)
        else:
            raise TransportError("transport_mismatch", "it moves whole pages alone")

    def path(self, agent_name: str) -> str:
        """See `Part`."""
        return self.transport.path(agent_name)

    def push(
        self,
        handle: int,
        agent_name: str,
        source: PageIds,
        target: PageIds,
        payload: bytes,
        group: int,
    ) -> None:
        """See `Part`."""
        self._handles[self.transport.push(agent_name, source, target, payload, group)] = handle

    def notify(self, agent_name: str, payload: bytes) -> None:
        """See `Part`."""
        self.transport.notify(agent_name, payload)

    def ask(self) -> None:
        """See `Part`."""

    def told(self) -> Told:
        """See `Part`."""
        # First the pushes: the notification of one that has ended is there then.
        ended = self._ended() if self._handles else ()
        notifications = self.transport.poll_notifications()
        return Told(ended, notifications) if ended or notifications else NOTHING

    def close(self, agent_name: str) -> None:
        """See `Part`."""
        self.transport.close(agent_name)

    def shutdown(self) -> None:
        """See `Part`."""
        self.transport.shutdown()

    def _ended(self) -> Sequence[tuple[int, PushState]]:
        return [(self._handles.pop(own), state) for own, state in self.transport.poll_pushes()]
