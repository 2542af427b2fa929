"""The pages of a fetch, as the transfer thread counts them."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.specs import Range


def ranges_of(counts: Sequence[int]) -> tuple[Range, ...]:
    """By group, where so many pages lie that all end at one token. They are counted from the first
    page of the group that has most. So both sides know of each page where it is, without a word of
    the prompt before it."""
    end = max(counts)
    return tuple(Range(end - count, end) for count in counts)
