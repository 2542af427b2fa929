"""Builds the tiers of an engine."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

from torch import Tensor

from engine.groups.others import OtherGroups
from engine.pages.blocks import BlockManager
from engine.pages.eviction import EVICTION_POLICIES
from engine.tiers.arena import HostArena, divided
from engine.tiers.fetching import StoreTiers
from engine.tiers.grouped import GroupedTiers
from engine.tiers.lanes import Lanes, measure
from engine.tiers.movers import PageMover, mover_for
from engine.tiers.protocol import NoTiers, PageTiers
from engine.tiers.stores.messages import Opening
from engine.tiers.stores.objects import OBJECT_TOKENS
from engine.tiers.stores.opening import address_of
from engine.tiers.stores.process import Job, StoreProcess
from engine.tiers.stores.protocol import StoreError
from engine.tiers.tiers import HostTiers
from faults import failpoints

log = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The stores below host tiers, and what names their objects."""

    addresses: Sequence[str] = ()
    secret_file: str = ""
    fingerprint: str = ""
    heads: Sequence[Sequence[tuple[int, int]]] = (((0, 0),),)
    """By group, for each rank the units of a page that it has, [first, end): KV heads."""
    memories: Sequence[Sequence[int]] = ()
    """The memory files of the host slots of ranks 1, 2, ..., by group."""


class GroupStores(NamedTuple):
    """Stores of one group."""

    addresses: list[str]
    secret_file: str
    fingerprint: str
    heads: list[tuple[int, int]]
    """For each rank."""
    memories: list[int]
    """The memory files of the slots of ranks 1, 2, ..."""
    stride: int
    """Pages from the end of an object to that of the next."""
    pages: int
    """Pages of an object."""


NO_STORES: Final = StoreConfig()


class Shared(Protocol):
    """Makes rank 0's mover of a group one of all ranks."""

    def __call__(self, own: PageMover, group: int) -> PageMover:
        """See the class."""
        ...


def build_tiers(
    host_bytes: int,
    pages: Sequence[Tensor],
    books: Sequence[BlockManager],
    eviction: str,
    page_tokens: int,
    stores: StoreConfig = NO_STORES,
    shared: Shared | None = None,
    others: OtherGroups | None = None,
) -> PageTiers:
    """The tiers below a pool that nothing uses yet.

    Args:
        host_bytes: memory of the host tier, which groups divide as they do the pool; 0: there are
            no tiers.
        pages: by group, [num_pages, page_bytes] uint8, the pool.
        books: by group, the pool's pages.
        eviction: policy of the slots, of `EVICTION_POLICIES`.
        page_tokens: tokens in a page.
        stores: what is below the host tiers.
        shared: makes this rank's mover of a group one of all ranks; None: there is one rank.
        others: groups 1, 2, ...

    Raises:
        HostMemoryError: less memory can be touched.
        StoreError: a store cannot be opened.
        ValueError: it holds no two pages of a group.
    """
    if not host_bytes:
        return NoTiers()
    tiers: list[HostTiers] = []
    below = _by_group(stores, [own.shape[1] for own in pages], page_tokens, others)
    sizes = divided(host_bytes, [(len(own), own.shape[1]) for own in pages])
    for group, (size, own, blocks) in enumerate(zip(sizes, pages, books, strict=True)):
        mover = partial(shared, group=group) if shared is not None else None
        try:
            made = _host_tier(size, own, blocks, eviction, page_tokens, mover, below[group])
        except BaseException:
            for other in tiers:
                other.stop()
            raise
        tiers.append(made)
    return GroupedTiers(tiers[0], tiers[1:], others) if others else tiers[0]


def _host_tier(
    host_bytes: int,
    pages: Tensor,
    blocks: BlockManager,
    eviction: str,
    page_tokens: int,
    shared: Callable[[PageMover], PageMover] | None,
    stores: GroupStores,
) -> HostTiers:
    """The tiers of one group."""
    arena = HostArena(host_bytes, pages.shape[1], pages.device)
    mover = mover_for(pages, arena.slots)
    if shared is not None:
        mover = shared(mover)
    rates = measure(mover, len(pages), arena.num_slots, pages.shape[1])
    host = BlockManager(arena.num_slots, EVICTION_POLICIES[eviction]())
    log.info(
        "host tier",
        extra={
            "slots": arena.num_slots,
            "save_gb_per_s": round(rates[0] / 1e9, 2),
            "load_gb_per_s": round(rates[1] / 1e9, 2),
        },
    )
    lanes = Lanes(mover, pages.shape[1], rates)
    below = _open_stores(stores, arena, blocks, host)
    return HostTiers(blocks, host, lanes, page_tokens, arena.close, below)


def _by_group(
    config: StoreConfig, page_bytes: Sequence[int], page_tokens: int, others: OtherGroups | None
) -> list[GroupStores]:
    """The stores of each group. Groups divide a store's size as they do the bytes of objects."""
    secret, stride = config.secret_file, max(1, OBJECT_TOKENS // page_tokens)
    names, pages = [""], [stride]
    for other in others.groups if others else ():
        names.append(other.name)
        pages.append(max(1, stride - other.begins(stride)))
    sizes = [count * size for count, size in zip(pages, page_bytes, strict=True)]
    found = []
    for group, name in enumerate(names):
        addresses = [
            address_of(address, name, sizes[group] / sum(sizes)) for address in config.addresses
        ]
        fingerprint = f"{config.fingerprint}.{name}" if name else config.fingerprint
        heads = list(config.heads[group]) if config.addresses else []
        memories = [files[group] for files in config.memories]
        own = GroupStores(addresses, secret, fingerprint, heads, memories, stride, pages[group])
        found.append(own)
    return found


def _open_stores(
    config: GroupStores, arena: HostArena, blocks: BlockManager, host: BlockManager
) -> StoreTiers | None:
    if not config.addresses:
        return None
    done: queue.SimpleQueue[tuple[StoreProcess, Job]] = queue.SimpleQueue()
    processes: list[StoreProcess] = []
    try:
        for address in config.addresses:
            opening = Opening(
                address,
                [arena.fd, *config.memories],
                arena.num_slots,
                arena.slot_bytes,
                config.fingerprint,
                config.heads,
                config.pages,
                config.secret_file,
                failpoints.specification(),
            )
            processes.append(StoreProcess(opening, done))
            rate = round(processes[-1].bytes_per_s / 1e9, 2)
            log.info("store", extra={"address": address, "load_gb_per_s": rate})
    except StoreError:
        for process in processes:
            process.stop()
        raise
    return StoreTiers(blocks, host, processes, done, config.stride, config.pages)
