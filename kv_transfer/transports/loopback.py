"""Pages moved between pools of one process: for tests, and for `--role both` experiments.

Transports find each other by agent name in a registry of the process. A push lands at once, or
`delay_s` after it was posted, or, with `holds`, when `land` or `fail` says so: enough to play every
order of events that a network can.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kv_transfer.transports.pool import (
    PoolMemory,
    check_pages,
    check_payload,
    pieces_between,
)
from kv_transfer.types import (
    MAX_PART_BYTES,
    Endpoint,
    Notification,
    PageIds,
    Pieces,
    PushState,
    TransportError,
)

_registry: dict[str, LoopbackTransport] = {}
_registry_lock = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class _Push:
    peer: LoopbackTransport
    group: int
    pieces: Pieces
    source: PageIds
    target: PageIds
    payload: bytes
    lands_s: float


class LoopbackTransport:
    """See the module."""

    name = "loopback"
    moves_pieces = True

    def __init__(self, agent_name: str, pool: PoolMemory) -> None:
        self._agent_name = agent_name
        self._pool = pool
        self._endpoint = pool.endpoint(agent_name, self.name, b"")
        self._peers: dict[str, tuple[LoopbackTransport, Sequence[Pieces]]] = {}
        self._pushes: dict[int, _Push] = {}
        self._ended: list[tuple[int, PushState]] = []
        self._inbox: deque[Notification] = deque()
        self._next_handle = 1
        self.delay_s = 0.0
        """Each push lands this long after it was posted."""
        self.holds = False
        """Whether pushes stay in progress until `land` or `fail`."""
        with _registry_lock:
            _registry[agent_name] = self

    @property
    def endpoint(self) -> Endpoint:
        """See `KvTransport`."""
        return self._endpoint

    @property
    def held_pushes(self) -> list[int]:
        """Handles in progress, oldest first."""
        return list(self._pushes)

    def open(self, peer: Endpoint, pieces: Sequence[Pieces] | None = None) -> None:
        """See `PieceTransport`."""
        pieces = pieces_between(self._endpoint, peer, pieces)
        with _registry_lock:
            found = _registry.get(peer.agent_name)
        if found is None:
            raise TransportError("unreachable", "no such agent in this process")
        self._peers[peer.agent_name] = found, pieces

    def path(self, agent_name: str) -> str:
        """See `KvTransport`."""
        return self.name

    def push(
        self, agent_name: str, source: PageIds, target: PageIds, payload: bytes, group: int = 0
    ) -> int:
        """See `KvTransport`."""
        check_payload(payload, MAX_PART_BYTES)
        peer, pieces = self._peer(agent_name)
        groups = self._pool.groups[group], peer._pool.groups[group]
        check_pages(source, groups[0].num_pages, target, groups[1].num_pages)
        handle = self._next_handle
        self._next_handle += 1
        lands_s = time.monotonic() + self.delay_s
        pages = source.copy(), target.copy()
        self._pushes[handle] = _Push(peer, group, pieces[group], *pages, payload, lands_s)
        return handle

    def notify(self, agent_name: str, payload: bytes) -> None:
        """See `KvTransport`."""
        check_payload(payload, MAX_PART_BYTES)
        self._peer(agent_name)[0]._inbox.append(Notification(self._agent_name, payload))

    def poll_pushes(self) -> list[tuple[int, PushState]]:
        """See `KvTransport`."""
        if not self.holds:
            now_s = time.monotonic()
            for handle in [h for h, push in self._pushes.items() if push.lands_s <= now_s]:
                self.land(handle)
        ended, self._ended = self._ended, []
        return ended

    def poll_notifications(self) -> list[Notification]:
        """See `KvTransport`."""
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def close(self, agent_name: str) -> None:
        """See `KvTransport`."""
        self._peers.pop(agent_name, None)

    def shutdown(self) -> None:
        """See `KvTransport`."""
        with _registry_lock:
            if _registry.get(self._agent_name) is self:
                del _registry[self._agent_name]

    def land(self, handle: int) -> None:
        """Ends a push in progress: its bytes, then its notification."""
        self._copy(handle)
        self._ended.append((handle, PushState.DONE))

    def fail(self, handle: int, lands: bool) -> None:
        """Ends a push in ERROR, which says nothing about whether it landed."""
        if lands:
            self._copy(handle)
        else:
            del self._pushes[handle]
        self._ended.append((handle, PushState.ERROR))

    def _copy(self, handle: int) -> None:
        push = self._pushes.pop(handle)
        rows, target = (torch.from_numpy(pages).long() for pages in (push.source, push.target))
        mine, theirs = (one._pool.pages(push.group) for one in (self, push.peer))
        for own, other, size in push.pieces:
            pages = mine[rows, own : own + size]
            theirs[target, other : other + size] = pages.to(theirs.device)
        push.peer._inbox.append(Notification(self._agent_name, push.payload))

    def _peer(self, agent_name: str) -> tuple[LoopbackTransport, Sequence[Pieces]]:
        peer = self._peers.get(agent_name)
        if peer is None:
            raise TransportError("disconnected", "the peer is not open")
        return peer
