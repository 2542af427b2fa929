"""Chooses the attention backend and logs the reason."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import cast

import torch

from engine.attention.fa2 import PAGE_MULTIPLE, Fa2Backend
from engine.attention.fa3 import Fa3Backend, by_operator, sinks_option
from engine.attention.fa3_gathered import Fa3GatheredBackend
from engine.attention.kernels import OwnKernels
from engine.attention.latents import LatentBackend
from engine.attention.recurrent.short_conv import ShortConvBackend
from engine.attention.recurrent.states import RecurrentBackend
from engine.attention.sdpa import SdpaBackend
from engine.attention.triton import TritonBackend
from engine.pool.kv_pool import KvPool
from engine.pool.page_pool import PagePool
from engine.pool.state_pool import StatePool
from engine.step.attention import AttentionBackend, Specs

log = logging.getLogger("baton.engine")

BACKENDS = ("auto", "fa3", "fa2", "triton", "sdpa")
"""Names of the backends, best first after "auto"."""
FA3_HEAD_DIMS = (64, 128, 256)
"""Head dimensions for which its wheel has kernels."""
FA2_MOST_HEAD_DIM = 256
"""FlashAttention-2's own bound."""
TRITON_MOST_HEAD_DIM = 512
"""A tile of queries of larger heads does not fit the registers."""


class AttentionError(Exception):
    """The requested backend does not exist or cannot run here."""


def choose_backend(
    name: str, pool: PagePool, specs: Specs, kernels: OwnKernels
) -> AttentionBackend:
    """Builds the backend called `name`, or the best one for the pool's device for "auto".

    Args:
        name: one of `BACKENDS`.
        pool: the pool with K and V, or with states.
        specs: attention of each layer.
        kernels: those of our own, for backends that take some.

    Raises:
        AttentionError: there is no such backend, or it cannot run here. Layers of one pool
            convolve together, or not at all.
    """
    if isinstance(pool, StatePool):
        return RecurrentBackend(pool, specs)
    pool = cast("KvPool", pool)
    if specs and specs[0].taps is not None:
        return ShortConvBackend(pool, specs)
    if name not in BACKENDS:
        raise AttentionError(f"attention backend {name!r} is not one of {', '.join(BACKENDS)}")
    if name != "auto":
        if obstacle := _OBSTACLES[name](pool, specs):
            raise AttentionError(f"attention backend {name} cannot run here: {obstacle}")
        log.info("attention: %s (as configured)", name)
        return _BUILDERS[name](pool, specs, kernels)
    obstacles = {other: _OBSTACLES[other](pool, specs) for other in BACKENDS[1:]}
    best = next(other for other, obstacle in obstacles.items() if not obstacle)
    reasons = "; ".join(f"not {other}: {why}" for other, why in obstacles.items() if why)
    log.info("attention: %s (%s)", best, reasons or "the best backend")
    return _BUILDERS[best](pool, specs, kernels)


def _fa3_obstacle(pool: KvPool, specs: Specs) -> str:
    """The obstacle to FlashAttention-3 over this pool; empty if it can run."""
    if obstacle := _gpu_obstacle(pool):
        return obstacle
    if torch.cuda.get_device_capability(pool.device)[0] != 9:
        return "the GPU is not a Hopper"
    if not _reads_latents(specs) and pool.head_dim not in FA3_HEAD_DIMS:
        return f"head dimension {pool.head_dim} is not one of {FA3_HEAD_DIMS}"
    if any(spec.soft_cap is not None for spec in specs):
        return "its library is built without soft caps"
    if obstacle := _import_obstacle("flash_attn_interface"):
        return obstacle
    if any(spec.sinks is not None for spec in specs):
        library = importlib.import_module("flash_attn_interface")
        return "" if sinks_option(library) else "its library knows no sinks"
    return ""


def _fa2_obstacle(pool: KvPool, specs: Specs) -> str:
    """The obstacle to FlashAttention-2 over this pool; empty if it can run."""
    if pool.gathers:
        return f"it reads pages in place, and cannot read {pool.precision} KV: fa3 and sdpa can"
    if _reads_latents(specs):
        return "it does not read latents"
    if obstacle := _gpu_obstacle(pool):
        return obstacle
    if torch.cuda.get_device_capability(pool.device)[0] < 8:
        return "the GPU is older than Ampere"
    if pool.head_dim > FA2_MOST_HEAD_DIM or pool.head_dim % 8:
        return f"head dimension {pool.head_dim} is no multiple of 8 up to {FA2_MOST_HEAD_DIM}"
    if pool.page_size % PAGE_MULTIPLE:
        return f"pages of {pool.page_size} tokens are no multiple of {PAGE_MULTIPLE}"
    if any(spec.soft_cap is not None or spec.sinks is not None for spec in specs):
        return "soft caps and sinks are not passed to its library"
    return _import_obstacle("flash_attn")


def _triton_obstacle(pool: KvPool, specs: Specs) -> str:
    """The obstacle to kernels of our own over this pool; empty if they can run."""
    if obstacle := _gpu_obstacle(pool):
        return obstacle
    if torch.cuda.get_device_capability(pool.device)[0] != 9:
        return "the GPU is not a Hopper"
    if pool.gathers:
        return f"it reads pages in place, and cannot read {pool.precision} KV: sdpa can"
    if _reads_latents(specs):
        return _import_obstacle("triton")
    if pool.head_dim > TRITON_MOST_HEAD_DIM or pool.head_dim % 8:
        return f"head dimension {pool.head_dim} is no multiple of 8 up to {TRITON_MOST_HEAD_DIM}"
    return _import_obstacle("triton")


def _no_obstacle(_pool: KvPool, _specs: Specs) -> str:
    """SDPA runs everywhere."""
    return ""


def _reads_latents(specs: Specs) -> bool:
    return any(spec.latents is not None for spec in specs)


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


def _build_fa3(pool: KvPool, specs: Specs, kernels: OwnKernels) -> AttentionBackend:
    module = importlib.import_module("flash_attn_interface")
    has_sinks = any(spec.sinks is not None for spec in specs)
    library = module if has_sinks else by_operator(module)
    if _reads_latents(specs):
        own = kernels.prompt_latents(), kernels.decode_latents()
        return LatentBackend(pool, specs, *own, library)
    if pool.gathers:
        gather = kernels.gather(pool)
        return Fa3GatheredBackend(pool, specs, library, kernels.decode_fp8(), gather)
    return Fa3Backend(pool, specs, library, kernels.decode())


def _build_fa2(pool: KvPool, specs: Specs, _kernels: OwnKernels) -> AttentionBackend:
    return Fa2Backend(pool, specs, importlib.import_module("flash_attn"))


def _build_triton(pool: KvPool, specs: Specs, kernels: OwnKernels) -> AttentionBackend:
    if _reads_latents(specs):
        return LatentBackend(pool, specs, kernels.prompt_latents(), kernels.decode_latents())
    return TritonBackend(pool, specs, kernels.prompt(), kernels.decode())


def _build_sdpa(pool: KvPool, specs: Specs, _kernels: OwnKernels) -> AttentionBackend:
    return SdpaBackend(pool, specs)


_OBSTACLES: dict[str, Callable[[KvPool, Specs], str]] = {
    "fa3": _fa3_obstacle,
    "fa2": _fa2_obstacle,
    "triton": _triton_obstacle,
    "sdpa": _no_obstacle,
}
_BUILDERS: dict[str, Callable[[KvPool, Specs, OwnKernels], AttentionBackend]] = {
    "fa3": _build_fa3,
    "fa2": _build_fa2,
    "triton": _build_triton,
    "sdpa": _build_sdpa,
}
