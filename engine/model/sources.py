"""Where tensors come from: safetensors, a GGUF file (`engine.model.gguf`), or a seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.checkpoints import CheckpointError, safetensors_files
from engine.model.config import ModelError, UnsupportedModelError
from engine.model.region import Range

DUMMY_STD = 0.02
BARE = "embed_tokens.weight"
"""A checkpoint that has this name was saved without a head, and without the body's own name, as
those of models that embed are. Its tensors are read as if they had it."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors, whose headers are read without their tensors."""


class Header(NamedTuple):
    """What a checkpoint says of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """Reads tensors by their Hugging Face names."""

    @property
    def headers(self) -> Mapping[str, Header]:
        """The headers of all tensors, by name."""
        ...

    def read(self, name: str, *where: Range) -> Tensor:
        """One tensor, newly read, or the places `where` of its first dimensions."""
        ...


class WholeTensors:
    """Cuts tensors of a source that has only whole ones. It keeps the one that was read last, since
    several parts of it may be wanted."""

    def __init__(self) -> None:
        self._last: tuple[str, Tensor] | None = None

    def cut(self, name: str, where: tuple[Range, ...], read: Callable[[str], Tensor]) -> Tensor:
        """The places `where` of a tensor that `read` reads."""
        if not where:
            return read(name)
        if self._last is None or self._last[0] != name:
            self._last = None  # Two of them need not fit into memory.
            self._last = name, read(name)
        return self._last[1][tuple(each.slice for each in where)]


class Safetensors:
    """All shards of a folder. They are mapped, and each tensor is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Opens the shards and reads their headers.

        Raises:
            ModelError: there are none, or one is missing or damaged.
        """
        from safetensors import SafetensorError, safe_open

        try:
            files = safetensors_files(folder)
        except CheckpointError as error:
            raise ModelError(str(error)) from error
        self.headers: dict[str, Header] = {}
        self._shards: dict[str, Any] = {}
        for file in files:
            try:
                shard: Any = safe_open(file, framework="pt")
            except FileNotFoundError as error:
                why = "cannot be read" if Path(file).exists() else "is missing"
                raise ModelError(f"{file} {why}") from error
            except SafetensorError as error:
                raise ModelError(f"{file} is damaged or no safetensors file") from error
            for name in shard.keys():  # noqa: SIM118 (a shard is not a mapping)
                self._shards[name] = shard
                self.headers[name] = _header(name, shard.get_slice(name))
        self.is_bare = BARE in self.headers
        """Whether it was saved without a head."""
        self._prefix = "model." if self.is_bare else ""
        self.headers = {self._prefix + name: each for name, each in self.headers.items()}

    def read(self, name: str, *where: Range) -> Tensor:
        """See `Source`. Only the bytes of these places are read."""
        name = name.removeprefix(self._prefix)
        shard = self._shards[name]
        if not where:
            tensor: Tensor = shard.get_tensor(name)
        else:
            tensor = shard.get_slice(name)[tuple(each.slice for each in where)]
        return tensor


def _header(name: str, view: Any) -> Header:
    dtype = _DTYPES.get(view.get_dtype())
    if dtype is None:
        raise UnsupportedModelError(f"{name} is {view.get_dtype()}, which cannot be read")
    return Header(tuple(view.get_shape()), dtype)


class Dummy:
    """Random tensors. Each has a generator of its own, so the order does not matter."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype, device: Any
    ) -> None:
        self.headers = {name: Header(shape, dtype) for name, shape in shapes.items()}
        self._seed = seed
        self._device = torch.device(device)
        self._whole = WholeTensors()

    def read(self, name: str, *where: Range) -> Tensor:
        """See `Source`. A tensor is drawn whole and then cut: a rank gets its part of the weights
        that one rank would have."""
        return self._whole.cut(name, where, self._draw)

    def _draw(self, name: str) -> Tensor:
        """Weights of norms are 1."""
        shape, dtype = self.headers[name]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if len(shape) == 1 and name.endswith("norm.weight"):
            return tensor.fill_(1.0)
        generator = torch.Generator(self._device)
        generator.manual_seed((self._seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63)
        return tensor.normal_(0.0, DUMMY_STD, generator=generator)


def locate(name: str, load_format: str) -> tuple[Path, Path | None]:
    """The folder, and the GGUF file to read, if any."""
    path = Path(name).expanduser()
    if path.is_file():
        if load_format == "safetensors":
            raise ModelError(f"{path} is a file: safetensors are read from a folder")
        return path.parent, path
    if not path.is_dir():
        raise ModelError(f"there is no {path}")
    files = sorted(path.glob("*.gguf")) if _wants_gguf(path, load_format) else []
    if load_format == "gguf" and not files:
        raise ModelError(f"{path} holds no GGUF file")
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise ModelError(f"{path} holds {len(files)} GGUF files ({names}): name one of them")
    return path, files[0] if files else None


def _wants_gguf(folder: Path, load_format: str) -> bool:
    if load_format == "auto":
        return not any(folder.glob("*.safetensors"))
    # Dummy weights need only a config.
    return load_format == "gguf" or (
        load_format == "dummy" and not (folder / "config.json").is_file()
    )
