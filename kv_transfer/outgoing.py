"""One transfer at the prefill side: what of it is posted, and what can be posted next."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kv_transfer.events import SendStats
from kv_transfer.specs import SendSpec, Source
from kv_transfer.types import PageGroup, PageIds
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
    """What one push carries: pages [first, end) of the prompt, of one group."""

    group: int
    first: int
    end: int
    is_last: bool
    """Whether it also carries the payload."""
    source: PageIds
    """The pages in this pool."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A transfer, granted or not. Of each group [begin, next) is posted; [next, end) is not."""

    transfer_id: bytes
    spec: SendSpec | None = None
    """None before the grant."""
    state: SendState = SendState.COMPUTING
    end_token: int = 0
    """Tokens [0, end_token) are final."""
    payload: bytes | None = None
    """Set when all of them are."""
    sources: Sequence[Source] = ()
    """By group: pages of this pool, as the latest chunk has them."""
    next_pages: list[int] = field(default_factory=list)
    """By group."""
    last_posted: bool = False
    is_queued: bool = False
    """Whether it waits in the sender's queue."""
    failure_reported: bool = False
    handles: set[int] = field(default_factory=set)
    """Pushes in progress."""
    posted: list[int] = field(default_factory=list)
    """Pages posted, by group."""
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
        """Whether the tokens said to be final fit the grant, and their pages are known."""
        spec = self.spec
        if spec is None or not self.end_token:
            return True
        is_whole = self.end_token == spec.num_tokens
        if not is_whole and (self.payload is not None or self.end_token > spec.num_tokens):
            return False
        if len(self.sources) != len(spec.targets):
            return False
        return all(
            final <= first or source.of(first, final) is not None
            for source, first, final in zip(
                self.sources, self.next_pages, self._finals(spec), strict=True
            )
        )

    def begin(self, spec: SendSpec) -> None:
        """Takes the grant."""
        self.spec = spec
        self.next_pages = [target.begin for target in spec.targets]
        self.posted = [0] * len(spec.targets)

    def next_range(self, max_pages: Sequence[int]) -> PageRange | None:
        """What is final and not posted yet, up to a number of pages by group; None: nothing.

        Group 0 is the last: its last push carries the payload. But its full pushes come first: they
        are long on their way, and those of other groups are posted meanwhile.
        """
        spec = self.spec
        if spec is None or not self.is_live:
            return None
        is_final = self.payload is not None
        finals = self._finals(spec)
        has_full = finals[0] - self.next_pages[0] > max_pages[0]
        for group in (0,) if has_full else range(len(finals) - 1, -1, -1):
            first = self.next_pages[group]
            end = min(finals[group], first + max_pages[group])
            is_last = not group and is_final and not self.last_posted and end == spec.num_pages
            if end > first or is_last:
                source = self.sources[group].of(first, end)
                assert source is not None, "it is consistent"
                return PageRange(group, first, end, is_last, source)
        return None

    def _finals(self, spec: SendSpec) -> list[int]:
        """Behind the last page that is final, by group."""
        if self.payload is not None:
            return [target.end for target in spec.targets]
        end = self.end_token // spec.page_size_tokens
        return [0 if target.is_state else min(target.end, end) for target in spec.targets]

    def chunk(self, spec: SendSpec, pages: PageRange) -> Chunk:
        """The notification that goes with a push."""
        is_last = pages.is_last
        return Chunk(
            spec.transfer_id,
            spec.decode_epoch,
            pages.first,
            pages.end,
            self.end_token,
            is_last,
            (self.payload or b"") if is_last else b"",
            spec.span_id if is_last else b"",
            pages.group,
        )

    def mark_posted(self, pages: PageRange, began_ns: int) -> None:
        """Notes that a push was posted just now."""
        self.last_posted_ns = time.time_ns()
        self.posting_s += (self.last_posted_ns - began_ns) / 1e9
        self.started_ns = self.started_ns or began_ns
        self.next_pages[pages.group], self.last_posted = pages.end, pages.is_last
        self.posted[pages.group] += pages.end - pages.first

    def stats(self, groups: Sequence[PageGroup]) -> SendStats:
        """Figures of the transfer, done just now; `groups` are those of the pool."""
        return SendStats(
            sum(self.posted),
            sum(
                pages * group.page_bytes for pages, group in zip(self.posted, groups, strict=False)
            ),
            self.pushes,
            self.descriptors,
            self.started_ns,
            self.last_posted_ns,
            time.time_ns(),
            self.posting_s,
        )

    def check_invariants(self, spec: SendSpec) -> None:
        """Raises AssertionError where a group's pages contradict `kv_transfer.sending`."""
        for group, target in enumerate(spec.targets):
            assert self.next_pages[group] == target.begin + self.posted[group]
            if self.posted[group] and self.payload is None:
                assert not target.is_state
                assert self.next_pages[group] * spec.page_size_tokens <= self.end_token


def count_runs(source: PageIds, target: PageIds) -> int:
    """Descriptors left when pages adjacent on both sides are merged."""
    if not len(source):
        return 0
    # Not `np.diff`, whose own checks take longer than the work on a push's few pages.
    breaks = (source[1:] - source[:-1] != 1) | (target[1:] - target[:-1] != 1)
    return 1 + int(np.count_nonzero(breaks))
