"""Checks a model's folder, without reading its weights: whether it runs here, how, and how much KV
is left beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import torch

from console.doctor.finding import Finding, error, ok, warning
from engine import memory
from engine.attention import choose_backend
from engine.bounds import MOST_RANKS
from engine.checkpoints import Weights
from engine.config import EngineConfig
from engine.cuda import features
from engine.cuda.attention_kernels import CudaKernels
from engine.groups.spec import Full, State, name_of, split_layers
from engine.model import ModelConfig, ModelError, load_model
from engine.model.config import WrappedConfig
from engine.model.gguf import GgufFile
from engine.model.loading import choose
from engine.model.mixers.config import AttentionConfig, LatentConfig, MixerConfig
from engine.model.ranks import mixtures
from engine.parts.paging import lives_of
from engine.pool.kinds import maker
from engine.pool.kv_pool import KvPool
from engine.pool.state_pool import unit_bytes_of
from engine.step.attention import AttentionSpec, Latents

USUAL: Final = EngineConfig(model="")
"""What a worker has by default."""
DTYPES: Final = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""The usual dtype of each kind of device."""


class _CountedError(Exception):
    """Carries the number of weights out of `load_model`, before it reads any."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights


class GroupRoom(NamedTuple):
    """What sequences keep in a group of layers."""

    name: str
    layers: int
    page_bytes: int
    most_pages: int
    """Pages of a sequence."""


class Room(NamedTuple):
    """What a model and its KV take, bytes."""

    model: int
    free: int
    """Free memory that a worker may use."""
    groups: Sequence[GroupRoom]
    """Group 0 first."""

    @property
    def of_token(self) -> int:
        """KV of a token in layers that see all tokens."""
        return self.groups[0].page_bytes // USUAL.page_size

    @property
    def of_sequence(self) -> int:
        """Most KV of a sequence in layers with windows, and its state."""
        return sum(group.page_bytes * group.most_pages for group in self.groups[1:])

    def held(self, tokens: int) -> int:
        """KV and state of a sequence of so many tokens."""
        pages = -(-tokens // USUAL.page_size)
        return sum(group.page_bytes * min(pages, group.most_pages) for group in self.groups)

    @property
    def left(self) -> int:
        """What is left for KV."""
        return self.free - self.model - memory.BESIDE_BYTES

    @property
    def tokens(self) -> int:
        """The longest sequence that fits alone."""
        return max(0, self.left - self.of_sequence) // max(1, self.of_token)


def check_model(name: str) -> Iterator[Finding]:
    """Checks a folder or a GGUF file."""
    if not Path(name).expanduser().exists():
        yield error("model", f"{name} is not on this machine", "fetch it, and name its folder")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[device.type]
    try:
        config = _config_of(Path(name).expanduser(), dtype)
        weights = weights_of(name, dtype, device)
    except ModelError as failure:
        yield error("model", str(failure), "choose another model: docs/models.md lists them")
        return
    yield ok("model", _shape(config))
    if any(unread.what == "images" for unread in config.unread):
        yield ok("images", "its text part is read; a request with an image is refused")
    if isinstance(config, WrappedConfig):
        yield ok("code", "transformers' own, over our pages: no file of ours reads this model")
    yield from _implementation(config, dtype, device)
    yield from _experts(config)
    room = room_of(config, weights, dtype, device)
    yield _fits(room, device)
    if len(room.groups) > 1:
        yield ok("groups", _by_group(room, config.max_position_embeddings))


def _config_of(path: Path, dtype: torch.dtype) -> ModelConfig:
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").is_file():
        return GgufFile(files[0]).config()
    found = choose(path, USUAL.model_impl, dtype)
    return found if isinstance(found, ModelConfig) else found.config


def weights_of(name: str, dtype: torch.dtype, device: torch.device) -> Weights:
    """Counts the weights of a model, by its config and what its checkpoint says of its precision.

    Raises:
        ModelError: it cannot be loaded.
    """

    def counted(weights: Weights) -> NoReturn:
        raise _CountedError(weights)

    path = Path(name).expanduser()
    has_weights = path.is_file() or any(path.glob("*.safetensors")) or any(path.glob("*.gguf"))
    load_format = "auto" if has_weights else "dummy"
    try:
        load_model(str(path), dtype=dtype, device=device, load_format=load_format, check=counted)
    except _CountedError as found:
        return found.weights
    raise AssertionError("weights are counted before they are read")


def _shape(config: ModelConfig) -> str:
    what = "calls of attention" if isinstance(config, WrappedConfig) else "layers"
    return (
        f"{config.architecture}: {config.num_layers} {what} of {config.hidden_size}, contexts of"
        f" up to {config.max_position_embeddings:,} tokens"
    )


def _experts(config: ModelConfig) -> Iterator[Finding]:
    """How many there are, and by how much they can be divided whole."""
    for own in dict.fromkeys(mixtures(config)):
        count, chosen = own.routing.experts, own.routing.chosen
        by = [str(ranks) for ranks in range(2, min(count, MOST_RANKS) + 1) if count % ranks == 0]
        yield ok(
            "experts",
            f"{chosen} of {count} for each token; whole on {', '.join(by)} ranks"
            " (--expert-parallel beside --tp) or workers of one host (--expert-group)",
        )


def _implementation(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[Finding]:
    if device.type == "cpu":
        yield ok("runs", "on this CPU with PyTorch; no GPU can be seen")
        return
    if obstacle := features.obstacle(config):
        yield warning(
            "runs",
            f"on the GPU with PyTorch, kernel by kernel: {obstacle} has no fused kernels yet",
            "expect a tenth of the speed of a model that has them",
        )
        return
    names = {
        choose_backend("auto", pool, specs, CudaKernels()).name
        for pool, specs in _pools(config, dtype, device)
    }
    yield ok("runs", f"on the GPU with fused kernels; attention: {', '.join(sorted(names))}")


def _page(
    config: ModelConfig, layers: Sequence[int], dtype: torch.dtype, device: torch.device
) -> KvPool:
    kept = config.kept_by(layers)
    make = maker(
        USUAL.kv_cache_dtype,
        USUAL.page_size,
        heads=kept.kv_heads,
        dim=kept.head_dim,
        values=kept.values,
        dtype=dtype,
    )
    return make(num_pages=1, num_layers=len(layers), device=device)


def _pools(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[KvPool, tuple[AttentionSpec, ...]]]:
    """A page of each group, and the attention over it."""
    for _, layers in split_layers(lives_of(config)):
        own = (_spec_of(config.layers[layer].mixer, device) for layer in layers)
        specs = tuple(spec for spec in own if spec is not None)
        yield _page(config, layers, dtype, device), specs


def _spec_of(own: MixerConfig | None, device: torch.device) -> AttentionSpec | None:
    """A layer's attention; None: it has none."""
    if isinstance(own, LatentConfig):
        weight = torch.zeros(1, device=device).expand(own.heads, own.k_dim + own.v_dim, own.rank)
        return AttentionSpec(own.scale, latents=Latents(weight, own.k_dim))
    if not isinstance(own, AttentionConfig):
        return None
    sinks = torch.zeros(own.heads, device=device) if own.sinks else None
    return AttentionSpec(own.scale, own.window, own.soft_cap, sinks)


def room_of(
    config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device
) -> Room:
    """What a model takes on a device, and what is free there."""
    on_gpu, size = device.type == "cuda", dtype.itemsize
    need = memory.Need(weights, size, 0, on_gpu)
    if on_gpu:
        free = int(torch.cuda.mem_get_info(device)[0] * USUAL.gpu_memory_utilization)
    else:
        free = memory.available_bytes()
    groups = []
    longest = -(-config.max_position_embeddings // USUAL.page_size)
    for kind, layers in split_layers(lives_of(config)):
        if isinstance(kind, State):
            kept = config.keepers[layers[0]]
            page_bytes, most = kept.kv_heads * unit_bytes_of(len(layers), kept.state), 1
        else:
            page_bytes, most = _page(config, layers, dtype, device).page_bytes, longest
            if not isinstance(kind, Full):
                most = min(kind.most_pages(USUAL.page_size), longest)
        groups.append(GroupRoom(name_of(kind), len(layers), page_bytes, most))
    return Room(need.model_bytes, free, groups)


def _by_group(room: Room, longest: int) -> str:
    """Layers and bytes of each group, and what a sequence holds of all."""
    first, *others = room.groups
    of_first = f"{first.name}: {first.layers} layers, {room.of_token / 1024:.1f} KiB a token"
    parts = [of_first] if first.layers else []
    parts += [
        f"{group.name}: {group.layers} layers,"
        f" at most {_mib(group.page_bytes * group.most_pages)} a sequence"
        for group in others
    ]
    lengths = [tokens for tokens in (1024, 8192, 32768) if tokens <= longest] or [longest]
    held = [f"{_mib(room.held(tokens))} with {tokens:,} tokens" for tokens in lengths]
    return f"{'; '.join(parts)}; a sequence holds {', '.join(held)}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _fits(room: Room, device: torch.device) -> Finding:
    where = "the GPU" if device.type == "cuda" else "this machine"
    takes = f"weights take {_gib(room.model)} of {_gib(room.free)} that are free on {where}"
    if room.left <= room.of_sequence + USUAL.page_size * room.of_token:
        advice = "free memory, take more ranks (--tp, --pp, --nodes), or smaller weights"
        return error("memory", f"{takes}: nothing is left for KV", advice)
    left = f"{takes}; {_gib(room.left)} are left for KV"
    if not room.groups[0].layers:
        longest = f"the longest sequences, each with {_mib(room.of_sequence)} in windows"
        return ok("memory", f"{left}: {room.left // room.of_sequence:,} of {longest}")
    windows = f", beside {_mib(room.of_sequence)} a sequence in windows or states"
    return ok(
        "memory",
        f"{left}: {room.tokens:,} tokens of {room.of_token / 1024:.1f} KiB"
        f"{windows if room.of_sequence else ''}",
    )


def _gib(size: int) -> str:
    return f"{size / memory.GIB:.2f} GiB"
