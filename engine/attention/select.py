"""Which attention backend runs, and why."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch

from engine.attention.base import AttentionBackend
from engine.attention.fa3 import Fa3Backend
from engine.attention.sdpa import SdpaBackend
from engine.kv_pool import KvPool

log = logging.getLogger("baton.engine")

BACKENDS = ("auto", "fa3", "sdpa")
FA3_HEAD_DIMS = (64, 128, 256)


class AttentionError(Exception):
    """The backend asked for does not exist or cannot run here."""


def choose_backend(name: str, pool: KvPool, windows: tuple[int | None, ...]) -> AttentionBackend:
    """Builds the backend called `name`, or the best one for the pool's device for "auto".

    Args:
        name: one of `BACKENDS`.
        pool: where K and V live.
        windows: per layer, tokens that a position sees; None: all before it.

    Raises:
        AttentionError: there is no such backend, or it cannot run here.
    """
    if name not in BACKENDS:
        raise AttentionError(f"attention backend {name!r} is not one of {', '.join(BACKENDS)}")
    obstacle = "" if name == "sdpa" else _fa3_obstacle(pool)
    if name == "fa3" and obstacle:
        raise AttentionError(f"attention backend fa3 cannot run here: {obstacle}")
    if name == "sdpa" or obstacle:
        log.info("attention: sdpa (%s)", obstacle or "asked for")
        return SdpaBackend(pool, windows)
    log.info("attention: fa3 (%s)", "asked for" if name == "fa3" else "the device is a Hopper")
    from engine.cuda.decode_attention import decode_attention

    return Fa3Backend(pool, windows, _fa3_kernels(), decode_attention)


def _fa3_obstacle(pool: KvPool) -> str:
    """Why FlashAttention-3 cannot run over this pool; empty: it can."""
    device, dtype, head_dim = pool.tensor.device, pool.tensor.dtype, pool.tensor.shape[-1]
    if device.type != "cuda":
        return f"the device is a {device.type}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "the GPU is not a Hopper"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"KV is {str(dtype).removeprefix('torch.')}, not 16 bits wide"
    if head_dim not in FA3_HEAD_DIMS:
        return f"head dimension {head_dim} is not one of {FA3_HEAD_DIMS}"
    try:
        _fa3_kernels()
        importlib.import_module("triton")
    except (ImportError, OSError) as error:
        return f"flash_attn_interface or triton cannot be imported ({type(error).__name__})"
    return ""


def _fa3_kernels() -> ModuleType:
    return importlib.import_module("flash_attn_interface")
