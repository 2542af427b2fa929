"""The engine's configuration, from a worker's settings and its role."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from engine.bounds import UNBOUNDED, PromptLimits
from engine.config import EngineConfig
from worker.settings import Role, WorkerDebug, WorkerSettings

MIXED_PREFILL_TOKENS: Final = 192
"""A worker that decodes computes at most this many prompt tokens in a step that also decodes. So
few are nearly free, and such a step has a graph. One with a whole prompt has none: its rows wait 50
ms for their tokens instead of 10 (bench/history/two-gpus.md, on three loads)."""
DECODE_STEP_TOKENS: Final = 512
"""A decode worker computes at most this many prompt tokens in a step where nothing decodes. A
request that is delivered meanwhile waits for the end of the step."""
BOTH_STEP_TOKENS: Final = 2048
"""Where both roles share a GPU, decode rows wait for no longer steps than this."""
FULL_STEP_TOKENS: Final = 1024
"""A step with this many prompt tokens takes no further prompt, unless the role is `both`. An H200
computes 44,900 tokens a second in such steps and 45,500 in longer ones. The first of two prompts is
done in half the time."""


def engine_config(settings: WorkerSettings) -> EngineConfig:
    """Makes the engine's configuration."""
    limits = prompt_limits(settings, settings.role)
    wants = bool(settings.adapters or settings.adapters_dir)
    own = {
        "name": settings.served_name,
        "nodes": max(1, settings.nodes),
        "page_size": settings.debug.page_size_tokens,
        "kv_memory_bytes": settings.kv_memory_bytes,
        "kv_host_bytes": settings.kv_host_bytes,
        "kv_stores": settings.kv_store,
        "hooks": settings.hook,
        "max_adapters": settings.debug.max_adapters if wants else 0,
        "adapters_host_bytes": int(settings.debug.adapters_host_gib * (1 << 30)),
        "max_step_tokens": _step_tokens(settings),
        "decodes": settings.flexible or settings.role is not Role.PREFILL,
        "mixed_prefill_tokens": limits.mixed_tokens,
        "full_step_tokens": limits.full_tokens,
    }
    return EngineConfig(**_shared(settings) | _shared(settings.debug) | own)


def prompt_limits(settings: WorkerSettings, role: Role) -> PromptLimits:
    """How much of prompts a step of a worker of that role takes."""
    debug = settings.debug
    mixed = debug.mixed_prefill_tokens or UNBOUNDED
    chunks = role is Role.DECODE or (role is Role.BOTH and _shares_graphs(settings))
    if chunks and not debug.mixed_prefill_tokens:
        mixed = max(MIXED_PREFILL_TOKENS, debug.page_size_tokens)
    alone = {Role.DECODE: DECODE_STEP_TOKENS, Role.BOTH: BOTH_STEP_TOKENS}.get(role, UNBOUNDED)
    return PromptLimits(
        alone_tokens=debug.max_step_tokens or alone,
        mixed_tokens=mixed,
        full_tokens=UNBOUNDED if role is Role.BOTH else FULL_STEP_TOKENS,
    )


def _shares_graphs(settings: WorkerSettings) -> bool:
    """Whether rows and prompts share steps that may be graphs. Without graphs, small chunks would
    only be more steps. Through stages a chunk is a step of its own, whose size `Lanes` says."""
    import torch  # Here: `baton plan` reads the numbers above without it.

    return settings.pp == 1 and settings.device != "cpu" and torch.cuda.is_available()


def _shared(settings: WorkerSettings | WorkerDebug) -> dict[str, Any]:
    """The settings that the engine has under the same name."""
    names = {field.name for field in fields(EngineConfig)} - {"name"}
    return {name: getattr(settings, name) for name in names & set(type(settings).model_fields)}


def _step_tokens(settings: WorkerSettings) -> int:
    """Most new tokens in a step; 0: the engine chooses."""
    debug = settings.debug
    if debug.max_step_tokens or settings.flexible or settings.role is not Role.DECODE:
        return debug.max_step_tokens
    return max(DECODE_STEP_TOKENS, settings.max_sequences + debug.page_size_tokens)
