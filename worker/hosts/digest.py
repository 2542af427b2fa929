"""A digest of a model that hosts can compare before weights are read."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Final

_LENGTH: Final = struct.Struct("<Q")
"""Begins a safetensors file: bytes of its header."""
MOST_HEADER_BYTES: Final = 100 << 20
"""safetensors' own bound."""
_BEGIN_BYTES: Final = 1 << 20
"""So much of a GGUF file is read: far into the names of its tensors. Not tuned."""


def model_digest(model: str) -> bytes:
    """Digest of the configuration and of all weights' names, types, shapes and sizes, which takes
    some milliseconds. Equal ones may still have other numbers in them: the ranks compare those of
    the tensors that they have read.

    Args:
        model: a folder, or a GGUF file.

    Raises:
        OSError: it cannot be read.
    """
    path, digest = Path(model), hashlib.sha256()
    if path.is_file():
        _add(digest, path, _BEGIN_BYTES)
        return digest.digest()
    config = path / "config.json"
    if config.exists():
        digest.update(config.read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as begin:
            head = begin.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        _add(digest, file, _LENGTH.size + min(length, MOST_HEADER_BYTES))
    return digest.digest()


def _add(digest: hashlib._Hash, file: Path, count: int) -> None:
    digest.update(f"{file.name} {file.stat().st_size} ".encode())
    with file.open("rb") as begin:
        digest.update(begin.read(count))
