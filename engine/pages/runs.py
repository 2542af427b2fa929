"""Finds runs of free pages. `is_free` has an entry for every page; page 0 is never free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.types import PageIds

Flags = NDArray[np.bool_]


def _free_runs(is_free: Flags) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Free runs: [runs] starts and [runs] lengths."""
    edges = np.flatnonzero(is_free[1:] != is_free[:-1]) + 1
    if is_free[-1]:
        edges = np.append(edges, len(is_free))
    return edges[::2], edges[1::2] - edges[::2]


def fitting(is_free: Flags, count: int) -> PageIds | None:
    """The first `count` pages of the shortest run of free pages that has that many."""
    starts, lengths = _free_runs(is_free)
    long_enough = np.flatnonzero(lengths >= count)
    if not long_enough.size:
        return None
    start = starts[long_enough[lengths[long_enough].argmin()]]
    return np.arange(start, start + count, dtype=np.int32)


def scattered(is_free: Flags, count: int, longest: bool) -> PageIds:
    """`count` free pages, from the longest runs or from the shortest, ascending."""
    starts, lengths = _free_runs(is_free)
    order = np.argsort(-lengths if longest else lengths, kind="stable")
    before = lengths[order].cumsum() - lengths[order]
    used = order[before < count]
    taken = np.minimum(lengths[used], count - before[: used.size])
    by_place = starts[used].argsort()
    firsts, taken = starts[used][by_place], taken[by_place]
    offsets = np.arange(count) - np.repeat(taken.cumsum() - taken, taken)
    pages: PageIds = (np.repeat(firsts, taken) + offsets).astype(np.int32)
    return pages


def merged(sources: PageIds, targets: PageIds) -> list[tuple[int, int, int]]:
    """Copies of single pages as copies of runs: (first source, first target, pages) each. Pages
    that are neighbours on both sides are one run."""
    if not len(sources):
        return []
    order = np.argsort(sources, kind="stable")
    source, target = sources[order], targets[order]
    apart = (np.diff(source) != 1) | (np.diff(target) != 1)
    starts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    counts = np.diff(np.append(starts, len(source)))
    columns = source[starts].tolist(), target[starts].tolist(), counts.tolist()
    return list(zip(*columns, strict=True))
