"""Builds the tiers of an engine."""

from __future__ import annotations

import logging

from torch import Tensor

from engine.pages.blocks import BlockManager
from engine.pages.eviction import EVICTION_POLICIES
from engine.tiers.arena import HostArena
from engine.tiers.lanes import Lanes, measure
from engine.tiers.movers import mover_for
from engine.tiers.protocol import NoTiers, PageTiers
from engine.tiers.tiers import HostTiers

log = logging.getLogger("baton.engine")


def build_tiers(
    host_bytes: int, pages: Tensor, blocks: BlockManager, eviction: str, page_tokens: int
) -> PageTiers:
    """The tiers below a pool that nothing uses yet.

    Args:
        host_bytes: memory of the host tier; 0: there are no tiers.
        pages: [num_pages, page_bytes] uint8, the pool.
        blocks: the pool's pages.
        eviction: policy of the slots, of `EVICTION_POLICIES`.
        page_tokens: tokens in a page.

    Raises:
        HostMemoryError: less memory can be touched.
        ValueError: it holds no two pages.
    """
    if not host_bytes:
        return NoTiers()
    arena = HostArena(host_bytes, pages.shape[1], pages.device)
    mover = mover_for(pages, arena.slots)
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
    return HostTiers(blocks, host, Lanes(mover, pages.shape[1], rates), page_tokens, arena.close)
