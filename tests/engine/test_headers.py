"""Headers of checkpoints that lie about their lengths."""

from __future__ import annotations

import os
import resource
import struct
import time
from pathlib import Path

import pytest

from engine.checkpoints import weights_of
from engine.gguf_header import CheckpointError, read_gguf


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _one_list(kind: int) -> bytes:
    first = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _text(b"a")
    return first + struct.pack("<IIQ", 9, kind, 1 << 40)


HEADS = {
    "keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
    "list": _one_list(4),
    "texts": _one_list(8),
    "lists": _one_list(9),
    "text": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62),
    "dimensions": b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + _text(b"a") + struct.pack("<I", 1 << 31),
    "nothing": b"GGUF",
    "another": b"GGML" + bytes(136),
}  # fmt: skip


@pytest.mark.parametrize("lie", HEADS)
def test_lengths_of_a_gguf_header_are_not_believed(lie: str, tmp_path: Path) -> None:
    """The file is sparse, so its size says nothing."""
    file = tmp_path / "model.gguf"
    file.write_bytes(HEADS[lie])
    os.truncate(file, 6 << 30)
    began_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        read_gguf(file)
    assert time.process_time() - began_s < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "KiB"


def test_the_length_of_a_safetensors_header_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 5 << 30))
    os.truncate(file, 6 << 30)
    assert weights_of(tmp_path) is None
