"""Chooses the pool for a `kv_cache_dtype`."""

from __future__ import annotations

from engine.pool.fp8_pool import Fp8Pool
from engine.pool.kv_pool import KvPool, PlainPool

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
