"""What a transport is, and what it moves.

A *pool* is `num_pages` pages of `page_bytes` each at a constant stride from `base_address`. A
*push* writes pages of the local pool into pages of a peer's pool and then shows the peer a
notification; the notification is seen only after every byte of its push has landed.

A transport belongs to one thread, the transfer thread: no method may be called from another.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int32]

MAX_NOTIFICATION_BYTES = 4096
SCRATCH_PAGE = 0
"""Page that is never granted: padding rows store into it, warm-ups and self-tests write it."""


class TransportError(Exception):
    """A transport could not do what was asked; `cause` is a short stable word for metrics."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


class PushState(enum.IntEnum):
    """State of a push; failure is the smallest, so the minimum over several is the truth."""

    ERROR = 0
    """Unknown how much landed, or still will: source and target stay pinned until the other
    process is gone."""
    IN_PROGRESS = 1
    DONE = 2
    """Nothing of it can land any more."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker's pool can be written; travels as `baton.worker.v1.KvEndpoint`."""

    agent_name: str
    """Unique per start of the process."""
    transport: str
    metadata: bytes
    base_address: int
    page_bytes: int
    num_pages: int
    device_id: int
    memory: str
    """"DRAM" or "VRAM"."""
    process: str = ""
    """The owner's process, as `kv_transfer.transports.processes` names it; empty: nobody can watch
    it."""


@dataclass(frozen=True, slots=True)
class Notification:
    """A payload that a peer sent, with or behind a push."""

    from_agent: str
    payload: bytes


class KvTransport(Protocol):
    """Moves pages. One per process, owned by the transfer thread."""

    name: str
    can_revoke: bool
    """Whether closing a peer provably stops its writes. False unless proven."""

    @property
    def endpoint(self) -> Endpoint:
        """Where peers can write this process's pool; the pool is registered at construction."""
        ...

    def open(self, peer: Endpoint) -> None:
        """Wires up to a peer. Opening the same agent again does nothing.

        Raises:
            TransportError: `unreachable`, `transport_mismatch`, `page_size_mismatch`, or
                `peer_busy` where another peer of that name is not wound up yet.
        """
        ...

    def path(self, agent_name: str) -> str:
        """The way to an open peer as far as it can be told, such as "nixl/shm"."""
        ...

    def push(self, agent_name: str, source: PageIds, target: PageIds, payload: bytes) -> int:
        """Starts writing `source[i]` into the peer's `target[i]`, then shows it `payload`.

        Adjacent runs may be merged. Returns a handle for `poll_pushes`. Where the process has host
        slots, slot i has the id `num_pages + i`; the sources of a push are all pages of the pool,
        or all slots.

        Raises:
            TransportError: nothing was started. `disconnected`: the peer must be opened anew.
        """
        ...

    def notify(self, agent_name: str, payload: bytes) -> None:
        """Shows the peer a payload without moving pages.

        Raises:
            TransportError: it could not be sent. `disconnected`: as for `push`.
        """
        ...

    def poll_pushes(self) -> list[tuple[int, PushState]]:
        """Pushes that left IN_PROGRESS since the last call. A handle is reported once."""
        ...

    def poll_notifications(self) -> list[Notification]:
        """Payloads received since the last call, in order per peer."""
        ...

    def close(self, agent_name: str) -> None:
        """Forgets a peer. Handles in progress towards it go on being polled."""
        ...

    def shutdown(self) -> None:
        """Releases everything; the pool's memory may be freed afterwards. With pushes in progress
        nothing is released: they would go on reading the pool."""
        ...
