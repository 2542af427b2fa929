"""What an engine's configuration means on a device: its defaults, and what cannot be had there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine import memory
from engine.config import EngineConfig
from engine.parts.adapters import check_adapters
from engine.parts.paging import EngineError
from engine.pool.kinds import PoolError, pool_type
from engine.speculation import choosing


def with_defaults(config: EngineConfig) -> EngineConfig:
    """The configuration with the values that depend on the device.

    Raises:
        EngineError: something of it cannot be had here.
    """
    device = config.device
    has_gpu = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    if torch.device(device).type == "cuda" and not has_gpu:
        why = "finds no GPU here" if torch.version.cuda else "is a build without CUDA"
        raise EngineError(f"the device cannot be {device}: the PyTorch that is installed {why}")
    try:
        pool_type(config.kv_cache_dtype, config.page_size)
        choosing.check(config, device)
    except (PoolError, choosing.SpeculationError) as error:
        raise EngineError(str(error)) from error
    check_adapters(config, device)
    on_cpu = device == "cpu"
    _check_ranks(config, device)
    step_tokens = config.max_step_tokens or _usual_step_tokens(config, on_cpu=on_cpu)
    if step_tokens < max(config.page_size, config.max_sequences + config.page_size):
        raise EngineError(
            f"max_step_tokens {step_tokens} must be at least max_sequences {config.max_sequences}"
            f" plus page_size {config.page_size}"
        )
    if config.mixed_prefill_tokens < config.page_size:
        raise EngineError(
            f"mixed_prefill_tokens {config.mixed_prefill_tokens} must be at least page_size"
            f" {config.page_size}: prompts are computed in whole pages"
        )
    return replace(
        config,
        device=device,
        dtype=memory.dtype_on(config.dtype, on_gpu=not on_cpu),
        name=config.name or Path(config.model).name,
        max_step_tokens=step_tokens,
    )


def _check_ranks(config: EngineConfig, device: str) -> None:
    tp = config.tp
    if tp < 1:
        raise EngineError(f"tp {tp} must be at least 1")
    if tp > 1 and device != "cpu":
        _check_gpus(config, device)


def _check_gpus(config: EngineConfig, device: str) -> None:
    """Each of several ranks has a GPU."""
    tp, count = config.tp, torch.cuda.device_count()
    if device != "cuda":
        raise EngineError(f"{device} names one GPU for {tp} ranks: set device to cuda, or tp to 1")
    if tp > count:
        raise EngineError(
            f"tp {tp} needs {tp} GPUs, and {count} can be seen here: set tp to at most {count}, or"
            " device to cpu"
        )


def _usual_step_tokens(config: EngineConfig, *, on_cpu: bool) -> int:
    """The default step size, tokens. Longer ones are faster by percents, but decode rows wait."""
    if on_cpu:
        return 512
    return 2048 if config.decodes and not config.flexible else 4096
