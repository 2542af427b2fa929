"""Keys of KV pages: equal keys mean equal tokens at equal positions, for the same tenant, in the
same precision.

The key of a page is SHA-256 over its parent's key and its token ids. The first page's parent is the
KV's precision and the tenant's salt. A collision would serve foreign KV, hence a cryptographic hash
(vLLM's prefix caching made it the default for the same reason).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from engine.bounds import Bounds
from engine.types import Request, TokenIds


def page_keys(
    token_ids: TokenIds, page_size: int, salt: bytes = b"", known: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of all complete pages of `token_ids` (int32, from position 0).

    `salt` has all that tells pages of equal tokens apart.
    `known` are keys computed earlier for a prefix of the same tokens; they are not computed again.
    """
    keys = list(known)
    parent = keys[-1] if keys else hashlib.sha256(b"baton-kv-page\0" + salt).digest()
    data, size = token_ids.astype("<i4", copy=False).tobytes(), 4 * page_size
    for start in range(len(keys) * size, len(data) - size + 1, size):
        parent = hashlib.sha256(parent + data[start : start + size]).digest()
        keys.append(parent)
    return keys


def request_keys(
    config: Bounds, request: Request, tokens: TokenIds, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of the complete pages of `tokens`, which begin a sequence of a request. `known` is as
    for `page_keys`."""
    salt = config.kv_precision.encode() + b"\0" + request.cache_salt
    return page_keys(tokens, config.page_size, salt, known)


def prompt_keys(
    config: Bounds, request: Request, tokens: TokenIds, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of the pages of `tokens` that may be found in the cache. `tokens` is a request's prompt
    with its output so far. At least one token is left to compute. `known` is as for `page_keys`."""
    if not config.prefix_cache or request.prompt_logprobs:
        return []
    complete = (len(tokens) - 1) // config.page_size
    if len(known) >= complete:  # The usual case for a request that waits.
        return list(known[:complete])
    return request_keys(config, request, tokens[:-1], known)
