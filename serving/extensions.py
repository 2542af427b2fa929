"""The bounds of a request's extensions, which routers and workers both hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MAX_EXTENSIONS: Final = 16
MAX_EXTENSION_BYTES: Final = 4096
"""Of all of a request's extensions together, with their names."""


def extension_bytes(extensions: Mapping[str, bytes]) -> int:
    """Bytes of extensions with their names."""
    return sum(len(name.encode()) + len(value) for name, value in extensions.items())
