"""Chooses the pool for a `kv_cache_dtype`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.pool.fp8_pool import Fp8Pool
from engine.pool.kv_pool import KvPool, PlainPool
from engine.pool.latent_pool import LatentPool

POOLS: dict[str, type[KvPool]] = {"auto": PlainPool, "fp8": Fp8Pool}
"""By `kv_cache_dtype`. `auto` is the model's dtype."""


class PoolError(Exception):
    """There is no such pool; the message says what works."""


def pool_type(kv_cache_dtype: str, page_size: int) -> type[KvPool]:
    """The kind of pool that stores KV so, in pages of so many tokens.

    Raises:
        PoolError: there is none.
    """
    if kv_cache_dtype not in POOLS:
        raise PoolError(f"kv_cache_dtype {kv_cache_dtype!r} is not one of {', '.join(POOLS)}")
    kind = POOLS[kv_cache_dtype]
    if page_size % kind.token_multiple:
        raise PoolError(
            f"kv_cache_dtype {kv_cache_dtype} needs pages of a multiple of {kind.token_multiple}"
            f" tokens, and page_size_tokens is {page_size}: set it to {kind.token_multiple}, or"
            " kv_cache_dtype to auto"
        )
    return kind


def maker(
    kv_cache_dtype: str,
    page_size: int,
    *,
    heads: int,
    dim: int,
    values: int | None,
    dtype: torch.dtype,
) -> Callable[..., KvPool]:
    """What makes a rank's pool of a group, given pages, layers and a device.

    Args:
        kv_cache_dtype: how KV is stored.
        page_size: tokens of a page.
        heads: KV heads that this rank holds.
        dim: their numbers.
        values: of these the numbers that are V, too, if the group keeps latents.
        dtype: the model's.

    Raises:
        PoolError: there is none.
    """
    kind: Callable[..., KvPool] = pool_type(kv_cache_dtype, page_size)
    if values is not None:
        if kind is not PlainPool:
            raise PoolError(
                f"kv_cache_dtype {kv_cache_dtype} cannot be set: all heads of this model read one"
                " latent of each token, and nobody has shown here that it answers as well when"
                " rounded to 8 bits; set it to auto"
            )
        kind = partial(LatentPool, values=values)
    return partial(kind, num_kv_heads=heads, head_dim=dim, page_size=page_size, dtype=dtype)
