"""Which rank writes which bytes of a page to which rank. A pure function of a few numbers.

A page of a group is a grid of units and layers. Its units are KV heads, or what the group has in
their place. A rank holds a box of it: the units that it has of the layers of its stage, which may
be in bands, one behind the other. In each it has them unit by unit, of each unit plane by plane,
such as values and then exponents, and of each plane layer by layer. Of H units, rank r of the N of
a stage holds H / N in a row, or, with N > H, the one unit r * H // N, which N / H ranks hold alike.
Both sides know the other's boxes, so both make the same plan:

- each byte of each target page has one writer;
- a pair of ranks shares one box, which is one run of bytes for each plane of each unit in each
  band. Runs that are neighbours on both sides are joined: with equal stages of one band a page is
  one run for each pair, and so it is where one side has a band for each stage of the other;
- where several ranks of the writing side hold a unit, they take turns over the target's ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from kv_transfer.types import Endpoint, PageGroup, Piece, Pieces, TransportError

Pair = tuple[int, int]
"""Rank of the writing side, rank of the target."""
WHOLE = range(1)
"""The layers of a group of which nobody tells layers: they are on every rank, as one."""


class Side(NamedTuple):
    """How the ranks of a worker divide the pages of a group."""

    tp: int
    """Ranks of each stage."""
    layers: tuple[range, ...] = (WHOLE,)
    """Layers of each stage, among those of the group; the stage of rank 0 is first."""
    bands: tuple[tuple[range, ...], ...] = ()
    """Bands of each stage's layers; empty: each stage has one."""

    def bands_of(self, rank: int) -> tuple[range, ...]:
        """The bands of a rank."""
        stage = rank // self.tp
        return self.bands[stage] if self.bands else (self.layers[stage],)

    def layers_of(self, rank: int) -> range:
        """The layers of a rank."""
        return self.layers[rank // self.tp]

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.tp * len(self.layers))


def units_of(rank: int, count: int, units: int) -> range:
    """The units that a rank of a stage holds, as `engine.model.shard` divides them.

    Raises:
        TransportError: `ranks_mismatch`, where so many ranks cannot divide so many units.
    """
    if units % count and count % units:
        raise TransportError("ranks_mismatch", f"{count} ranks for {units} KV heads or other units")
    first = rank * units // count
    return range(first, first + max(1, units // count))


def plan(writers: Side, targets: Side, units: int, planes: Sequence[int]) -> dict[Pair, Pieces]:
    """The pieces of each page by pair of ranks; a pair that shares none is left out.

    Args:
        writers: the side that writes.
        targets: the other side.
        units: of a page of the group.
        planes: bytes of a layer of a unit, in each plane.

    Raises:
        TransportError: `ranks_mismatch`, as `units_of`.
    """
    found: dict[Pair, Pieces] = {}
    for target in targets.ranks:
        theirs = _box(targets, target, units)
        for writer in writers.ranks:
            own = _box(writers, writer, units)
            both = own.shared(theirs)
            if both and writer == _writer_of(both, target, (writers, targets), units):
                found[writer, target] = tuple(_joined(_runs(own, theirs, both, planes)))
    return found


def side_of(endpoint: Endpoint, group: int) -> Side:
    """How the ranks of a worker divide the pages of a group."""
    parts = endpoint.parts
    tp = len(parts) // endpoint.stages
    firsts = [part.groups[group] for part in parts[::tp]]
    if not endpoint.groups[group].planes:
        return Side(tp, (WHOLE,) * endpoint.stages)
    spans = ((one.first_layer, one.first_layer + one.num_layers) for one in firsts)
    layers = tuple(range(*span) for span in spans)
    return Side(tp, layers, tuple(map(_bands_of, firsts)))


def _bands_of(group: PageGroup) -> tuple[range, ...]:
    counts = group.bands or (group.num_layers,)
    ends = list(accumulate(counts, initial=group.first_layer))
    return tuple(map(range, ends, ends[1:]))


class _Box(NamedTuple):
    """What a rank holds of a page."""

    units: range
    layers: range
    bands: tuple[range, ...] = ()

    def shared(self, other: _Box) -> _Box | None:
        """What two ranks hold; None: nothing."""
        units, layers = _shared(self.units, other.units), _shared(self.layers, other.layers)
        if not (units and layers):
            return None
        cuts = (_shared(own, theirs) for own in self.bands for theirs in other.bands)
        return _Box(units, layers, tuple(filter(None, cuts)))

    def offset(self, unit: int, layer: int, plane: int, planes: Sequence[int]) -> int:
        """Where a layer of a unit begins in a plane, bytes from the beginning of a rank's page."""
        band = next(each for each in self.bands if layer in each)
        bands_before = (band.start - self.layers.start) * len(self.units) * sum(planes)
        before = (unit - self.units.start) * sum(planes) + sum(planes[:plane])
        return bands_before + before * len(band) + (layer - band.start) * planes[plane]


def _box(side: Side, rank: int, units: int) -> _Box:
    own = units_of(rank % side.tp, side.tp, units)
    return _Box(own, side.layers_of(rank), side.bands_of(rank))


def _shared(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _runs(own: _Box, theirs: _Box, both: _Box, planes: Sequence[int]) -> Iterator[Piece]:
    for band, unit in product(both.bands, both.units):
        for plane, layer_bytes in enumerate(planes):
            place, size = (unit, band.start, plane, planes), len(band) * layer_bytes
            yield Piece(own.offset(*place), theirs.offset(*place), size)


def _joined(runs: Iterator[Piece]) -> Iterator[Piece]:
    last = next(runs)
    for run in runs:
        if (last.own_offset + last.size, last.peer_offset + last.size) == run[:2]:
            last = last._replace(size=last.size + run.size)
        else:
            yield last
            last = run
    yield last


def _writer_of(box: _Box, target: int, sides: tuple[Side, Side], units: int) -> int:
    """Which of the ranks that hold a box writes it to a target."""
    writers, targets = sides
    stage = next(at for at, held in enumerate(writers.layers) if _shared(held, box.layers))
    own, theirs = (_holders(box.units.start, side.tp, units) for side in sides)
    return stage * writers.tp + own[theirs.index(target % targets.tp) % len(own)]


def _holders(unit: int, count: int, units: int) -> list[int]:
    return [rank for rank in range(count) if unit in units_of(rank, count, units)]
