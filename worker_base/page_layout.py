"""The pages of a worker's pool by cache group, as the services count them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.specs import Range
from kv_transfer.types import PageGroup
from worker_base.messages import pages_of


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Sizes of whole pages, of which a rank has a part."""

    page_size_tokens: int
    """Tokens of each page of any group."""
    groups: tuple[PageGroup, ...]
    windows: tuple[int | None, ...] = (None,)
    """By group, tokens that a position sees; None: all. Group 0 sees all."""
    states: frozenset[int] = frozenset()
    """Groups of which a sequence has one page, with all its tokens folded in."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of group 0."""
        return self.groups[0].page_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(group.page_bytes * group.num_pages for group in self.groups)

    def pages_of(self, num_tokens: int) -> int:
        """Pages of group 0 that so many tokens take."""
        return pages_of(num_tokens, self.page_size_tokens)

    def granted_range(self, group: int, num_tokens: int) -> Range:
        """Pages of a group that a hand-off of a prompt moves where nothing is held.

        Behind a window those are the pages that the next token sees, and as much before them as it
        takes to resume at the last border of a page, too. A state is one page.
        """
        if group in self.states:
            return Range(0, 1)
        end, window = self.pages_of(num_tokens), self.windows[group]
        if window is None:
            return Range(0, end)
        border = (num_tokens - 1) // self.page_size_tokens
        return Range(max(0, border - pages_of(window - 1, self.page_size_tokens)), end)

    def prompt_bytes(self, num_tokens: int) -> int:
        """Most bytes that a hand-off of a prompt writes."""
        ranges = [self.granted_range(group, num_tokens) for group in range(len(self.groups))]
        return self.bytes_of(ranges)

    def bytes_of(self, ranges: Sequence[Range]) -> int:
        """Bytes of the pages of these ranges, by group."""
        return sum(
            (end - first) * group.page_bytes
            for (first, end), group in zip(ranges, self.groups, strict=True)
        )
