"""Keys of KV pages: equal keys mean equal tokens at equal positions, for the same tenant, in the
same precision.

The key of a page is SHA-256 over its parent's key and its token ids. The first page's parent is the
KV's precision, the tenant's salt, and the digest of an adapter. A collision would serve foreign KV,
hence a cryptographic hash (vLLM's prefix caching made it the default for the same reason).

Where a key only says who may hold a page, its first 8 bytes are enough: the *short key*. A
collision there sends a prompt to a worker that does not hold it, and no page is used by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

ShortKeys = NDArray[np.uint64]
"""Shape (pages,): short keys of a prompt's leading pages, in order."""
KEY_BYTES: Final = hashlib.sha256().digest_size
SHORT_BYTES: Final = 8
"""Bytes of a key that says who may hold a page: two of a million pages meet once in 37 million
tries."""
NO_KEYS: Final[ShortKeys] = np.empty(0, np.uint64)


def page_keys(
    token_ids: NDArray[Any], page_size: int, salt: bytes = b"", known: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of all complete pages of `token_ids` (integers below 2**31, from position 0).

    `salt` has all that tells pages of equal tokens apart (`salt_of`).
    `known` are keys computed earlier for a prefix of the same tokens; they are not computed again.
    """
    keys = list(known)
    parent = keys[-1] if keys else hashlib.sha256(b"baton-kv-page\0" + salt).digest()
    data, size = token_ids.astype("<i4", copy=False).tobytes(), 4 * page_size
    for start in range(len(keys) * size, len(data) - size + 1, size):
        parent = hashlib.sha256(parent + data[start : start + size]).digest()
        keys.append(parent)
    return keys


def salt_of(kv_precision: str, cache_salt: bytes, adapter: bytes = b"") -> bytes:
    """What tells pages of equal tokens apart: the precision of the KV, the tenant's salt, and the
    digest of an adapter (32 bytes; empty: none), by which K and V are others.

    No precision begins with the byte before a digest, so both forms never meet.
    """
    own = kv_precision.encode() + b"\0" + cache_salt
    return b"\1" + adapter + own if adapter else own


def short_key(key: bytes) -> int:
    """The short key of a page's key."""
    return int.from_bytes(key[:SHORT_BYTES], "little")


def short_keys(keys: Sequence[bytes]) -> ShortKeys:
    """The short keys of pages' keys, in the same order."""
    return np.frombuffer(b"".join(keys), "<u8")[:: KEY_BYTES // SHORT_BYTES].astype(np.uint64)


def prompt_short_keys(
    token_ids: NDArray[Any],
    page_size: int,
    kv_precision: str,
    cache_salt: bytes,
    adapter: bytes = b"",
) -> ShortKeys:
    """Short keys of the pages of a prompt that a worker may find. At least one token is left to
    compute. About 1 us a page."""
    salt = salt_of(kv_precision, cache_salt, adapter)
    return short_keys(page_keys(token_ids[:-1], page_size, salt))
