"""A grant, as each of its two sides hands it to the transfer thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_transfer.types import MAX_GROUPS, PageIds

TRANSFER_ID_BYTES = 16
"""128 bits: drawn numbers never meet, and nobody guesses one."""


class Source(NamedTuple):
    """Pages of one group of this pool with KV of a prompt, in order."""

    pages: PageIds
    first_page: int = 0
    """Which page of the prompt the first of them is."""

    def of(self, first: int, end: int) -> PageIds | None:
        """Pages [first, end) of the prompt; None where some are not among these."""
        begin = self.first_page
        is_there = begin <= first <= end <= begin + len(self.pages)
        return self.pages[first - begin : end - begin] if is_there else None


class Target(NamedTuple):
    """Pages of one group that a transfer may fill: a range of the prompt's pages, in order."""

    pages: PageIds
    """Pages of the peer's pool."""
    held_pages: int = 0
    """Leading pages not to be sent."""
    first_page: int = 0
    """Which page of the prompt the first of them is. Behind a window it is not 0."""
    is_state: bool = False
    """One page, final with the last token of the prompt, instead of one for every few tokens."""

    @property
    def begin(self) -> int:
        """The first page of the prompt that is to be sent."""
        return self.first_page + self.held_pages

    @property
    def end(self) -> int:
        """Behind the last page of the prompt that is to be sent."""
        return self.first_page + len(self.pages)

    def is_sound(self, prompt_pages: int) -> bool:
        """Whether the range fits a prompt of so many pages."""
        end = 1 if self.is_state else prompt_pages
        return min(self.first_page, self.held_pages) >= 0 and self.begin <= self.end == end


@dataclass(frozen=True, slots=True, eq=False)
class SendSpec:
    """A grant, as the prefill side uses it."""

    transfer_id: bytes
    peer: str
    """Agent name of the decode worker; must be open or opening."""
    decode_epoch: int
    targets: Sequence[Target]
    """By group. That of group 0 is for all pages of the prompt."""
    num_tokens: int
    """Tokens of the prompt."""
    page_size_tokens: int
    span_id: bytes = b""
    """8 bytes, or empty."""
    yields: bool = False
    """A fetch: the pushes of hand-offs go first."""

    @property
    def num_pages(self) -> int:
        """Pages of the prompt."""
        return len(self.targets[0].pages)

    def is_sound(self) -> bool:
        """Whether ids, ranges and the token count fit each other."""
        return (
            len(self.transfer_id) == TRANSFER_ID_BYTES
            and len(self.span_id) in (0, 8)
            and self.page_size_tokens > 0
            and self.num_tokens > 0
            and 0 < len(self.targets) <= MAX_GROUPS
            and self.num_pages == -(-self.num_tokens // self.page_size_tokens)
            and not (self.targets[0].first_page or self.targets[0].is_state)
            and all(target.is_sound(self.num_pages) for target in self.targets)
        )


class Range(NamedTuple):
    """Pages [first, end) of a prompt that a peer is to write."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class ReceiveSpec:
    """A grant, as the decode side made it."""

    transfer_id: bytes
    peer: str
    """Agent name of the prefill worker allowed to write."""
    ranges: tuple[Range, ...]
    """By group. Pages before a range are held, or not wanted."""
    num_tokens: int
    timeout_s: float
    """Without delivery in this time GRANTED or FILLING becomes QUARANTINED."""
    may_be_short: bool = False
    """A fetch: the peer may write fewer pages of group 0. Its last notification says so."""
    on_ready: Callable[[bytes], None] | None = field(default=None, compare=False)
    """Called on the transfer thread with the last notification's payload, right behind `Delivered`.
    It must not block."""
