"""What a transport is, and what it moves.

A *pool* is one run of memory at `base_address` with the pages of one or several *groups*
(`PageGroup`): the pages of a group have one size and ids of their own. A *push* writes pages of one
group of the local pool into pages of the same group of a peer's pool and then shows the peer a
notification; the notification is seen only after every byte of its push has landed.

A transport belongs to one thread, the transfer thread: no method may be called from another.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int32]

MAX_NOTIFICATION_BYTES = 4096
MAX_PART_BYTES = MAX_NOTIFICATION_BYTES + 64
"""With what a group of ranks adds (`kv_transfer.ranks.group`)."""
SCRATCH_PAGE = 0
"""Page of each group that is never granted: padding rows store into it, warm-ups and self-tests
write it."""
MAX_GROUPS = 8
"""Most groups of a pool: the last notification of a transfer has a bit for each."""


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


class PageGroup(NamedTuple):
    """The pages of one group in a pool, at a constant stride."""

    page_bytes: int
    num_pages: int
    """The scratch page included."""
    units: int = 0
    """Equal parts of a page, one behind the other, that ranks divide: KV heads, or what the group
    has in their place. 0: unknown, and only whole pages move."""
    offset: int = 0
    """Bytes from the pool's beginning to the group's page 0."""
    digest: str = ""
    """Digest of a draft head and of the layout of what it keeps under the page ids of group 0. Such
    a group is the last, and moves between equal digests alone. Empty: every worker has the
    group."""
    first_layer: int = 0
    """The first one that the owner keeps of the group's layers, by its place among these."""
    num_layers: int = 0
    """How many of them it keeps."""
    planes: tuple[int, ...] = ()
    """Bytes of each of them in each plane of a unit, such as values, and exponents behind those of
    all layers of a band. Empty: unknown, and each rank has all layers."""
    bands: tuple[int, ...] = ()
    """Layers of each band. A page has all units of the first band's layers, then those of the next.
    Empty: one band."""

    @property
    def end(self) -> int:
        """Bytes from the pool's beginning to the end of the group's last page."""
        return self.offset + self.page_bytes * self.num_pages


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker's pool can be written; travels as `baton.worker.v1.KvEndpoint`."""

    agent_name: str
    """Unique per start of the process."""
    transport: str
    metadata: bytes
    base_address: int
    groups: tuple[PageGroup, ...]
    """At least one. The first has a page for every few tokens of the whole context."""
    device_id: int
    memory: str
    """"DRAM" or "VRAM"."""
    process: str = ""
    """The owner's process, as `kv_transfer.transports.processes` names it; empty: nobody can watch
    it."""
    ranks: tuple[Endpoint, ...] = ()
    """The parts of ranks 1, 2, ..., where several processes hold the pool. Then the `page_bytes` of
    `groups` are those of a whole page, and all else is rank 0's."""
    stages: int = 1
    """Stages of the ranks, equally many each, the last one first. Each has some of the layers."""

    @property
    def parts(self) -> tuple[Endpoint, ...]:
        """The part of each rank, rank 0 first, also where there is one."""
        if not self.ranks:
            return (self,)
        tp = (1 + len(self.ranks)) // self.stages

        def own(group: PageGroup) -> PageGroup:
            size = group.page_bytes // min(tp, group.units)
            if group.planes:
                size = max(1, group.units // tp) * group.num_layers * sum(group.planes)
            return group._replace(page_bytes=size)

        return replace(self, groups=tuple(map(own, self.groups)), ranks=(), stages=1), *self.ranks


def shared_groups(own: Sequence[PageGroup], peer: Sequence[PageGroup]) -> int | None:
    """How many groups move between two pools; None: they do not fit each other."""
    mine, theirs = ([group.digest for group in groups] for groups in (own, peer))
    if mine.count("") != theirs.count(""):
        return None
    return len(mine) if mine == theirs else mine.count("")


class Piece(NamedTuple):
    """Bytes of each page that one rank writes to another, one run on both sides."""

    own_offset: int
    """Bytes from the beginning of the writer's page."""
    peer_offset: int
    """Bytes from the beginning of the target's page."""
    size: int


Pieces = tuple[Piece, ...]
"""All that one rank writes of each page to another; empty: it writes nothing there, and only hears
and tells."""


@dataclass(frozen=True, slots=True)
class Notification:
    """A payload that a peer sent, with or behind a push."""

    from_agent: str
    payload: bytes


class KvTransport(Protocol):
    """Moves pages. One per process, owned by the transfer thread."""

    name: str

    @property
    def endpoint(self) -> Endpoint:
        """Where peers can write this process's pool; the pool is registered at construction."""
        ...

    def open(self, peer: Endpoint) -> None:
        """Wires up to a peer. Opening the same agent again does nothing.

        Raises:
            TransportError: `unreachable`, `transport_mismatch`, `groups_mismatch`,
                `page_size_mismatch`, or `peer_busy` where another peer of that name is not wound up
                yet.
        """
        ...

    def path(self, agent_name: str) -> str:
        """The way to an open peer as far as it can be told, such as "nixl/shm"."""
        ...

    def push(
        self, agent_name: str, source: PageIds, target: PageIds, payload: bytes, group: int = 0
    ) -> int:
        """Starts writing `source[i]` into the peer's `target[i]`, then shows it `payload`.

        The pages are those of one group, by its index. Adjacent runs may be merged. Returns a
        handle for `poll_pushes`.

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


class PieceTransport(KvTransport, Protocol):
    """A transport that can also write pieces of each page."""

    def open(self, peer: Endpoint, pieces: Sequence[Pieces] | None = None) -> None:
        """As `KvTransport.open`. Pushes to this peer write of each page the pieces of its group;
        None: whole pages.

        Raises:
            TransportError: also `bad_piece`, where one does not fit the pages.
        """
        ...
