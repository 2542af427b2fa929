"""How many pages each group has.

The number of group 0's pages decides those of the others, so ranks and users agree on one number.
A window's group has pages for all sequences that may run, for the chunks of two steps, and a
quarter more for cached prefixes. That of states has one page for each sequence, two for those that
steps in flight leave, and a quarter more. All these groups together take at most as many bytes as
group 0, or the share that the longest sequence has of them.

Where group 0 has no layers, all memory is for the others: they have what the longest sequences need
of which group 0 has the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.bounds import Bounds
from engine.groups.spec import GroupSpec, State, Window

CHUNKS_IN_FLIGHT = 2
"""Steps whose chunks have pages that no later step reads: one in flight, and the one planned."""
CACHE_PARTS = 4
"""A group has a quarter more pages than sequences need, for cached prefixes."""
STATES_LEFT = 2
"""States of a sequence that steps in flight read while it has another one: one of each step."""


def chunk_pages(bounds: Bounds) -> int:
    """Pages that the chunks of steps take beside what the sequences keep."""
    return CHUNKS_IN_FLIGHT * -(-bounds.max_step_tokens // bounds.page_size)


def pages_of_groups(num_pages: int, specs: Sequence[GroupSpec], bounds: Bounds) -> list[int]:
    """Pages of each group, with its scratch page, if group 0 has `num_pages`."""
    first, *others = specs
    context = -(-bounds.max_context_tokens // bounds.page_size) or num_pages
    each = [_most_pages(spec, context, bounds.page_size) for spec in others]
    beside = [_beside(spec, bounds) for spec in others]
    if not first.layers:
        longest = [max(pages, pages * num_pages // context) for pages in each]
        needs = zip(longest, beside, strict=True)
        return [num_pages, *(min(num_pages, pages + more + 1) for pages, more in needs)]
    wanted = [_wanted(*pages, bounds) for pages in zip(each, beside, strict=True)]
    of_sequence = sum(spec.page_bytes * pages for spec, pages in zip(others, each, strict=True))
    share = max(1.0, of_sequence / (context * first.page_bytes))
    most_bytes = num_pages * first.page_bytes * share
    size = sum(spec.page_bytes * pages for spec, pages in zip(others, wanted, strict=True))
    cut = min(1.0, most_bytes / max(1, size))
    counts = [num_pages]
    for pages, own, more in zip(wanted, each, beside, strict=True):
        # A single sequence can always run. More than group 0 has is never of use.
        least = own + more + 1
        counts.append(min(num_pages, max(int(cut * pages), least)))
    return counts


def reach_of(num_pages: int, specs: Sequence[GroupSpec], bounds: Bounds) -> int:
    """Pages of group 0 for somebody who wants so many pages with K and V: where group 0 has no
    layers, as many as give the others `num_pages`."""
    first, *others = specs
    if first.layers:
        return num_pages
    context = -(-bounds.max_context_tokens // bounds.page_size) or num_pages
    rest = [num_pages - _beside(spec, bounds) - 1 for spec in others]
    each = [_most_pages(spec, context, bounds.page_size) for spec in others]
    longest = (pages * context // own for pages, own in zip(rest, each, strict=True))
    return max(num_pages, *longest)


def _wanted(each: int, beside: int, bounds: Bounds) -> int:
    running = bounds.max_sequences * each
    return running + running // CACHE_PARTS + beside + 1


def _beside(spec: GroupSpec, bounds: Bounds) -> int:
    """Pages of a group beside those of sequences."""
    return STATES_LEFT if isinstance(spec.kind, State) else chunk_pages(bounds)


def _most_pages(spec: GroupSpec, pages: int, page_size: int) -> int:
    """Most pages of a group that a sequence has which has so many in group 0."""
    if isinstance(spec.kind, State):
        return 1
    assert isinstance(spec.kind, Window), "one group alone keeps all tokens"
    return min(pages, spec.kind.most_pages(page_size))


def bytes_of_groups(
    num_pages: int,
    specs: Sequence[GroupSpec],
    bounds: Bounds,
    share: Sequence[GroupSpec] | None = None,
) -> int:
    """Bytes of all groups if group 0 has `num_pages`: over all ranks once, or of the rank that has
    this share of them."""
    counts = pages_of_groups(num_pages, specs, bounds)
    return sum(count * spec.page_bytes for count, spec in zip(counts, share or specs, strict=True))


def pages_within(
    size: int,
    specs: Sequence[GroupSpec],
    bounds: Bounds,
    beside: int = 0,
    share: Sequence[GroupSpec] | None = None,
) -> int:
    """The most pages of group 0 with which all groups fit into `size` bytes.

    Args:
        size: bytes; not over 0: no page fits.
        specs: the groups, group 0 first.
        bounds: bounds of the engine.
        beside: bytes that come on top for each page of group 0.
        share: the part of the groups whose bytes count; None: all.
    """
    low, high = 0, max(0, size // ((share or specs)[0].page_bytes + beside))
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_of_groups(middle, specs, bounds, share) + middle * beside <= size:
            low = middle
        else:
            high = middle - 1
    return low
