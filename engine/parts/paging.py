"""The pages of an engine: groups of layers, and a rank's part of their memory."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from engine import memory
from engine.config import EngineConfig
from engine.groups.sizing import pages_of_groups
from engine.groups.spec import Full, GroupSpec, Kind, Plane, State, name_of, split_layers
from engine.model import LoadedModel, ModelConfig
from engine.model.experts.config import Held
from engine.model.mixers.config import Kept
from engine.model.shard import Shard
from engine.pool.kinds import PoolError, maker
from engine.pool.kv_pool import KvPool
from engine.pool.page_pool import PagePool
from engine.pool.pools import DraftPages, KvPools, make_pools
from engine.pool.state_pool import StatePool, unit_bytes_of
from engine.speculation.choosing import pages_ahead, tokens_ahead
from engine.step.dispatch import place_of
from engine.step.grid import Grid
from engine.tiers.arena import HostArena, divided
from engine.tiers.stores.objects import OBJECT_TOKENS
from engine.tiers.touching import HostMemoryError

log = logging.getLogger("baton.engine")


class EngineError(Exception):
    """The engine cannot be built as configured; the message says what to change."""


class NotNowError(EngineError):
    """The engine cannot be built now. Others have what it needs, or a part of it was lost: the same
    configuration may do another time."""


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name.

    Raises:
        EngineError: there is none.
    """
    dtypes = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if name not in dtypes:
        raise EngineError(f"dtype {name!r} is not one of {', '.join(dtypes)}")
    return dtypes[name]


def shard_of(config: EngineConfig, rank: int) -> Shard:
    """A rank's part of the model, whose layers are not known yet."""
    grid = Grid(config.pp, config.tp)
    own = grid.within(rank)
    experts = Held(own, config.tp) if config.expert_parallel else None
    if config.expert_group:
        place = place_of(config.expert_group)
        experts = Held(place.rank, place.ranks)
    bands = config.kv_bands
    return Shard(own, config.tp, grid.stage_of(rank), config.pp, experts=experts, bands=bands)


def why_one_group(config: EngineConfig) -> str:
    """Why layers with a window keep the pages of all tokens here; empty: they do not."""
    if config.hooks:
        return "hooks are set: they see the pages of all layers"
    return ""


def groups_of(config: EngineConfig, loaded: LoadedModel) -> tuple[GroupSpec, ...]:
    """The groups of the whole model, group 0 first."""
    lives = lives_of(loaded.config)
    split: tuple[tuple[Kind, tuple[int, ...]], ...] = ((Full(), tuple(lives)),)
    if any(lives.values()) and (loaded.config.shapes_differ or not why_one_group(config)):
        split = split_layers(lives)
    specs = []
    for kind, own in split:
        kept = loaded.config.kept_by(own)
        plane = _plane(config, loaded, own, kept)
        specs.append(GroupSpec(name_of(kind), kind, (plane,), kept.kv_heads))
    return tuple(specs)


def _plane(config: EngineConfig, loaded: LoadedModel, layers: tuple[int, ...], kept: Kept) -> Plane:
    if kept.state:
        return Plane(layers, unit_bytes_of(len(layers), kept.state), StatePool.precision)
    page = _page(config, loaded, len(layers), kept)
    return Plane(layers, page.head_bytes, page.precision)


def check_groups(config: EngineConfig, loaded: LoadedModel) -> None:
    """Refuses what needs one kind of page, if the model's layers differ.

    Raises:
        EngineError: it names it.
    """
    if config.hooks and loaded.config.kept.values is not None:
        raise EngineError("hooks are set: they see K and V of heads, and this model keeps latents")
    if not loaded.config.shapes_differ:
        return
    convolves = any(kept.is_state for kept in loaded.config.keepers.values())
    if convolves and config.kv_cache_dtype == "fp8":
        raise EngineError(
            "kv_cache_dtype fp8 cannot be set: what this model's convolutions read must not be"
            " rounded; set it to auto"
        )
    has_states = any(kept.state for kept in loaded.config.keepers.values())
    if reason := why_one_group(config):
        why = (
            "some layers keep states"
            if has_states
            else "K and V of this model's layers differ in shape"
        )
        raise EngineError(f"{reason}, and {why}")
    if has_states:
        _check_states(config, cut_tokens(config, loaded))


def _check_states(config: EngineConfig, cut: int) -> None:
    if config.speculates:
        log.warning(
            "speculation is set, and steps take one token of a row all the same: some layers fold"
            " tokens into a state, from which a wrong draft cannot be taken back"
        )
    if config.max_step_tokens < config.max_sequences + cut:
        raise EngineError(
            f"max_step_tokens {config.max_step_tokens} must be at least max_sequences"
            f" {config.max_sequences} plus {cut}: prompts of this model are cut behind multiples of"
            f" {cut} tokens"
        )
    if config.mixed_prefill_tokens < cut:
        raise EngineError(
            f"mixed_prefill_tokens {config.mixed_prefill_tokens} must be at least {cut}: prompts of"
            f" this model are cut behind multiples of so many tokens"
        )


def cut_tokens(config: EngineConfig, loaded: LoadedModel) -> int:
    """Prompts are cut behind multiples of so many tokens; 0: of whole pages."""
    grids = {kept.grid for kept in loaded.config.keepers.values() if kept.state}
    return math.lcm(config.page_size, *grids) if grids else 0


def lives_of(config: ModelConfig) -> dict[int, int | State | None]:
    """By layer, of those that keep something: the tokens that are read later, or its state; None:
    all tokens."""
    return {
        layer: State(kept.grid) if kept.state else kept.window
        for layer, kept in config.keepers.items()
    }


def share_of(
    config: EngineConfig, specs: tuple[GroupSpec, ...], loaded: LoadedModel
) -> tuple[GroupSpec, ...]:
    """The part of the groups that a rank holds."""
    shard, share = loaded.model.shard, []
    for spec in specs:
        layers = tuple(filter(shard.has_layer, spec.layers))
        plane = _plane(config, loaded, layers, loaded.config.kept_by(spec.layers))
        share.append(replace(spec, planes=(plane,), units=shard.shared(spec.units).size))
    return tuple(share)


def _page(config: EngineConfig, loaded: LoadedModel, num_layers: int, kept: Kept) -> KvPool:
    """A page of a rank, without memory."""
    make = _maker(config, loaded, kept)
    return make(num_pages=1, num_layers=num_layers, device=torch.device("meta"))


def _any_maker(config: EngineConfig, loaded: LoadedModel, kept: Kept) -> Callable[..., PagePool]:
    """What makes a rank's pool of layers that keep this, whatever it is."""
    if not kept.state:
        return _maker(config, loaded, kept)
    units = loaded.model.shard.shared(kept.kv_heads).size
    return partial(StatePool, units=units, numbers=kept.state)


def _maker(config: EngineConfig, loaded: LoadedModel, kept: Kept) -> Callable[..., KvPool]:
    """What makes a rank's pool of layers that keep K and V.

    Raises:
        EngineError: they cannot be kept as configured.
    """
    try:
        return maker(
            config.kv_cache_dtype,
            config.page_size,
            heads=loaded.model.shard.shared(kept.kv_heads).size,
            dim=kept.head_dim,
            values=kept.values,
            dtype=dtype_of(config.dtype),
        )
    except PoolError as error:
        raise EngineError(str(error)) from error


def page_of(config: EngineConfig, loaded: LoadedModel) -> KvPool:
    """A rank's part of a page of group 0, without memory."""
    layers = groups_of(config, loaded)[0].layers
    own = sum(map(loaded.model.shard.has_layer, layers))
    return _page(config, loaded, own, loaded.config.kept_by(layers))


def scratch_pages(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> KvPools:
    """A rank's part of the scratch pages alone."""
    specs = groups_of(config, loaded)
    return _allocate([1] * len(specs), specs, config, loaded, device)


def context_of(config: EngineConfig, loaded: LoadedModel, num_pages: int) -> int:
    """The longest context, given so many pages: what is asked for, what the model allows, or what
    all pages but the scratch page hold."""
    longest = loaded.config.max_position_embeddings
    asked = config.max_context_tokens or longest
    return min(asked, longest, (num_pages - 1) * config.page_size)


def bounds_of(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """The configuration with the longest context that is asked for, or that the model allows: the
    pages of groups depend on it."""
    longest = loaded.config.max_position_embeddings
    return replace(config, max_context_tokens=min(config.max_context_tokens or longest, longest))


def make_pages(
    num_pages: int, config: EngineConfig, loaded: LoadedModel, device: torch.device
) -> KvPools:
    """A rank's part of so many pages of group 0, and of the other groups' pages.

    Raises:
        EngineError: there is no memory for them.
    """
    check_groups(config, loaded)
    specs = groups_of(config, loaded)
    share = share_of(config, specs, loaded)
    page_bytes = share[0].page_bytes
    if num_pages < 2:
        raise NotNowError(
            f"memory is left for {max(0, num_pages)} pages of {page_bytes} bytes: raise"
            " kv_memory_gib or gpu_memory_utilization, or lower max_step_tokens or max_sequences"
        )
    counts = pages_of_groups(num_pages, specs, bounds_of(config, loaded))
    sizes = zip(counts, share, strict=True)
    size = sum(count * spec.page_bytes for count, spec in sizes)
    what = f"{num_pages} pages of {page_bytes} bytes"
    if len(specs) > 1:
        what += f", and those of other groups, {size} bytes in all,"
    if device.type == "cpu" and size > memory.available_bytes():
        raise NotNowError(f"{what} are more than the memory left: lower num_pages or kv_memory_gib")
    try:
        pools = _allocate(counts, specs, config, loaded, device)
    except torch.OutOfMemoryError as error:
        raise NotNowError(
            f"{what} are more than the GPU has left: lower"
            " num_pages, kv_memory_gib or gpu_memory_utilization"
        ) from error
    _log(pools, config, loaded)
    return pools


def _log(pools: KvPools, config: EngineConfig, loaded: LoadedModel) -> None:
    for spec, pool in zip(pools.specs, pools, strict=True):
        log.info(
            "pages of group %s: %d of %d bytes, of %d layers",
            spec.name, pool.num_pages, pool.page_bytes, pool.num_layers,
        )  # fmt: skip
    if any(lives_of(loaded.config).values()) and len(pools) == 1:
        reason = why_one_group(config)
        log.info("layers with a window keep the pages of all tokens: %s", reason)


def _allocate(
    counts: list[int],
    specs: tuple[GroupSpec, ...],
    config: EngineConfig,
    loaded: LoadedModel,
    device: torch.device,
) -> KvPools:
    kinds = [_any_maker(config, loaded, loaded.config.kept_by(spec.layers)) for spec in specs]
    head, shard, drafts = loaded.head, loaded.model.shard, None
    if head is not None:
        page, page_size = _page(config, loaded, 1, head.kept), config.page_size
        kept = [head.revision, page.layout, page.precision, config.dtype, page_size, *head.kept]
        digest = hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:32]
        drafts = DraftPages(_maker(config, loaded, head.kept), digest, head.kept.kv_heads)
    where = shard.has_layer, shard.band_ends
    return make_pools(kinds, specs, counts, device, drafts, *where)


def draft_page_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes that a rank's draft head keeps beside each page of group 0; 0: there is no head."""
    return _page(config, loaded, 1, loaded.head.kept).page_bytes if loaded.head else 0


def make_arenas(config: EngineConfig, pools: KvPools) -> list[HostArena]:
    """A rank's part of the host memory, by group.

    Raises:
        EngineError: it is not there, or holds too few pages.
    """
    pages = [(pool.num_pages, pool.page_bytes) for pool in pools]
    sizes = divided(config.rank_host_bytes, pages)
    try:
        return [
            HostArena(size, pool.data.shape[1], pool.device)
            for size, pool in zip(sizes, pools, strict=True)
        ]
    except HostMemoryError as error:
        raise NotNowError(str(error)) from error
    except ValueError as error:
        raise EngineError(str(error)) from error


def resolved(config: EngineConfig, loaded: LoadedModel, pool: KvPool) -> EngineConfig:
    """The configuration with what follows from the model and the pages: equal on all ranks."""
    return replace(
        config,
        max_context_tokens=context_of(config, loaded, pool.num_pages),
        eos_token_ids=frozenset(loaded.config.eos_token_ids),
        kv_precision=pool.precision,
        gathers=pool.gathers,
        cut_tokens=cut_tokens(config, loaded),
        object_tokens=OBJECT_TOKENS if config.kv_stores else 0,
        ahead_tokens=tokens_ahead(config),
        reserve_pages=max(config.reserve_pages, pages_ahead(config)),
    )
