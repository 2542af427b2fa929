"""The files of a checkpoint: how many weights they hold, how it wants to be sampled. Needs no
torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine.gguf_header import MOST_HEADER_BYTES, read_gguf
from engine.gguf_header import CheckpointError as CheckpointError

_HEADER_LENGTH_BYTES = 8
_EMBEDDINGS = (
    *("model.embed_tokens.weight", "embed_tokens.weight", "token_embd.weight"),
    "backbone.embeddings.weight",
)
"""Names of the embedding in safetensors and GGUF."""
_HEADS = ("lm_head.weight", "output.weight")


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


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How a checkpoint wants to be sampled where a request does not say; None: it does not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 for all tokens."""
    min_p: float | None = None
    repetition_penalty: float | None = None


def sampling_defaults(path: Path) -> SamplingDefaults:
    """Reads `generation_config.json` in a folder or beside a GGUF file. `do_sample: false` stands
    for temperature 0.

    Raises:
        CheckpointError: a value has no meaning.
    """
    file = (path if path.is_dir() else path.parent) / "generation_config.json"
    if not file.is_file():
        return SamplingDefaults()
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
        found = {name: stated[name] for name in _SAMPLING if stated.get(name) is not None}
        greedy = stated.get("do_sample") is False
    except (OSError, ValueError, AttributeError):
        raise CheckpointError(f"{file} is no object of JSON") from None
    if found.get("top_k") == -1:
        found["top_k"] = 0
    if greedy:
        found["temperature"] = 0.0
    for name, value in found.items():
        kind, is_right = _SAMPLING[name]
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not is_right(value):
            raise CheckpointError(
                f"{file}: {name} has no meaning; without the setting generation_config it is not"
                " read"
            )
    return SamplingDefaults(**found)


_SAMPLING: Final[Mapping[str, tuple[Any, Callable[[float], bool]]]] = {
    "temperature": (int | float, lambda value: value >= 0),
    "top_p": (int | float, lambda value: 0 < value <= 1),
    "top_k": (int, lambda value: 0 <= value < 1 << 32),
    "min_p": (int | float, lambda value: 0 <= value <= 1),
    "repetition_penalty": (int | float, lambda value: value > 0),
}
"""Types and bounds of the values that are read."""


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
        if length > min(file.stat().st_size, MOST_HEADER_BYTES):
            raise CheckpointError(f"{file} is damaged or no safetensors file")
        header = json.loads(stream.read(length))
    return {
        name: _Tensor(tensor["dtype"], math.prod(tensor["shape"]))
        for name, tensor in header.items()
        if name != "__metadata__"
    }


def _gguf_sizes(file: Path) -> dict[str, int]:
    return {tensor.name: int(tensor.n_elements) for tensor in read_gguf(file).tensors}
