"""The transport of a worker whose pages are divided among ranks: one agent a rank behind it all.

Page ids mean the same on all ranks of a worker. So grants, sender and receiver know nothing of
ranks, and this file has all that they need:

1. `open` wires up the pairs of ranks that share bytes of any group (`kv_transfer.ranks.plan`), and
   ranks 0, which tell each other what belongs to no page.
2. `push` becomes one part for each pair that shares bytes of its group. Its state is the smallest
   of its parts' states.
3. Each part carries a notification to its own target rank. The peer shows the push's notification
   when those of all parts are there. So a chunk counts when every rank has its bytes.
4. Looking asks every rank and waits for all answers. If one rank stands still, so does this thread.
   So a group is awake only while all of its ranks are, which `settling_writes` counts on, and what
   is read before pages are freed is read on all ranks.

With one rank on both sides a push has one part, and its bytes and notifications are those of the
rank's transport itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kv_transfer.ranks.part import NOTHING, Part, Told
from kv_transfer.ranks.plan import Pair, Side, plan, side_of, units_of
from kv_transfer.transports.pool import check_pages, check_payload, check_same_kind
from kv_transfer.types import (
    MAX_NOTIFICATION_BYTES,
    Endpoint,
    Notification,
    PageGroup,
    PageIds,
    Piece,
    Pieces,
    PushState,
    TransportError,
    shared_groups,
)

_HEADER: Final = struct.Struct("<4sQH")
"""Before a part's notification: magic, the push's handle, the number of its parts."""
_MAGIC: Final = b"BTG1"
_RANK: Final = "/rank-"


def rank_agent(agent_name: str, rank: int) -> str:
    """The agent name of a rank. Rank 0 has that of the group."""
    return f"{agent_name}{_RANK}{rank}" if rank else agent_name


def _group_of(agent_name: str) -> str:
    name, _, rank = agent_name.rpartition(_RANK)
    return name if rank.isdigit() else agent_name


@dataclass(slots=True, eq=False)
class _Peer:
    endpoint: Endpoint
    parts: tuple[Endpoint, ...]
    opened: list[Pair]
    """Pairs (own rank, the peer's rank) that are wired up."""
    writes: tuple[list[Pair], ...]
    """Pairs that write pages of a group, by group."""

    def agent(self, rank: int) -> str:
        return self.parts[rank].agent_name


@dataclass(slots=True, eq=False)
class _Push:
    left: int
    """Parts in progress."""


@dataclass(slots=True, eq=False)
class _Arriving:
    """A push of a peer, of which some parts have come."""

    payload: bytes = b""
    came: set[tuple[str, int]] = field(default_factory=set)
    """Agent that wrote, and rank that it wrote to."""


class GroupTransport:
    """See the module. A `KvTransport`."""

    def __init__(self, parts: Sequence[Part], units: Sequence[int], stages: int = 1) -> None:
        """Makes one transport of the ranks' parts.

        Args:
            parts: by rank.
            units: of a whole page, by group.
            stages: of the ranks, the last one first.

        Raises:
            TransportError: `ranks_mismatch`, where so many ranks cannot divide the units.
        """
        self._parts = parts
        self._endpoint = joined([part.endpoint for part in parts], units, stages)
        self.name = self._endpoint.transport
        self._peers: dict[str, _Peer] = {}
        self._pushes: dict[int, _Push] = {}
        self._handles: dict[int, int] = {}
        """The push of each part in progress."""
        self._next = 1
        self._ended: list[tuple[int, PushState]] = []
        self._told: list[Notification] = []
        self._arriving: dict[str, dict[int, _Arriving]] = {}
        """By peer and handle."""

    @property
    def endpoint(self) -> Endpoint:
        """See `KvTransport`."""
        return self._endpoint

    def open(self, peer: Endpoint) -> None:
        """See `KvTransport`.

        Raises:
            TransportError: also `ranks_mismatch`, where its ranks cannot divide the units.
        """
        known = self._peers.get(peer.agent_name)
        if known is not None and known.endpoint == peer:
            return
        check_same_kind(self._endpoint, peer)
        parts = peer.parts
        shared = shared_groups(self._endpoint.groups, peer.groups) or 0
        plans = [self._plans(peer, group) for group in range(shared)]
        found = {pair for writes, reads in plans for pair in writes.keys() | reads}
        pairs = sorted(found | {(0, 0)})
        opened: list[Pair] = []
        try:
            for own, other in pairs:
                pieces = [writes.get((own, other), ()) for writes, _ in plans]
                self._parts[own].open(parts[other], pieces)
                opened.append((own, other))
        except TransportError:
            self._close(parts, opened)
            raise
        self._peers[peer.agent_name] = _Peer(
            peer, parts, pairs, tuple(sorted(writes) for writes, _ in plans)
        )

    def path(self, agent_name: str) -> str:
        """See `KvTransport`. All ranks of a worker are on one host: rank 0's."""
        return self._parts[0].path(agent_name)

    def push(
        self, agent_name: str, source: PageIds, target: PageIds, payload: bytes, group: int = 0
    ) -> int:
        """See `KvTransport`."""
        check_payload(payload, MAX_NOTIFICATION_BYTES)
        peer = self._open_peer(agent_name)
        if peer.writes[group][0][0]:  # Rank 0, which looks at them itself, writes nothing.
            own, theirs = (one.groups[group].num_pages for one in (self._endpoint, peer.endpoint))
            check_pages(source, own, target, theirs)
        handle, self._next = self._next, self._next + 1
        pages = source, target
        writes = peer.writes[group]
        payloads = _parts_of(payload, handle, len(writes))
        for (own, other), part in zip(writes, payloads, strict=True):
            part_handle, self._next = self._next, self._next + 1
            try:
                self._parts[own].push(part_handle, peer.agent(other), *pages, part, group)
            except TransportError:
                if handle not in self._pushes:
                    raise  # the first part: nothing was started
                self._part_ended(handle, PushState.ERROR)
                break
            self._handles[part_handle] = handle
            self._pushes.setdefault(handle, _Push(len(payloads)))
        return handle

    def notify(self, agent_name: str, payload: bytes) -> None:
        """See `KvTransport`. It goes from rank 0 to rank 0."""
        check_payload(payload, MAX_NOTIFICATION_BYTES)
        self._open_peer(agent_name)
        self._parts[0].notify(agent_name, payload)

    def poll_pushes(self) -> list[tuple[int, PushState]]:
        """See `KvTransport`."""
        if self._handles:
            self._look()
        ended, self._ended = self._ended, []
        return ended

    def poll_notifications(self) -> list[Notification]:
        """See `KvTransport`. A push and a notification behind it may take different ways between
        ranks, so one that means that a push has ended may be seen before the push is."""
        self._look()
        told, self._told = self._told, []
        return told

    def close(self, agent_name: str) -> None:
        """See `KvTransport`."""
        self._arriving.pop(agent_name, None)
        if (peer := self._peers.pop(agent_name, None)) is not None:
            self._close(peer.parts, peer.opened)

    def shutdown(self) -> None:
        """See `KvTransport`."""
        for part in self._parts:
            part.shutdown()

    def _plans(self, peer: Endpoint, group: int) -> tuple[dict[Pair, Pieces], set[Pair]]:
        """What this side writes of a group, and the pairs (own rank, the peer's) by which the peer
        does."""
        pages, theirs = self._endpoint.groups[group], peer.groups[group]
        if len(self._parts) == 1 and not peer.ranks and pages.bands == theirs.bands:
            return {(0, 0): (Piece(0, 0, pages.page_bytes),)}, {(0, 0)}
        units, planes = pages.units, pages.planes
        if units != theirs.units:
            both = f"{units} and {theirs.units} KV heads or other units"
            raise TransportError("ranks_mismatch", both)
        sides = side_of(self._endpoint, group), side_of(peer, group)
        if planes != theirs.planes:
            stages = max(len(side.layers) for side in sides)
            if stages > 1 or pages.bands or theirs.bands:
                raise TransportError("ranks_mismatch", "layers are not told by both, or differ")
            sides = Side(sides[0].tp), Side(sides[1].tp)
            planes = ()
        own, other = sides
        planes = planes or (pages.page_bytes // units,)
        written = plan(other, own, units, planes)
        return plan(own, other, units, planes), {(target, writer) for writer, target in written}

    def _look(self) -> None:
        """Asks all ranks at once, and reads all answers."""
        for part in self._parts:
            part.ask()
        news: list[tuple[int, Told]] = []
        for rank, part in enumerate(self._parts):
            if (answer := part.told()) is not NOTHING:
                news.append((rank, answer))
        if news:
            self._take(news)

    def _take(self, news: Sequence[tuple[int, Told]]) -> None:
        """Takes what ranks have told."""
        for _, answer in news:
            for part_handle, state in answer.ended:
                self._part_ended(self._handles.pop(part_handle), state)
        behind: list[Notification] = []
        for rank, answer in news:
            for told in answer.notifications:
                if not told.payload.startswith(_MAGIC):
                    behind.append(told)
                elif (whole := self._arrived(rank, told)) is not None:
                    self._told.append(whole)
        self._told += behind

    def _part_ended(self, handle: int, state: PushState) -> None:
        push = self._pushes.get(handle)
        if push is None:
            return  # another part of it failed
        push.left -= 1
        if state is PushState.DONE and push.left:
            return
        del self._pushes[handle]
        self._ended.append((handle, state))

    def _arrived(self, rank: int, told: Notification) -> Notification | None:
        """Takes the notification of one part; the push's, where this was the last part of it."""
        if len(told.payload) < _HEADER.size:
            return told  # whatever it is, its reader drops and counts it
        _, handle, parts = _HEADER.unpack_from(told.payload)
        name = _group_of(told.from_agent)
        pushes = self._arriving.setdefault(name, {})
        arriving = pushes.setdefault(handle, _Arriving())
        arriving.came.add((told.from_agent, rank))
        arriving.payload = told.payload[_HEADER.size :] or arriving.payload
        if len(arriving.came) < parts:
            return None
        del pushes[handle]
        return Notification(name, arriving.payload)

    def _open_peer(self, agent_name: str) -> _Peer:
        peer = self._peers.get(agent_name)
        if peer is None:
            raise TransportError("disconnected", "the peer is not open")
        return peer

    def _close(self, peer: Sequence[Endpoint], pairs: Iterable[Pair]) -> None:
        for own, other in pairs:
            self._parts[own].close(peer[other].agent_name)


def joined(parts: Sequence[Endpoint], units: Sequence[int], stages: int = 1) -> Endpoint:
    """The endpoint of a worker, from those of its ranks; `units` are those of a whole page of each
    group.

    Raises:
        TransportError: `ranks_mismatch`, where the ranks of a stage cannot divide the units.
    """
    first, tp, groups = parts[0], len(parts) // stages, list[PageGroup]()
    for at, (group, count) in enumerate(zip(first.groups, units, strict=True)):
        size = group.page_bytes
        if tp > 1:
            units_of(0, tp, count)
            size *= min(tp, count)
        if stages > 1 and group.planes:
            layers = sum(part.groups[at].num_layers for part in parts[::tp])
            size = count * layers * sum(group.planes)
        groups.append(group._replace(page_bytes=size, units=count))
    return replace(first, groups=tuple(groups), ranks=tuple(parts[1:]), stages=stages)


def _parts_of(payload: bytes, handle: int, parts: int) -> list[bytes]:
    """The notifications of the parts of a push. The first carries the payload."""
    if parts == 1:
        return [payload]
    header = _HEADER.pack(_MAGIC, handle, parts)
    return [header + payload, *[header] * (parts - 1)]
