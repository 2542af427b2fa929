"""Makes the scheduler of an engine, with the books of its pages and the tiers below them."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from engine.adapters.registry import Adapters
from engine.config import EngineConfig
from engine.groups.others import OtherGroups, other_groups
from engine.hooks.requests import RequestHooks
from engine.pages.blocks import BlockManager
from engine.pages.eviction import EVICTION_POLICIES
from engine.pages.poison import PagePoison
from engine.parts.paging import EngineError, NotNowError
from engine.pool.pools import KvPools
from engine.sampling import Sampler
from engine.schedule.policies import POLICIES
from engine.schedule.scheduler import Scheduler
from engine.speculation.choosing import has_head
from engine.speculation.widths import Widths
from engine.step.executor import LateRows, NoLateRows
from engine.step.hooks import Hook
from engine.tiers.build import Shared, StoreConfig, build_tiers
from engine.tiers.protocol import PageTiers
from engine.tiers.stores.protocol import StoreError
from engine.tiers.touching import HostMemoryError


def scheduler_of(
    config: EngineConfig,
    pools: KvPools,
    sampler: Sampler,
    hooks: Sequence[Hook],
    stores: StoreConfig,
    mover: Shared | None,
    widths: Widths | None,
    adapters: Adapters,
) -> Scheduler:
    """The scheduler of rank 0.

    Raises:
        EngineError: host memory or a store cannot be had.
    """
    managers = [
        BlockManager(
            pool.num_pages,
            EVICTION_POLICIES[config.eviction](),
            PagePoison(pool.data) if config.poison_freed_pages else None,
        )
        for pool in pools
    ]
    kinds = [spec.kind for spec in pools.specs]
    others = other_groups(config, kinds[1:], managers[1:])
    tiers = _build_tiers(config, pools, managers, others, stores, mover)
    asked = RequestHooks(hooks, config.max_sequences, config.hook_limit_s) if hooks else None
    policy = POLICIES[config.scheduling]()
    own = managers[0], sampler, policy, tiers, asked, others, widths, adapters
    return Scheduler(config, *own)


def _build_tiers(
    config: EngineConfig,
    pools: KvPools,
    managers: Sequence[BlockManager],
    others: OtherGroups,
    stores: StoreConfig,
    mover: Shared | None,
) -> PageTiers:
    try:
        return build_tiers(
            config.rank_host_bytes,
            [pool.data for pool in pools],
            managers,
            config.eviction,
            config.page_size,
            stores,
            mover,
            others,
        )
    except (HostMemoryError, StoreError) as error:
        raise NotNowError(str(error)) from error
    except ValueError as error:
        raise EngineError(str(error)) from error


def late_rows_of(config: EngineConfig, own: LateRows, pools: KvPools) -> LateRows:
    """The late rows of rank 0's executor, where it runs steps alone, and lengths alone say what a
    row reads; and where a device sees a host's stores in their order."""
    is_alone = config.late_rows and config.ranks == 1 and not config.expert_group
    is_plain = len(pools) == 1 and not (config.hooks or config.speculates or has_head(config))
    is_ordered = platform.machine() in ("x86_64", "AMD64")
    return own if is_alone and is_plain and is_ordered else NoLateRows()
