"""Which rank writes which bytes of a page to which rank. A pure function of a few numbers.

A page has its KV heads one behind the other. Of H heads, rank r of N holds H / N in a row, or, with
N > H, the one head r * H // N, which N / H ranks hold alike. Both sides know the other's N, so both
make the same plan:

- each byte of each target page has one writer;
- a pair of ranks shares at most one run of bytes, so a page is one descriptor for each pair;
- where several ranks of the writing side hold a head, they take turns over the target's ranks;
- rank 0 writes to rank 0 in any plan.
"""

from __future__ import annotations

from kv_transfer.types import Piece, TransportError

Pair = tuple[int, int]
"""Rank of the writing side, rank of the target."""


def heads_of(rank: int, count: int, kv_heads: int) -> range:
    """The KV heads that a rank holds, as `engine.model.shard` divides them.

    Raises:
        TransportError: `ranks_mismatch`, where so many ranks cannot divide so many heads.
    """
    if kv_heads % count and count % kv_heads:
        raise TransportError("ranks_mismatch", f"{count} ranks for {kv_heads} KV heads")
    first = rank * kv_heads // count
    return range(first, first + max(1, kv_heads // count))


def plan(writers: int, targets: int, kv_heads: int, head_bytes: int) -> dict[Pair, Piece]:
    """The pieces of each page by pair of ranks; a pair that shares none is left out.

    Args:
        writers: ranks of the side that writes.
        targets: ranks of the other side.
        kv_heads: of the model.
        head_bytes: bytes of a KV head in a page.

    Raises:
        TransportError: `ranks_mismatch`, as `heads_of`.
    """
    pieces: dict[Pair, Piece] = {}
    for target in range(targets):
        wanted = heads_of(target, targets, kv_heads)
        for writer in range(writers):
            held = heads_of(writer, writers, kv_heads)
            shared = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
            if shared and writer == _writer_of(shared.start, target, (writers, targets), kv_heads):
                own, peer = shared.start - held.start, shared.start - wanted.start
                size = len(shared) * head_bytes
                pieces[writer, target] = Piece(own * head_bytes, peer * head_bytes, size)
    return pieces


def _writer_of(head: int, target: int, counts: tuple[int, int], kv_heads: int) -> int:
    """Which of the ranks that hold a head writes it to a target."""
    writers, targets = (_holders(head, count, kv_heads) for count in counts)
    return writers[targets.index(target) % len(writers)]


def _holders(head: int, count: int, kv_heads: int) -> list[int]:
    return [rank for rank in range(count) if head in heads_of(rank, count, kv_heads)]
