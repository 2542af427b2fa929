"""Building a worker's transport: one agent a rank behind one `KvTransport`.

Rank 0 has its part on its transfer thread. Each other rank runs `serve` beside its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import torch

from kv_transfer.ranks.group import GroupTransport, rank_agent
from kv_transfer.ranks.part import LocalPart, Part
from kv_transfer.ranks.remote import RankAgent, RemotePart, Socket
from kv_transfer.transports.factory import make_transport
from kv_transfer.types import KvTransport, PageGroup

Run = tuple[int, int, int, int, int, Sequence[int], Sequence[int]]
"""A rank's part of a group: bytes of its part of a page, pages, bytes from the beginning of the
memory to page 0; of the group's layers the first one here, how many are here, bytes of each in each
plane of a unit, and layers of each band (`PageGroup`)."""


class Pool(Protocol):
    """A rank's part of the pages, as the engine has it."""

    data: torch.Tensor
    """All of it, uint8, one run of memory."""

    @property
    def page_runs(self) -> Sequence[Run]:
        """The run of each group. Behind them that of a draft head, if there is one."""
        ...

    @property
    def drafts_digest(self) -> str:
        """Digest of the head and of the layout of what it keeps; empty: there is no head."""
        ...


class Others(NamedTuple):
    """The other ranks of a worker."""

    sockets: Sequence[Socket]
    """To ranks 1, 2, ..., each of which runs `serve`."""
    lost: Callable[[], str]
    """Why they are lost; empty while they are not."""


def group_transport(
    name: str,
    agent_name: str,
    pool: Pool,
    units: Sequence[int],
    others: Others,
    stages: int = 1,
) -> GroupTransport:
    """Builds a worker's transport, on the thread that will own it. All ranks build at once.

    Args:
        name: of the transport.
        agent_name: rank 0's.
        pool: rank 0's part of the pages.
        units: of a whole page of each group: KV heads, or what it has in their place.
        others: the other ranks.
        stages: of all ranks.

    Raises:
        TransportError: one part cannot be built.
    """
    remote = [
        RemotePart(socket, name, rank_agent(agent_name, rank), others.lost)
        for rank, socket in enumerate(others.sockets, 1)
    ]
    own = make_transport(name, agent_name, pool.data, _groups_of(pool))
    parts: list[Part] = [LocalPart(own), *(part.built() for part in remote)]
    return GroupTransport(parts, units, stages)


def serve(socket: Socket, rank: int, pool: Pool) -> None:
    """Serves a rank's part to rank 0, until rank 0 ends it.

    Args:
        socket: to rank 0.
        rank: this one.
        pool: its part of the pages.
    """

    def make(transport: str, agent_name: str) -> KvTransport:
        return make_transport(transport, agent_name, pool.data, _groups_of(pool))

    RankAgent(socket, rank, make).serve()


def _groups_of(pool: Pool) -> list[PageGroup]:
    groups = [
        PageGroup(size, count, 0, offset, "", first, layers, tuple(planes), tuple(bands))
        for size, count, offset, first, layers, planes, bands in pool.page_runs
    ]
    if pool.drafts_digest:
        groups[-1] = groups[-1]._replace(digest=pool.drafts_digest)
    return groups


BESIDE: Final = f"{serve.__module__}:{serve.__name__}"
"""Names `serve` to the ranks' processes."""
