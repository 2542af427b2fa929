"""Ids of tokens and pages as routers and workers write them: little-endian uint32."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PACKED_ID: Final = np.dtype("<u4")


def pack_ids(ids: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Packs ids."""
    if not isinstance(ids, np.ndarray):
        return struct.pack(f"<{len(ids)}I", *ids)  # sooner than numpy where they are few
    return ids.astype(PACKED_ID).tobytes()
