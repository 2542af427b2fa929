"""The pool as a transport sees it: one run of bytes cut into pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kv_transfer.transports.processes import own_process
from kv_transfer.types import Endpoint, PageIds, Piece, TransportError

_NOT_PLAIN: Final = (
    "no other process can map GPU memory of torch's expandable segments or of cudaMallocAsync, and "
    "pages would crawl through host memory: take both out of PYTORCH_CUDA_ALLOC_CONF"
)


@dataclass(frozen=True, slots=True, eq=False)
class PoolMemory:
    """A contiguous tensor of `num_pages * page_bytes` bytes, which this object keeps alive."""

    pages: torch.Tensor
    """uint8, (num_pages, page_bytes): a view of the tensor given."""

    @classmethod
    def of(cls, tensor: torch.Tensor, page_bytes: int, num_pages: int) -> PoolMemory:
        """Views a pool tensor as pages.

        Raises:
            TransportError: `bad_pool`, where the tensor is not that many bytes in one run.
        """
        if not tensor.is_contiguous():
            raise TransportError("bad_pool", "the pool's tensor is not contiguous")
        if tensor.numel() * tensor.element_size() != page_bytes * num_pages:
            raise TransportError("bad_pool", f"not {num_pages} pages of {page_bytes} bytes")
        return cls(tensor.view(-1).view(torch.uint8).view(num_pages, page_bytes))

    @property
    def base_address(self) -> int:
        """Address of page 0."""
        return self.pages.data_ptr()

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the scratch page included."""
        return self.pages.shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, and from one to the next."""
        return self.pages.shape[1]

    @property
    def memory(self) -> str:
        """ "DRAM" or "VRAM"."""
        return "VRAM" if self.pages.is_cuda else "DRAM"

    @property
    def device_id(self) -> int:
        """Device ordinal; 0 in DRAM."""
        return max(0, self.pages.get_device())

    def check_plain(self) -> None:
        """Raises TransportError where the pool is GPU memory that other processes cannot map. It
        can be registered all the same, and moves hundreds of times slower without any warning
        (github.com/ai-dynamo/nixl/issues/1754)."""
        if not self.pages.is_cuda:
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
            self.page_bytes,
            self.num_pages,
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
    if own.transport != peer.transport:
        raise TransportError("transport_mismatch", f"{own.transport} and {peer.transport}")
    if own.page_bytes != peer.page_bytes:
        raise TransportError("page_size_mismatch", f"{own.page_bytes} and {peer.page_bytes}")


def piece_between(own: Endpoint, peer: Endpoint, piece: Piece | None) -> Piece:
    """What of each page is written to a peer: `piece`, or all of it.

    Raises:
        TransportError: `transport_mismatch`, `page_size_mismatch`, or `bad_piece`.
    """
    if piece is None:
        check_same_kind(own, peer)
        return Piece(0, 0, own.page_bytes)
    if own.transport != peer.transport:
        raise TransportError("transport_mismatch", f"{own.transport} and {peer.transport}")
    ends = piece.own_offset + piece.size, piece.peer_offset + piece.size
    if min(piece) < 0 or ends[0] > own.page_bytes or ends[1] > peer.page_bytes:
        raise TransportError("bad_piece", f"{piece} of {own.page_bytes} and {peer.page_bytes}")
    return piece


def check_pages(source: PageIds, own_pages: int, target: PageIds, peer_pages: int) -> None:
    """Raises TransportError where a push names pages that its two pools have not, or none, or does
    not name one for the other."""
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
