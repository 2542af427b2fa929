"""What routers and workers write and check alike: packed ids, and the bounds of extensions and of
what a report names."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PACKED_ID: Final = np.dtype("<u4")
"""Form of ids of tokens and pages: little-endian uint32."""
MAX_EXTENSIONS: Final = 16
"""Most extensions of a request."""
MAX_EXTENSION_BYTES: Final = 4096
"""Most bytes of all of a request's extensions together, with their names."""
MOST_ADAPTERS: Final = 64
"""Adapters that a report names of each place: 512 bytes. Of more, routers look at so many."""


def pack_ids(ids: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Packs ids."""
    if not isinstance(ids, np.ndarray):
        return struct.pack(f"<{len(ids)}I", *ids)  # sooner than numpy where they are few
    return ids.astype(PACKED_ID).tobytes()


def extension_bytes(extensions: Mapping[str, bytes]) -> int:
    """Bytes of extensions with their names."""
    return sum(len(name.encode()) + len(value) for name, value in extensions.items())
