"""The pools of all groups of a rank, in one allocation.

Each group has a run of it. Page ids of a group count from the start of its run, and page 0 of each
is a scratch page of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.groups.spec import Full, GroupSpec, Plane
from engine.pool.kv_pool import KvPool
from engine.pool.page_pool import PagePool
from engine.pool.state_pool import StatePool

ALIGNMENT = 4096
"""A group's run begins at a multiple of so many bytes."""


HasLayer = Callable[[int], bool]
"""Says whether a layer of the model is kept here."""


def _has_all(_layer: int) -> bool:
    return True


class PageRun(NamedTuple):
    """The pages of a group in the memory of all."""

    page_bytes: int
    num_pages: int
    offset: int
    """Where page 0 begins, bytes."""
    first_layer: int
    """First layer that is kept here, by its place among those of the group."""
    num_layers: int
    planes: tuple[int, ...]
    """See `PagePool`; empty where no rank keeps layers of it."""
    bands: tuple[int, ...]
    """Layers of each band; empty: there is one."""


class Place(NamedTuple):
    """Where a layer's state is."""

    group: int
    layer: int
    """Its index among the layers of the group."""


class DraftPages(NamedTuple):
    """What a draft head keeps: one layer's K and V."""

    make: Callable[..., KvPool]
    """Makes a rank's pool."""
    digest: str
    """Digest of the head and of the layout of what it keeps."""
    units: int
    """Parts of a page that ranks divide."""


class KvPools:
    """A pool for each group; the one of group 0 is first."""

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        pools: Sequence[PagePool],
        data: Tensor,
        drafts: KvPool | None = None,
        draft_pages: DraftPages | None = None,
        has_layer: HasLayer = _has_all,
    ) -> None:
        """`pools`, and `drafts`, have their pages in `data`, [bytes] uint8. The first one is of K
        and V. `has_layer`: see `make_pools`."""
        self.specs = tuple(specs)
        """Groups of the whole model."""
        self._layers = [spec.layers for spec in specs]
        self.held = [tuple(filter(has_layer, layers)) for layers in self._layers]
        """By group, the layers that are kept here."""
        self.data = data
        self.drafts = drafts
        """What a draft head keeps. It follows group 0: its pages have the same ids."""
        self.drafts_digest = draft_pages.digest if draft_pages else ""
        """Digest of the head and of the layout of what it keeps; empty: there is none."""
        self.draft_units = [draft_pages.units] if draft_pages else []
        """Parts of a page of it that ranks divide."""
        self._pools = tuple(pools)
        self.places = {
            layer: Place(group, index)
            for group, layers in enumerate(self.held)
            for index, layer in enumerate(layers)
        }
        """By layer of the model, of those that keep something."""

    @property
    def first(self) -> KvPool:
        """The pool of group 0."""
        first = self._pools[0]
        assert isinstance(first, KvPool), "group 0 keeps K and V of all tokens"
        return first

    @property
    def others(self) -> tuple[PagePool, ...]:
        """The pools of the other groups."""
        return self._pools[1:]

    @property
    def offsets(self) -> list[int]:
        """Where the run of each group begins, bytes."""
        return starts_of([pool.num_pages * pool.page_bytes for pool in self._all])[:-1]

    @property
    def page_runs(self) -> list[PageRun]:
        """The run of each group, and behind them that of `drafts`."""
        runs = []
        for at, (pool, offset) in enumerate(zip(self._all, self.offsets, strict=True)):
            own, every = (of[at] if at < len(self) else () for of in (self.held, self._layers))
            first = every.index(own[0]) if own else 0
            planes = pool.planes if every else ()
            bands = pool.bands if isinstance(pool, KvPool) else ()
            sizes = pool.page_bytes, pool.num_pages, offset
            runs.append(PageRun(*sizes, first, len(own), planes, bands))
        return runs

    @property
    def _all(self) -> tuple[PagePool, ...]:
        return self._pools if self.drafts is None else (*self._pools, self.drafts)

    def of_layer(self, layer: int) -> tuple[KvPool, int]:
        """The pool that has K and V of a layer of the model, and the layer's index there."""
        place = self.places[layer]
        pool = self._pools[place.group]
        assert isinstance(pool, KvPool), "the layer keeps K and V"
        return pool, place.layer

    def state_of(self, layer: int) -> tuple[StatePool, int]:
        """The pool that has the states of a layer, and the layer's index there."""
        place = self.places[layer]
        pool = self._pools[place.group]
        assert isinstance(pool, StatePool), "the layer keeps states"
        return pool, place.layer

    def __iter__(self) -> Iterator[PagePool]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    def __getitem__(self, group: int) -> PagePool:
        return self._pools[group]


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Where runs of so many bytes begin, and the end of the last one."""
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return starts


def make_pools(
    kinds: Sequence[Callable[..., PagePool]],
    specs: Sequence[GroupSpec],
    counts: Sequence[int],
    device: torch.device,
    drafts: DraftPages | None = None,
    has_layer: HasLayer = _has_all,
    band_ends: Sequence[int] = (),
) -> KvPools:
    """Allocates `counts` pages of each group.

    Args:
        kinds: what makes the pool of each (`engine.pool.kinds.maker`).
        specs: the groups of the whole model.
        counts: pages of each.
        device: of the memory.
        drafts: what a draft head keeps.
        has_layer: says which layers are kept here.
        band_ends: where the layers of each band of pages end (`KvPool.divide`); empty: there is
            one.
    """
    makers: list[Callable[..., PagePool]] = [
        partial(make, num_layers=sum(map(has_layer, spec.layers)))
        for make, spec in zip(kinds, specs, strict=True)
    ]
    if drafts is not None:
        makers.append(partial(drafts.make, num_layers=1))
        counts = [*counts, counts[0]]
    nowhere, sizes = torch.device("meta"), []
    for make, count in zip(makers, counts, strict=True):
        sizes.append(count * make(num_pages=1, device=nowhere).page_bytes)
    starts = starts_of(sizes)
    data = torch.empty(starts[-1], dtype=torch.uint8, device=device).zero_()
    pools = []
    for make, count, start, size in zip(makers, counts, starts, sizes, strict=False):
        own = data[start : start + size]
        pools.append(make(num_pages=count, device=device, data=own))
    for pool, spec in zip(pools, specs, strict=False):
        if isinstance(pool, KvPool):
            held = filter(has_layer, spec.layers)
            counted = Counter(bisect_right(band_ends, layer) for layer in held)
            pool.divide([counted[band] for band in sorted(counted)])
    if drafts is None:
        return KvPools(specs, pools, data, has_layer=has_layer)
    *own_pools, last = pools
    assert isinstance(last, KvPool), "a head keeps K and V"
    return KvPools(specs, own_pools, data, last, drafts)


def one_group(pool: KvPool, first: int = 0) -> KvPools:
    """A pool that holds all layers of a model from the `first` on, as the only group."""
    layers = tuple(range(first, first + pool.num_layers))
    spec = GroupSpec(
        "full", Full(), (Plane(layers, pool.head_bytes, pool.precision),), pool.num_kv_heads
    )
    return KvPools([spec], [pool], pool.data.view(-1))
