"""The files of a checkpoint, and how many weights they hold. Needs no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

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
    """Number of weights that are kept in the model's dtype."""
    tied: int
    """Number of weights of an embedding that is also the head; 0 if there is a head beside it."""
    outside: int = 0
    """Number of weights outside the layers: embedding and head, which are never rounded."""
    packed_bytes: int = 0
    """Bytes of all quantised weights, as a GPU keeps them."""
    packed_count: int = 0
    """Number of quantised weights, which a CPU widens to the model's dtype."""


def safetensors_files(folder: Path) -> list[Path]:
    """The file with the usual name, else those of the index, else all safetensors files:
    transformers' order.

    Raises:
        CheckpointError: there are none, or the index cannot be read.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{index} is no index of shards") from None
        return [folder / name for name in sorted(names)]
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise CheckpointError(f"{folder} holds no safetensors")
    return files


def weights_of(path: Path) -> Weights | None:
    """Counts the weights of a folder or of a GGUF file by the files' headers alone. None if there
    are no files to count."""
    try:
        if path.is_file():
            return _weights(_gguf_sizes(path))
        tensors: dict[str, _Tensor] = {}
        for file in safetensors_files(path):
            tensors |= _safetensors_tensors(file)
    except (CheckpointError, OSError, ValueError, ImportError):
        files = sorted(path.glob("*.gguf"))
        return weights_of(files[0]) if len(files) == 1 else None
    packed = {name: tensor for name, tensor in tensors.items() if tensor.dtype in _PACKED}
    counted = _weights({name: t.elements for name, t in tensors.items() if name not in packed})
    return replace(
        counted,
        packed_bytes=sum(t.elements * _PACKED[t.dtype].num_bytes for t in packed.values()),
        packed_count=sum(t.elements * _PACKED[t.dtype].weights for t in packed.values()),
    )


class _Tensor(NamedTuple):
    """A tensor of a safetensors file."""

    dtype: str
    elements: int


class _Packing(NamedTuple):
    """What an element of a quantised tensor holds."""

    num_bytes: int
    weights: int


_PACKED = {"F8_E4M3": _Packing(1, 1), "U8": _Packing(1, 2), "I32": _Packing(4, 8)}
"""Dtypes of quantised weights: FP8, or INT4 in bytes or in words. The few zero points in words
count as weights, too."""


def _weights(sizes: dict[str, int]) -> Weights:
    embedding = sum(sizes.get(name, 0) for name in _EMBEDDINGS)
    head = sum(sizes.get(name, 0) for name in _HEADS)
    return Weights(sum(sizes.values()), 0 if head else embedding, embedding + head)


def _safetensors_tensors(file: Path) -> dict[str, _Tensor]:
    """The format: https://huggingface.co/docs/safetensors."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
        if length > file.stat().st_size:
            raise CheckpointError(f"{file} is damaged or no safetensors file")
        header = json.loads(stream.read(length))
    return {
        name: _Tensor(tensor["dtype"], math.prod(tensor["shape"]))
        for name, tensor in header.items()
        if name != "__metadata__"
    }


def _gguf_sizes(file: Path) -> dict[str, int]:
    from gguf import GGUFReader

    return {tensor.name: int(tensor.n_elements) for tensor in GGUFReader(file).tensors}
