"""Builds the tiers of an engine."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from engine.groups.others import OtherGroups
from engine.pages.blocks import BlockManager
from engine.pages.eviction import EVICTION_POLICIES
from engine.tiers.arena import HostArena
from engine.tiers.fetching import StoreTiers
from engine.tiers.grouped import GroupedTiers
from engine.tiers.lanes import Lanes, measure
from engine.tiers.movers import PageMover, mover_for
from engine.tiers.protocol import NoTiers, PageTiers
from engine.tiers.stores.messages import Opening
from engine.tiers.stores.objects import OBJECT_TOKENS
from engine.tiers.stores.process import Job, StoreProcess
from engine.tiers.stores.protocol import StoreError
from engine.tiers.tiers import HostTiers
from faults import failpoints

log = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The stores below a host tier, and what names their objects."""

    addresses: Sequence[str] = ()
    secret_file: str = ""
    fingerprint: str = ""
    heads: Sequence[tuple[int, int]] = ((0, 0),)
    """For each rank the KV heads whose pages it has, [first, end)."""
    memories: Sequence[int] = ()
    """The memory files of the host slots of ranks 1, 2, ..."""


NO_STORES: Final = StoreConfig()
Shared = Callable[[PageMover], PageMover]


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
        stores: what is below the host tier, if there is one group.
        shared: makes this rank's mover one of all ranks; None: there is one rank. Only for one
            group.
        others: groups 1, 2, ...

    Raises:
        HostMemoryError: less memory can be touched.
        StoreError: a store cannot be opened.
        ValueError: it holds no two pages of a group.
    """
    if not host_bytes:
        return NoTiers()
    sizes = [own.nbytes for own in pages]
    tiers = [
        _host_tier(
            host_bytes * size // sum(sizes), own, blocks, eviction, page_tokens, shared, stores
        )
        for size, own, blocks in zip(sizes, pages, books, strict=True)
    ]
    return GroupedTiers(tiers[0], tiers[1:], others) if others else tiers[0]


def _host_tier(
    host_bytes: int,
    pages: Tensor,
    blocks: BlockManager,
    eviction: str,
    page_tokens: int,
    shared: Shared | None,
    stores: StoreConfig,
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
    below = _open_stores(stores, arena, blocks, host, max(1, OBJECT_TOKENS // page_tokens))
    return HostTiers(blocks, host, lanes, page_tokens, arena.close, below)


def _open_stores(
    config: StoreConfig, arena: HostArena, blocks: BlockManager, host: BlockManager, pages: int
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
                list(config.heads),
                pages,
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
    return StoreTiers(blocks, host, processes, done, pages)
