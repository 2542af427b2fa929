"""The pool as a transport sees it: one run of bytes, in which each group has its pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kv_transfer.transports.processes import own_process
from kv_transfer.types import (
    MAX_GROUPS,
    Endpoint,
    PageGroup,
    PageIds,
    Piece,
    Pieces,
    TransportError,
    shared_groups,
)

_NOT_PLAIN: Final = (
    "no other process can map GPU memory of torch's expandable segments or of cudaMallocAsync, and "
    "pages would crawl through host memory: take both out of PYTORCH_CUDA_ALLOC_CONF"
)


@dataclass(frozen=True, slots=True, eq=False)
class PoolMemory:
    """A contiguous tensor with the pages of one or several groups, which this object keeps
    alive."""

    data: torch.Tensor
    """uint8, one dimension: a view of the tensor given."""
    groups: tuple[PageGroup, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, groups: Sequence[PageGroup]) -> PoolMemory:
        """Views a pool tensor as pages.

        Raises:
            TransportError: `bad_pool`, where the tensor is not one run of bytes, or the groups do
                not lie in it one behind the other.
        """
        if not tensor.is_contiguous():
            raise TransportError("bad_pool", "the pool's tensor is not contiguous")
        size = tensor.numel() * tensor.element_size()
        begins, ends = [group.offset for group in groups], [0, *(group.end for group in groups)]
        if not 0 < len(groups) <= MAX_GROUPS or ends[-1] > size:
            raise TransportError("bad_pool", f"not {size} bytes of pages")
        if any(begin < end for begin, end in zip(begins, ends, strict=False)):
            raise TransportError("bad_pool", "groups overlap")
        return cls(tensor.view(-1).view(torch.uint8), tuple(groups))

    @property
    def base_address(self) -> int:
        """Address of the first byte."""
        return self.data.data_ptr()

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.data.numel()

    def pages(self, group: int) -> torch.Tensor:
        """uint8, (num_pages, page_bytes): the pages of a group."""
        own = self.groups[group]
        return self.data[own.offset : own.end].view(own.num_pages, own.page_bytes)

    @property
    def memory(self) -> str:
        """ "DRAM" or "VRAM"."""
        return "VRAM" if self.data.is_cuda else "DRAM"

    @property
    def device_id(self) -> int:
        """Device ordinal; 0 in DRAM."""
        return max(0, self.data.get_device())

    def check_plain(self) -> None:
        """Raises TransportError where the pool is GPU memory that other processes cannot map. It
        can be registered all the same, and moves hundreds of times slower without any warning
        (github.com/ai-dynamo/nixl/issues/1754)."""
        if not self.data.is_cuda:
            return
        if torch.cuda.get_allocator_backend() != "native" or in_expandable_segment(
            self.base_address,
            torch.cuda.memory_snapshot(),  # type: ignore[no-untyped-call]  # torch's
        ):
            raise TransportError("bad_pool", _NOT_PLAIN)

    def endpoint(self, agent_name: str, transport: str, metadata: bytes) -> Endpoint:
        """Where peers can write this pool."""
        return Endpoint(
            agent_name,
            transport,
            metadata,
            self.base_address,
            self.groups,
            self.device_id,
            self.memory,
            own_process(),
        )


def in_expandable_segment(address: int, segments: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the address lies in a segment that can grow.

    Args:
        address: of GPU memory.
        segments: torch's own, as `torch.cuda.memory_snapshot` lists them.
    """
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in segments
        if segment.get("is_expandable")
    )


def check_same_kind(own: Endpoint, peer: Endpoint) -> None:
    """Raises TransportError where pages of one cannot be pages of the other."""
    for one, other in list(zip(own.groups, peer.groups, strict=False))[: _shared(own, peer)]:
        if one.page_bytes != other.page_bytes:
            sizes = f"{one.page_bytes} and {other.page_bytes}"
            raise TransportError("page_size_mismatch", sizes)


def _shared(own: Endpoint, peer: Endpoint) -> int:
    """How many groups move between two pools."""
    if own.transport != peer.transport:
        raise TransportError("transport_mismatch", f"{own.transport} and {peer.transport}")
    # A worker of the release before reports none.
    shared = shared_groups(own.groups, peer.groups)
    if shared is None:
        counts = f"{len(own.groups)} and {len(peer.groups)} groups"
        raise TransportError("groups_mismatch", counts)
    return shared


def pieces_between(
    own: Endpoint, peer: Endpoint, pieces: Sequence[Pieces] | None
) -> tuple[Pieces, ...]:
    """What of each page is written to a peer, by group: `pieces`, or all of it.

    Raises:
        TransportError: `transport_mismatch`, `groups_mismatch`, `page_size_mismatch`, or
            `bad_piece`.
    """
    if pieces is None:
        check_same_kind(own, peer)
        return whole_pages(own)[: _shared(own, peer)]
    if len(pieces) != _shared(own, peer):
        raise TransportError("groups_mismatch", f"{len(pieces)} pieces")
    for runs, one, other in zip(pieces, own.groups, peer.groups, strict=False):
        for piece in runs:
            ends = piece.own_offset + piece.size, piece.peer_offset + piece.size
            if min(piece) < 0 or ends[0] > one.page_bytes or ends[1] > other.page_bytes:
                sizes = f"{one.page_bytes} and {other.page_bytes}"
                raise TransportError("bad_piece", f"{piece} of {sizes}")
    return tuple(pieces)


def whole_pages(endpoint: Endpoint) -> tuple[Pieces, ...]:
    """The pieces that are all of each page."""
    return tuple((Piece(0, 0, group.page_bytes),) for group in endpoint.groups)


def check_pages(source: PageIds, own_pages: int, target: PageIds, peer_pages: int) -> None:
    """Raises TransportError unless source and target are nonempty, equally long and inside their
    pools."""
    for pages, num_pages in ((source, own_pages), (target, peer_pages)):
        # One look at a push's pages, on its way: what is negative is the largest without a sign.
        if not len(pages) or pages.view(np.uint32).max() >= num_pages:
            raise TransportError("bad_pages", "page ids outside of the pool")
    if len(source) != len(target):
        raise TransportError("bad_pages", f"{len(source)} pages to {len(target)}")


def check_payload(payload: bytes, limit: int) -> None:
    """Raises TransportError where a notification is too long to be sent."""
    if len(payload) > limit:
        raise TransportError("payload_too_large", f"{len(payload)} bytes")
