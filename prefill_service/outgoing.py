"""The meeting point of a prompt's chunks and the grant, which says where they go.

Chunks come on the step thread, so that no other thread stands between a chunk and its push. The
grant comes on the event loop, before, between or after them. Life:

1. OPEN: the chunks wait for the grant, or the grant waits for the first chunk.
2. BEGUN: both are known. The transfer thread hears of every chunk at once.
3. CLOSED: the transfer thread hears nothing more.

Invariants: the transfer thread hears `begin_send` once, before any chunk. Its last `chunk_computed`
covers all chunks so far. It hears nothing after `close` returned.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from baton.worker.v1 import worker_pb2
from engine.group_pages import GroupPages
from engine.types import PageIds
from kv_transfer.specs import TRANSFER_ID_BYTES, SendSpec, Source, Target
from telemetry.names import SpanName
from telemetry.tracing import Span, span_id_bytes, start_span
from worker_base.messages import MalformedMessage, pages_of, unpack_ids

if TYPE_CHECKING:
    from kv_transfer.thread import TransferThread
    from worker_base.page_layout import PageLayout


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """A grant, checked."""

    transfer_id: bytes
    peer: str
    decode_epoch: int
    targets: tuple[Target, ...]
    """By cache group."""

    @property
    def held_pages(self) -> int:
        """Pages not to be sent, over all groups."""
        return sum(target.held_pages for target in self.targets)

    @classmethod
    def of(
        cls,
        grant: worker_pb2.Grant,
        peer: str,
        num_pages: int,
        layout: PageLayout,
        *,
        drafts: bool = False,
    ) -> Self | None:
        """Checks a grant; None unless it is for `num_pages` pages of that peer's pool, in the cache
        groups of this one's. With `drafts` it may be for what a draft head keeps of them, too."""
        try:
            targets = (
                Target(unpack_ids(grant.page_ids), grant.held_pages),
                *(
                    Target(
                        unpack_ids(other.page_ids),
                        other.held_pages,
                        other.first_page,
                        is_state=group in layout.states,
                    )
                    for group, other in enumerate(grant.groups, start=1)
                ),
            )
        except MalformedMessage:
            return None
        is_sound = (
            len(layout.groups) <= len(targets) <= len(layout.groups) + drafts
            and len(targets[0].pages) == num_pages
            and all(target.is_sound(num_pages) for target in targets)
            and len(grant.transfer_id) == TRANSFER_ID_BYTES
            and grant.decode_agent_name == peer
        )
        if not is_sound:
            return None
        return cls(grant.transfer_id, peer, grant.decode_epoch, targets)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    sources: tuple[Source, ...]
    end_token: int
    payload: bytes | None


class OutgoingPrompt:
    """One prompt on its way out. Thread-safe."""

    def __init__(
        self, transfer: TransferThread, num_tokens: int, page_size_tokens: int, traceparent: str
    ) -> None:
        self.num_tokens = num_tokens
        self.span: Span | None = None
        """kv.send, from BEGUN on. Its id travels with the last notification."""
        self._transfer = transfer
        self._page_size_tokens = page_size_tokens
        self._traceparent = traceparent
        self._lock = threading.Lock()
        self._destination: Destination | None = None
        self._latest: _Chunk | None = None
        self._closed = False

    @property
    def num_pages(self) -> int:
        """Pages of the whole prompt."""
        return pages_of(self.num_tokens, self._page_size_tokens)

    @property
    def destination(self) -> Destination | None:
        """The grant, once it came."""
        return self._destination

    def chunk(
        self,
        pages: PageIds,
        end_token: int,
        payload: bytes | None,
        others: Sequence[GroupPages] = (),
    ) -> None:
        """Takes a chunk: the KV of [0, end_token) is final.

        Args:
            pages: those of the whole prompt, of group 0.
            end_token: where the chunk ends.
            payload: of the last notification; None with every chunk but the last.
            others: pages of the other cache groups.
        """
        with self._lock:
            if self._closed:
                return
            is_first = self._latest is None
            # Those of group 0 stay the same ones, so they are copied once.
            first = Source(pages.copy()) if self._latest is None else self._latest.sources[0]
            more = (Source(other.pages.copy(), other.first_page) for other in others)
            self._latest = _Chunk((first, *more), end_token, payload)
            if self._destination is None:
                return
            if is_first:
                self._begin(self._destination)
            self._send(self._destination, self._latest)

    def grant(self, destination: Destination) -> None:
        """Takes the pages that may be written. Only the first grant counts."""
        with self._lock:
            if self._closed or self._destination is not None:
                return
            self._destination = destination
            if self._latest is not None:
                self._begin(destination)
                self._send(destination, self._latest)

    def close(self) -> Destination | None:
        """Sends nothing more. Returns the grant: its transfer may still have to be aborted."""
        with self._lock:
            self._closed = True
            return self._destination

    def _begin(self, destination: Destination) -> None:
        self.span = start_span(SpanName.KV_SEND, self._traceparent)
        self._transfer.begin_send(
            SendSpec(
                transfer_id=destination.transfer_id,
                peer=destination.peer,
                decode_epoch=destination.decode_epoch,
                targets=destination.targets,
                num_tokens=self.num_tokens,
                page_size_tokens=self._page_size_tokens,
                span_id=span_id_bytes(self.span),
            )
        )

    def _send(self, destination: Destination, chunk: _Chunk) -> None:
        sources = chunk.sources
        if len(destination.targets) > len(sources):
            sources = (*sources, sources[0])  # A draft head's pages have the ids of group 0's.
        self._transfer.chunk_computed(
            destination.transfer_id, chunk.end_token, chunk.payload, sources
        )
