"""Reads a GGUF file only after its header was found to be no larger than the file.

The `gguf` package believes the lengths that a header states. So a file of 140 bytes kept it busy
for 15 s. Here each length is compared with the bytes that are left. Needs no torch.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from gguf import GGUFReader

MOST_HEADER_BYTES: Final = 100_000_000
"""Most bytes of the header of a checkpoint's file, as the safetensors library has it. A file may be
sparse, and of any size."""
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type."""
_TEXT: Final = 8
_LIST: Final = 9
_MOST_KEYS: Final = 4096
_MOST_TENSORS: Final = 1 << 20
_MOST_ENTRIES: Final = 1 << 22
"""Most entries of all lists together; a vocabulary has some 250,000."""
_MOST_DIMENSIONS: Final = 8
"""Most dimensions of a tensor; GGML itself has four. More is a damaged file."""


class CheckpointError(Exception):
    """A file is missing or damaged; the message says which."""


def read_gguf(path: Path) -> GGUFReader:
    """Maps a file.

    Raises:
        CheckpointError: it is damaged, or no GGUF file.
        OSError: it cannot be read.
    """
    from gguf import GGUFReader

    try:
        with path.open("rb") as stream:
            _Walk(stream, min(path.stat().st_size, MOST_HEADER_BYTES)).header()
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file") from error


class _Walk:
    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._left = size
        self._entries = 0

    def header(self) -> None:
        """Raises ValueError where a length is not believed."""
        if self._take(4) != _MAGIC or self._number("<I") not in _VERSIONS:
            raise ValueError
        tensors, keys = self._number("<Q"), self._number("<Q")
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise ValueError
        for _ in range(keys):
            self._text()
            self._value(self._number("<I"))
        for _ in range(tensors):
            self._text()
            if (dimensions := self._number("<I")) > _MOST_DIMENSIONS:
                raise ValueError
            self._take(8 * dimensions + 4 + 8)

    def _value(self, kind: int) -> None:
        if kind == _TEXT:
            self._text()
        elif kind == _LIST:
            inner, length = self._number("<I"), self._number("<Q")
            self._entries += length
            if self._entries > _MOST_ENTRIES or inner == _LIST:
                raise ValueError
            if inner == _TEXT:
                for _ in range(length):
                    self._text()
            else:
                self._take(_BYTES[inner] * length)
        else:
            self._take(_BYTES[kind])

    def _text(self) -> None:
        self._take(self._number("<Q"))

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _take(self, count: int) -> bytes:
        self._left -= count
        if self._left < 0 or len(taken := self._stream.read(count)) < count:
            raise ValueError
        return taken
