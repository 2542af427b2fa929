"""The engine's configuration, from a worker's settings and its role."""

from __future__ import annotations

from typing import Final

from engine.bounds import UNBOUNDED
from engine.config import EngineConfig
from worker.settings import Role, WorkerSettings

DECODE_MIXED_PREFILL_TOKENS: Final = 192
"""A decode worker computes at most this many prompt tokens in a step that also decodes. So few are
nearly free."""
DECODE_STEP_TOKENS: Final = 512
"""A decode worker computes at most this many prompt tokens in a step where nothing decodes. A
request that is delivered meanwhile waits for the end of the step."""
FULL_STEP_TOKENS: Final = 1024
"""A step with this many prompt tokens takes no further prompt, unless the role is `both`. An H200
computes 44,900 tokens a second in such steps and 45,500 in longer ones. The first of two prompts is
done in half the time."""


def engine_config(settings: WorkerSettings) -> EngineConfig:
    """Makes the engine's configuration."""
    return EngineConfig(
        model=settings.model,
        name=settings.served_name,
        load_format=settings.debug.load_format,
        dtype=settings.dtype,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        device=settings.device,
        tp=settings.tp,
        step_timeout_s=settings.debug.step_timeout_s,
        attention=settings.debug.attention,
        page_size=settings.page_size_tokens,
        num_pages=settings.debug.num_pages,
        kv_memory_bytes=settings.kv_memory_bytes,
        kv_host_bytes=settings.kv_host_bytes,
        kv_stores=settings.kv_store,
        kv_secret_file=settings.kv_secret_file,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_sequences=settings.max_sequences,
        max_step_tokens=_step_tokens(settings),
        decodes=settings.role is not Role.PREFILL,
        mixed_prefill_tokens=_mixed_prefill_tokens(settings),
        full_step_tokens=UNBOUNDED if settings.role is Role.BOTH else FULL_STEP_TOKENS,
        max_context_tokens=settings.max_context_tokens,
        scheduling=settings.scheduling,
        prefix_cache=settings.prefix_cache,
        eviction=settings.debug.eviction,
        hooks=settings.hook,
        hook_limit_s=settings.debug.hook_limit_s,
        poison_freed_pages=settings.debug.poison_freed_pages,
    )


def _step_tokens(settings: WorkerSettings) -> int:
    """Most new tokens in a step; 0: the engine chooses."""
    if settings.max_step_tokens or settings.role is not Role.DECODE:
        return settings.max_step_tokens
    return max(DECODE_STEP_TOKENS, settings.max_sequences + settings.page_size_tokens)


def _mixed_prefill_tokens(settings: WorkerSettings) -> int:
    """Most prompt tokens in a step that also decodes."""
    if settings.debug.mixed_prefill_tokens:
        return settings.debug.mixed_prefill_tokens
    if settings.role is not Role.DECODE:
        return UNBOUNDED
    return max(DECODE_MIXED_PREFILL_TOKENS, settings.page_size_tokens)
