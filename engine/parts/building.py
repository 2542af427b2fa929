"""The parts of an engine that every rank builds: its part of the model, its part of the pages, and
attention over them. And what runs the steps of rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine import memory
from engine.attention import AttentionError, choose_backend
from engine.attention.grouped import GroupedAttention, PagedGroups, paged_groups
from engine.attention.paged import PagedAttention
from engine.config import EngineConfig
from engine.cuda import features
from engine.cuda.attention_kernels import CudaKernels
from engine.eager.executor import TorchExecutor
from engine.eager.steps import TorchSteps
from engine.groups.sizing import pages_within, reach_of
from engine.hooks.attention import HookedAttention, MakeBackend
from engine.hooks.opening import attach, bytes_beside, open_hooks
from engine.hooks.steps import StepHooks
from engine.hooks.warming import warm
from engine.model import LoadedModel, Model, load_model
from engine.model.config import WrappedConfig
from engine.model.loading import Check
from engine.model.mixers.config import AttentionConfig
from engine.model.precision.int4 import compile_all
from engine.model.shard import Shard
from engine.parts.adapters import cuda_sites_of, sites_of, with_adapters
from engine.parts.heads import bytes_of_taps, head_drafter, head_folder, head_parts
from engine.parts.paging import EngineError as EngineError
from engine.parts.paging import (
    bounds_of,
    context_of,
    draft_page_bytes,
    dtype_of,
    groups_of,
    page_of,
    scratch_pages,
    shard_of,
    share_of,
)
from engine.pool.kv_pool import KvPool
from engine.pool.pools import KvPools
from engine.sampling import Sampler
from engine.speculation.choosing import drafter_of, has_head, tables_of, verifier_of
from engine.speculation.measured import MeasuredWidths
from engine.speculation.widths import FixedWidth, Widths
from engine.step.attention import AttentionBackend, StepAttention
from engine.step.collective import Collective
from engine.step.dispatch import STAY, Dispatch
from engine.step.executor import Executor
from engine.step.hooks import Hook, HookError, HookSite
from engine.step.stages import Stages

if TYPE_CHECKING:
    from engine.cuda.executor import CudaExecutor
    from engine.cuda.hooks.hooked import Hooked
    from engine.cuda.speculation.drawing import Drafting

log = logging.getLogger("baton.engine")

Progress = Callable[[str, int, int], None]
"""Called with a phase, the amount done and the total."""


def load(
    config: EngineConfig,
    device: torch.device,
    collective: Collective,
    stages: Stages | None = None,
    *,
    shard: Shard | None = None,
    dispatch: Dispatch = STAY,
    check: Check | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads a rank's part of the model, that of rank 0 by default. `check` and `progress` are as in
    `load_model`."""
    folder = head_folder(config)
    loaded = load_model(
        config.model,
        dtype=dtype_of(config.dtype),
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        quantization=config.quantization,
        model_impl=config.model_impl,
        max_context_tokens=config.max_context_tokens,
        accepts=folder.check if folder else None,
        check=check,
        progress=progress,
        shard=shard or shard_of(config, 0),
        collective=collective,
        stages=stages,
        stage_layers=config.pp_layers,
        dispatch=dispatch,
    )
    loaded = with_adapters(config, loaded, device)
    compile_all(loaded.model, config.max_step_tokens, progress)
    if folder is None or not isinstance(loaded.model, Model):
        return loaded
    head = folder.load(loaded.model, dtype_of(config.dtype), device, config.seed)
    return replace(loaded, head=head)


def open_all(config: EngineConfig) -> list[Hook]:
    """Makes a rank's hooks.

    Raises:
        EngineError: one cannot be used as configured.
    """
    try:
        return open_hooks(config.hooks)
    except HookError as error:
        raise EngineError(str(error)) from error


def pages_that_fit(
    config: EngineConfig, loaded: LoadedModel, device: torch.device, hooks: Sequence[Hook] = ()
) -> int:
    """The pages of group 0 that are asked for, or for which a rank has memory beside those of the
    other groups. Hooks may need some beside each page.

    Raises:
        EngineError: a hook cannot say how much it needs.
    """
    specs, bounds = groups_of(config, loaded), bounds_of(config, loaded)
    if config.num_pages:
        return reach_of(config.num_pages, specs, bounds)
    page = page_of(config, loaded)
    try:
        beside = bytes_beside(hooks, page) + draft_page_bytes(config, loaded)
    except HookError as error:
        raise EngineError(str(error)) from error
    page_bytes = page.page_bytes + beside
    left = config.kv_memory_bytes or _memory_left(config, loaded, device, page_bytes)
    return pages_within(left, specs, bounds, beside, share_of(config, specs, loaded))


def _memory_left(
    config: EngineConfig, loaded: LoadedModel, device: torch.device, page_bytes: int
) -> int:
    """Default bytes for the pool. They are measured if the fast path runs, with the longest context
    that the pool could hold: a model may allow far longer ones."""
    if device.type == "cpu":
        return memory.CPU_POOL_BYTES
    scratch = scratch_pages(config, loaded, device)
    attention = _paged(config, loaded, scratch)
    if attention is None:
        return memory.CPU_POOL_BYTES
    from engine.cuda.memory import bytes_left

    share = config.gpu_share
    most_pages = int(torch.cuda.mem_get_info(device)[1] * share) // page_bytes
    context = context_of(config, loaded, most_pages)
    bounds = replace(config, max_context_tokens=max(context, config.page_size))
    drafts = config.draft_tokens if config.speculates else 0
    left = bytes_left(loaded.model, scratch, attention, bounds, share, drafts)
    return left - bytes_of_taps(config, loaded)


def torch_steps(
    config: EngineConfig,
    loaded: LoadedModel,
    pools: KvPools,
    hooks: Sequence[Hook],
) -> TorchSteps:
    """A rank's part of steps with PyTorch.

    Raises:
        EngineError: a hook cannot work here.
    """
    backends = backends_of(config, loaded, pools)
    backend: StepAttention = backends[0]
    if len(backends) > 1 or config.pp > 1:  # The first layer here may not be the model's.
        backend = GroupedAttention(backends, pools.places)
    own = hook_steps(config, loaded, pools.first, hooks)
    loaded.model.finish()
    head = head_drafter(config, loaded, pools, _backends(config))
    verifier = verifier_of(config, loaded.config.vocab_size, pools.first.device, head)
    rest = config.max_sequences, pools.first.device
    sites = sites_of(loaded)
    if own is None:
        return TorchSteps(loaded.model, pools, backend, *rest, None, verifier, head, sites)
    step_hooks, site = own
    _warm(config, loaded, step_hooks, site, torch.int64)
    if step_hooks.attends:
        backend = HookedAttention(_backends(config), site, step_hooks)
    return TorchSteps(loaded.model, pools, backend, *rest, step_hooks, verifier, head, sites)


def hook_steps(
    config: EngineConfig, loaded: LoadedModel, pool: KvPool, hooks: Sequence[Hook]
) -> tuple[StepHooks, HookSite] | None:
    """A rank's hooks in its steps, and where they are attached; None: there are none.

    Raises:
        EngineError: a hook cannot work here.
    """
    if not hooks:
        return None
    site = HookSite(pool, loaded.model.attention_specs, config.decodes)
    try:
        attach(hooks, site)
    except HookError as error:
        raise EngineError(str(error)) from error
    return StepHooks(hooks, site, config.hook_limit_s), site


def _warm(
    config: EngineConfig,
    loaded: LoadedModel,
    hooks: StepHooks,
    site: HookSite,
    integers: torch.dtype,
) -> None:
    """Makes hooks ready for steps without graphs.

    Raises:
        EngineError: one has failed.
    """
    attention = (each for each in loaded.config.mixers if isinstance(each, AttentionConfig))
    heads = loaded.model.shard.even(next(attention).heads).size
    max_pages = -(-context_of(config, loaded, site.pool.num_pages) // site.pool.page_size)
    try:
        warm(hooks, site, heads=heads, max_pages=max_pages, integers=integers)
    except HookError as error:
        raise EngineError(str(error)) from error


def _backends(config: EngineConfig) -> MakeBackend:
    return partial(choose_backend, config.attention, kernels=CudaKernels())


def backends_of(
    config: EngineConfig, loaded: LoadedModel, pools: KvPools
) -> tuple[AttentionBackend, ...]:
    """Attention over the pool of each group.

    Raises:
        EngineError: there is none as configured.
    """
    make, specs = _backends(config), loaded.model.attention_specs
    try:
        return tuple(
            make(pool, tuple(specs[layer] for layer in layers))
            for layers, pool in zip(pools.held, pools, strict=True)
        )
    except AttentionError as error:
        raise EngineError(str(error)) from error


def _paged(config: EngineConfig, loaded: LoadedModel, pools: KvPools) -> PagedGroups | None:
    """Attention of the fast path; None: the model, or attention, has none.

    Raises:
        EngineError: there is no attention as configured.
    """
    if obstacle := features.obstacle(loaded.config):
        if config.expert_group:
            raise EngineError(f"expert_group on GPUs needs fused kernels, and {obstacle} has none")
        log.info("steps run without fused kernels: %s has none yet", obstacle)
        return None
    return paged_groups(backends_of(config, loaded, pools), pools.places)


def _hooked(
    config: EngineConfig,
    loaded: LoadedModel,
    pool: KvPool,
    attention: PagedAttention,
    hooks: Sequence[Hook],
) -> Hooked:
    """A rank's hooks on the fast path.

    Raises:
        EngineError: a hook cannot work here.
    """
    from engine.cuda.hooks.choosing import ChosenAttention
    from engine.cuda.hooks.hooked import Hooked
    from engine.cuda.ranks.collective import CudaCollective

    own = hook_steps(config, loaded, pool, hooks)
    if own is None:
        return Hooked()
    step_hooks, site = own
    ranks = loaded.model.collective
    several = ranks if isinstance(ranks, CudaCollective) else None
    if not config.cuda_graphs:
        _warm(config, loaded, step_hooks, site, torch.int32)
    if not step_hooks.chooses:
        return Hooked(step_hooks, ranks=several)
    heads = _backends(config)(pool.by_head(), site.specs)
    assert isinstance(heads, PagedAttention), "a pool by heads is read as the pool is"
    return Hooked(step_hooks, ChosenAttention(attention, heads, site, step_hooks), several)


def build_executor(
    config: EngineConfig,
    loaded: LoadedModel,
    pools: KvPools,
    sampler: Sampler,
    hooks: Sequence[Hook],
    progress: Progress | None,
) -> CudaExecutor | TorchExecutor:
    """Rank 0's part of steps: the fast path where it runs, with its graphs captured.

    Raises:
        EngineError: a hook, or attention as configured, cannot work here.
    """
    fast = cuda_executor(config, loaded, pools, sampler, hooks, progress)
    return fast or TorchExecutor(torch_steps(config, loaded, pools, hooks), sampler)


def cuda_executor(
    config: EngineConfig,
    loaded: LoadedModel,
    pools: KvPools,
    sampler: Sampler | None,
    hooks: Sequence[Hook],
    progress: Progress | None = None,
) -> CudaExecutor | None:
    """A rank's fast path, with its graphs captured; None where there is none. Other ranks than the
    first have no sampler. All have joined.

    Raises:
        EngineError: a hook cannot work here.
    """
    device = pools.first.device
    if device.type != "cuda":
        return None
    attention = _paged(config, loaded, pools)
    if attention is None:
        return None
    from engine.cuda.executor import CudaExecutor

    hooked = _hooked(config, loaded, pools.first, attention.first, hooks)
    drafting, head = _drafting(config, loaded, device), head_parts(loaded, pools, _backends(config))
    given = config, hooked, drafting, head, cuda_sites_of(loaded)
    executor = CudaExecutor(loaded.model, pools, attention, sampler, *given)
    try:
        hooked.check_alike(device)
        if config.cuda_graphs:
            _capture(executor, loaded, progress)
    except HookError as error:
        raise EngineError(str(error)) from error
    return executor


def _capture(executor: CudaExecutor, loaded: LoadedModel, progress: Progress | None) -> None:
    """Captures the graphs. Code of transformers may do what no graph holds, such as a copy from the
    host: then its steps run without."""
    try:
        executor.capture(progress)
    except RuntimeError as error:
        if not isinstance(loaded.config, WrappedConfig):
            raise
        name = loaded.config.architecture
        log.warning("no graphs: code of %s cannot be captured (%s)", name, type(error).__name__)
        executor.drop_graphs()


def _drafting(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> Drafting | None:
    """What verifies drafts on the fast path; None: there are none."""
    if not config.speculates:
        return None
    from engine.cuda.speculation.drawing import Drafting

    tables = tables_of(config, loaded.config.vocab_size, device)
    synthetic = config.synthetic_acceptance
    return Drafting(tables, drafter_of(config), synthetic if synthetic >= 0 else None)


def widths_of(config: EngineConfig, executor: Executor) -> Widths | None:
    """The widths of steps: by what they cost, where that was measured. None: no drafts are
    verified."""
    if not config.speculates:
        return None
    if config.device != "cpu":
        from engine.cuda.executor import CudaExecutor

        if isinstance(executor, CudaExecutor) and executor.step_times:
            seconds = executor.seconds_by_rows_and_width()
            return MeasuredWidths(seconds, drafts_by_width=has_head(config))
    return FixedWidth(1 + config.draft_tokens)
