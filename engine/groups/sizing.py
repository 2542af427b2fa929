"""How many pages each group has.

The number of group 0's pages decides those of the others, so ranks and users agree on one number.
A window's group has pages for all sequences that may run, for the chunks of two steps, and a
quarter more for cached prefixes. All windows together take at most as many bytes as group 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.bounds import Bounds
from engine.groups.spec import GroupSpec, Window

CHUNKS_IN_FLIGHT = 2
"""Steps whose chunks have pages that no later step reads: one in flight, and the one planned."""
CACHE_PARTS = 4
"""A window's group has a quarter more pages than sequences need, for cached prefixes."""


def chunk_pages(bounds: Bounds) -> int:
    """Pages that the chunks of steps take beside what the sequences keep."""
    return CHUNKS_IN_FLIGHT * -(-bounds.max_step_tokens // bounds.page_size)


def pages_of_groups(num_pages: int, specs: Sequence[GroupSpec], bounds: Bounds) -> list[int]:
    """Pages of each group, with its scratch page, if group 0 has `num_pages`."""
    first, *others = specs
    most = num_pages * first.page_bytes // max(1, sum(spec.page_bytes for spec in others))
    counts = [num_pages]
    for spec in others:
        assert isinstance(spec.kind, Window)
        each = spec.kind.most_pages(bounds.page_size)
        running = bounds.max_sequences * each
        wanted = running + running // CACHE_PARTS + chunk_pages(bounds) + 1
        # A single sequence can always run. More than group 0 has is never of use.
        least = each + chunk_pages(bounds) + 1
        counts.append(min(num_pages, wanted, max(most, least)))
    return counts


def bytes_of_groups(num_pages: int, specs: Sequence[GroupSpec], bounds: Bounds) -> int:
    """Bytes of all groups, over all ranks once, if group 0 has `num_pages`."""
    counts = pages_of_groups(num_pages, specs, bounds)
    return sum(count * spec.page_bytes for count, spec in zip(counts, specs, strict=True))


def pages_within(size: int, specs: Sequence[GroupSpec], bounds: Bounds, beside: int = 0) -> int:
    """The most pages of group 0 with which all groups fit into `size` bytes.

    Args:
        size: bytes; not over 0: no page fits.
        specs: the groups, group 0 first.
        bounds: bounds of the engine.
        beside: bytes that come on top for each page of group 0.
    """
    low, high = 0, max(0, size // (specs[0].page_bytes + beside))
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_of_groups(middle, specs, bounds) + middle * beside <= size:
            low = middle
        else:
            high = middle - 1
    return low
