"""One transfer at the prefill side: what of it is posted, and what can be posted next."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kv_transfer.events import SendStats
from kv_transfer.specs import SendSpec
from kv_transfer.types import PageIds
from kv_transfer.wire import Chunk


class SendState(enum.IntEnum):
    """State of a transfer at the prefill side; failure is the smallest."""

    FAILED = 0
    """Unknown what landed; pinned until the peer is proven dead."""
    QUIESCING = 1
    """Given up, with pushes in progress."""
    QUIESCED = 2
    """Given up, and nothing of it can land any more."""
    COMPUTING = 3
    """Chunks are still to come."""
    SENDING = 4
    """Everything is final, not everything is over there."""
    DELIVERED = 5
    """Everything is over there."""


class PageRange(NamedTuple):
    """What one push carries: pages [first, end) of the prompt."""

    first: int
    end: int
    is_last: bool
    """Whether it also carries the payload."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A transfer, granted or not. [held, next_page) is posted; [next_page, n) is not."""

    transfer_id: bytes
    spec: SendSpec | None = None
    """None before the grant."""
    state: SendState = SendState.COMPUTING
    end_token: int = 0
    """Tokens [0, end_token) are final."""
    payload: bytes | None = None
    """Set when all of them are."""
    next_page: int = 0
    last_posted: bool = False
    is_queued: bool = False
    """Whether it waits in the sender's queue."""
    failure_told: bool = False
    handles: set[int] = field(default_factory=set)
    """Pushes in progress."""
    pages: int = 0
    pushes: int = 0
    descriptors: int = 0
    started_ns: int = 0
    last_posted_ns: int = 0
    posting_s: float = 0.0

    @property
    def is_live(self) -> bool:
        """Whether something of it may still be posted."""
        return self.state >= SendState.COMPUTING

    @property
    def is_consistent(self) -> bool:
        """Whether the tokens said to be final fit the grant."""
        if self.spec is None:
            return True
        if self.payload is not None:
            return self.end_token == self.spec.num_tokens
        return self.end_token <= self.spec.num_tokens

    def next_range(self, max_pages: int) -> PageRange | None:
        """What is final and not posted yet, up to a number of pages; None: nothing."""
        spec = self.spec
        if spec is None or not self.is_live:
            return None
        is_final = self.payload is not None
        final = spec.num_pages if is_final else self.end_token // spec.page_size_tokens
        end = min(final, self.next_page + max_pages)
        is_last = is_final and not self.last_posted and end == spec.num_pages
        if end <= self.next_page and not is_last:
            return None
        return PageRange(self.next_page, end, is_last)

    def chunk(self, spec: SendSpec, pages: PageRange) -> Chunk:
        """The notification that goes with a push."""
        is_last = pages.is_last
        return Chunk(
            spec.transfer_id,
            spec.decode_epoch,
            pages.first,
            pages.end,
            spec.num_tokens if is_last else pages.end * spec.page_size_tokens,
            is_last,
            (self.payload or b"") if is_last else b"",
            spec.span_id if is_last else b"",
        )

    def mark_posted(self, pages: PageRange, began_ns: int) -> None:
        """Notes that a push was posted just now."""
        self.last_posted_ns = time.time_ns()
        self.posting_s += (self.last_posted_ns - began_ns) / 1e9
        self.started_ns = self.started_ns or began_ns
        self.next_page, self.last_posted = pages.end, pages.is_last
        self.pages += pages.end - pages.first

    def stats(self, page_bytes: int) -> SendStats:
        """Figures of the transfer, done just now."""
        return SendStats(
            self.pages,
            self.pages * page_bytes,
            self.pushes,
            self.descriptors,
            self.started_ns,
            self.last_posted_ns,
            time.time_ns(),
            self.posting_s,
        )


def count_runs(source: PageIds, target: PageIds) -> int:
    """Descriptors left when pages adjacent on both sides are merged."""
    if not len(source):
        return 0
    # Not `np.diff`, whose own checks take longer than the work on a push's few pages.
    breaks = (source[1:] - source[:-1] != 1) | (target[1:] - target[:-1] != 1)
    return 1 + int(np.count_nonzero(breaks))
