"""The files of a checkpoint, and how many weights they hold. Needs no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

_HEADER_LENGTH_BYTES = 8
_EMBEDDINGS = ("model.embed_tokens.weight", "token_embd.weight")
"""Names of the embedding in safetensors and GGUF."""
_HEADS = ("lm_head.weight", "output.weight")


class CheckpointError(Exception):
    """A file is missing or damaged; the message says which."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Sizes of a model."""

    count: int
    """Number of weights."""
    tied: int
    """Number of weights of an embedding that is also the head; 0 if there is a head beside it."""


def safetensors_files(folder: Path) -> list[Path]:
    """The files of the index, else the file with the usual name, else all safetensors files.

    Raises:
        CheckpointError: there are none, or the index cannot be read.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{index} is no index of shards") from None
        return [folder / name for name in sorted(names)]
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no safetensors")
    return files


def weights_of(path: Path) -> Weights | None:
    """Counts the weights of a folder or of a GGUF file by the files' headers alone. None if there
    are no files to count."""
    try:
        if path.is_file():
            return _weights(_gguf_sizes(path))
        sizes: dict[str, int] = {}
        for file in safetensors_files(path):
            sizes |= _safetensors_sizes(file)
        return _weights(sizes)
    except (CheckpointError, OSError, ValueError, ImportError):
        pass
    files = sorted(path.glob("*.gguf"))
    return weights_of(files[0]) if len(files) == 1 else None


def _weights(sizes: dict[str, int]) -> Weights:
    embedding = sum(sizes.get(name, 0) for name in _EMBEDDINGS)
    has_head = any(name in sizes for name in _HEADS)
    return Weights(sum(sizes.values()), 0 if has_head else embedding)


def _safetensors_sizes(file: Path) -> dict[str, int]:
    """Numbers of elements by tensor. The format: https://huggingface.co/docs/safetensors."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
        if length > file.stat().st_size:
            raise CheckpointError(f"{file} is damaged or no safetensors file")
        header = json.loads(stream.read(length))
    return {
        name: math.prod(tensor["shape"])
        for name, tensor in header.items()
        if name != "__metadata__"
    }


def _gguf_sizes(file: Path) -> dict[str, int]:
    from gguf import GGUFReader

    return {tensor.name: int(tensor.n_elements) for tensor in GGUFReader(file).tensors}
