"""Chooses the attention backend and logs the reason."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

import torch

from engine.attention.base import AttentionBackend, Specs
from engine.attention.fa2 import PAGE_MULTIPLE, Fa2Backend
from engine.attention.fa3 import Fa3Backend
from engine.attention.fa3_gathered import Fa3GatheredBackend
from engine.attention.sdpa import SdpaBackend
from engine.pages.kv_pool import KvPool

log = logging.getLogger("baton.engine")

BACKENDS = ("auto", "fa3", "fa2", "sdpa")
"""Names of the backends, best first after "auto"."""
FA3_HEAD_DIMS = (64, 128, 256)
FA2_MOST_HEAD_DIM = 256


class AttentionError(Exception):
    """The requested backend does not exist or cannot run here."""


def choose_backend(name: str, pool: KvPool, specs: Specs) -> AttentionBackend:
    """Builds the backend called `name`, or the best one for the pool's device for "auto".

    Args:
        name: one of `BACKENDS`.
        pool: the pool with K and V.
        specs: attention of each layer.

    Raises:
        AttentionError: there is no such backend, or it cannot run here.
    """
    if name not in BACKENDS:
        raise AttentionError(f"attention backend {name!r} is not one of {', '.join(BACKENDS)}")
    if name != "auto":
        if obstacle := _OBSTACLES[name](pool):
            raise AttentionError(f"attention backend {name} cannot run here: {obstacle}")
        log.info("attention: %s (as configured)", name)
        return _BUILDERS[name](pool, specs)
    obstacles = {other: _OBSTACLES[other](pool) for other in BACKENDS[1:]}
    best = next(other for other, obstacle in obstacles.items() if not obstacle)
    reasons = "; ".join(f"not {other}: {why}" for other, why in obstacles.items() if why)
    log.info("attention: %s (%s)", best, reasons or "the best backend")
    return _BUILDERS[best](pool, specs)


def _fa3_obstacle(pool: KvPool) -> str:
    """The obstacle to FlashAttention-3 over this pool; empty if it can run."""
    if obstacle := _gpu_obstacle(pool):
        return obstacle
    if torch.cuda.get_device_capability(pool.device)[0] != 9:
        return "the GPU is not a Hopper"
    if pool.head_dim not in FA3_HEAD_DIMS:
        return f"head dimension {pool.head_dim} is not one of {FA3_HEAD_DIMS}"
    return _import_obstacle("flash_attn_interface")


def _fa2_obstacle(pool: KvPool) -> str:
    """The obstacle to FlashAttention-2 over this pool; empty if it can run."""
    if pool.gathers:
        return f"it reads pages in place, and cannot read {pool.precision} KV: fa3 and sdpa can"
    if obstacle := _gpu_obstacle(pool):
        return obstacle
    if torch.cuda.get_device_capability(pool.device)[0] < 8:
        return "the GPU is older than Ampere"
    if pool.head_dim > FA2_MOST_HEAD_DIM or pool.head_dim % 8:
        return f"head dimension {pool.head_dim} is no multiple of 8 up to {FA2_MOST_HEAD_DIM}"
    if pool.page_size % PAGE_MULTIPLE:
        return f"pages of {pool.page_size} tokens are no multiple of {PAGE_MULTIPLE}"
    return _import_obstacle("flash_attn")


def _no_obstacle(_pool: KvPool) -> str:
    """SDPA runs everywhere."""
    return ""


def _gpu_obstacle(pool: KvPool) -> str:
    if pool.device.type != "cuda":
        return f"the device is a {pool.device.type}"
    if pool.dtype not in (torch.bfloat16, torch.float16):
        return f"K and V are {str(pool.dtype).removeprefix('torch.')}, not 16 bits wide"
    return ""


def _import_obstacle(library: str) -> str:
    try:
        importlib.import_module(library)
        importlib.import_module("triton")
    except (ImportError, OSError) as error:
        return f"{library} or triton cannot be imported ({type(error).__name__})"
    return ""


def _build_fa3(pool: KvPool, specs: Specs) -> AttentionBackend:
    library = importlib.import_module("flash_attn_interface")
    if pool.gathers:
        from engine.cuda.kv.fp8_decode import decode_attention_fp8
        from engine.cuda.kv.fp8_gather import Gatherer

        return Fa3GatheredBackend(pool, specs, library, decode_attention_fp8, Gatherer(pool))
    from engine.cuda.decode_attention import decode_attention

    return Fa3Backend(pool, specs, library, decode_attention)


def _build_fa2(pool: KvPool, specs: Specs) -> AttentionBackend:
    return Fa2Backend(pool, specs, importlib.import_module("flash_attn"))


_OBSTACLES: dict[str, Callable[[KvPool], str]] = {
    "fa3": _fa3_obstacle,
    "fa2": _fa2_obstacle,
    "sdpa": _no_obstacle,
}
_BUILDERS: dict[str, Callable[[KvPool, Specs], AttentionBackend]] = {
    "fa3": _build_fa3,
    "fa2": _build_fa2,
    "sdpa": SdpaBackend,
}
