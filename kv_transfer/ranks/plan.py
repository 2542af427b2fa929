"""Which rank writes which bytes of a page to which rank. A pure function of a few numbers.

A page of a group has its units one behind the other: KV heads, or what the group has in their
place. Of H units, rank r of N holds H / N in a row, or, with N > H, the one unit r * H // N, which
N / H ranks hold alike. Both sides know the other's N, so both make the same plan:

- each byte of each target page has one writer;
- a pair of ranks shares at most one run of bytes, so a page is one descriptor for each pair;
- where several ranks of the writing side hold a unit, they take turns over the target's ranks;
- rank 0 writes to rank 0 in any plan.
"""

from __future__ import annotations

from kv_transfer.types import Piece, TransportError

Pair = tuple[int, int]
"""Rank of the writing side, rank of the target."""


def units_of(rank: int, count: int, units: int) -> range:
    """The units that a rank holds, as `engine.model.shard` divides them.

    Raises:
        TransportError: `ranks_mismatch`, where so many ranks cannot divide so many units.
    """
    if units % count and count % units:
        raise TransportError("ranks_mismatch", f"{count} ranks for {units} KV heads or other units")
    first = rank * units // count
    return range(first, first + max(1, units // count))


def plan(writers: int, targets: int, units: int, unit_bytes: int) -> dict[Pair, Piece]:
    """The pieces of each page by pair of ranks; a pair that shares none is left out.

    Args:
        writers: ranks of the side that writes.
        targets: ranks of the other side.
        units: of a page of the group.
        unit_bytes: bytes of a unit.

    Raises:
        TransportError: `ranks_mismatch`, as `units_of`.
    """
    pieces: dict[Pair, Piece] = {}
    for target in range(targets):
        wanted = units_of(target, targets, units)
        for writer in range(writers):
            held = units_of(writer, writers, units)
            shared = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
            if shared and writer == _writer_of(shared.start, target, (writers, targets), units):
                own, peer = shared.start - held.start, shared.start - wanted.start
                size = len(shared) * unit_bytes
                pieces[writer, target] = Piece(own * unit_bytes, peer * unit_bytes, size)
    return pieces


def _writer_of(unit: int, target: int, counts: tuple[int, int], units: int) -> int:
    """Which of the ranks that hold a unit writes it to a target."""
    writers, targets = (_holders(unit, count, units) for count in counts)
    return writers[targets.index(target) % len(writers)]


def _holders(unit: int, count: int, units: int) -> list[int]:
    return [rank for rank in range(count) if unit in units_of(rank, count, units)]
