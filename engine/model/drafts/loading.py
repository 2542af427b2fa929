"""Opens the checkpoint of a draft head, and fills its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.model.config import ModelConfig, ModelError
from engine.model.decoder import ALL, Model
from engine.model.drafts.eagle3 import Eagle3
from engine.model.drafts.formats import BODY, HeadConfig, HeadError, read_head, tensor_names
from engine.model.linear import Build
from engine.model.mixers.config import Kept
from engine.model.places import Place, fill
from engine.model.precision.base import Kernels
from engine.model.precision.choice import Precision
from engine.model.ranks import check_ranks
from engine.model.region import Range
from engine.model.shard import Shard
from engine.model.sources import Dummy, Header, Safetensors, Source
from engine.step.attention import Specs, StepAttention
from engine.step.collective import Alone

SHARED = ("embed_tokens", "lm_head")
"""What a head may take from its model."""
_LEFT = ("d2t", "t2d", "rotary_emb.", "verifier_lm_head.", "verifier_norm.")
"""Prefixes of tensors that are read apart, or that say again what is known."""


class DraftHead(Protocol):
    """Guesses tokens. It is an `nn.Module`.

    Shapes: T tokens of a step, H hidden size, N taps.
    """

    taps: tuple[int, ...]
    """Layers of the model whose inputs it reads."""
    longest: int
    """Positions that it knows."""

    @property
    def specs(self) -> Specs:
        """Attention of its layers."""
        ...

    def finish(self, kernels: Kernels | None = None) -> None:
        """Makes the filled weights ready for products: those of a GPU, or PyTorch's."""
        ...

    def features(self, tapped: Tensor) -> Tensor:
        """Taps [T, N * H] -> [T, H]."""
        ...

    def __call__(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, attention: StepAttention
    ) -> Tensor:
        """What is made of `features` [T, H] at [T] positions and of the [T] ids behind them:
        [T, H], features of the positions behind."""
        ...

    def best(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R] int64, the likeliest tokens behind, equal on all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head ready to draft."""

    module: DraftHead
    kept: Kept
    """What its layer keeps of each token."""
    revision: str
    """Digest of its config and of the first and last row of every tensor."""


class HeadFolder:
    """The checkpoint of a head for one model. What does not fit is refused before the model's
    weights are read."""

    def __init__(self, folder: str, ranks: int, *, dummy: bool) -> None:
        """`dummy`: weights are drawn from a seed."""
        self._folder = Path(folder).expanduser()
        self._ranks, self._dummy = ranks, dummy
        self._source: Source | None = None
        self._config: HeadConfig | None = None
        self._drafted: Tensor | None = None

    def check(self, model: ModelConfig) -> None:
        """Reads config and headers, and compares them with the model.

        Raises:
            HeadError: they do not fit.
            ModelError: they cannot be read.
        """
        self._config = config = read_head(self._folder, model)
        try:
            precision = Precision(torch.device("cpu"), torch.float32)
            check_ranks(config.layer, precision, Shard(0, self._ranks))
        except ModelError as error:
            raise HeadError(f"draft head: {error}") from error
        if self._dummy:
            return
        self._source = _Named(config, self._folder)
        self._drafted = _drafted(config, self._source)
        if f"{BODY}.lm_head.weight" not in self._source.headers and self._drafted is not None:
            raise HeadError("the head drafts some tokens of the model, and has no lm_head for them")
        meta = torch.device("meta")
        build = Build(torch.float32, meta, Precision(meta, torch.float32), ALL, Alone())
        head = Eagle3(config, None, build, self._shares())
        for wrong in wrong_tensors(list(head.places()), self._source, f"{BODY}.", _LEFT):
            raise HeadError(f"the head's checkpoint does not fit its config: {wrong}")

    def load(self, model: Model, dtype: torch.dtype, device: torch.device, seed: int) -> LoadedHead:
        """Fills the weights of a rank's part. It was checked before."""
        assert self._config is not None, "it was checked before"
        config, precision = self._config, Precision(device, dtype)
        build = Build(dtype, device, precision, model.shard, model.collective)
        head = Eagle3(config, model, build, self._shares())
        places = list(head.places())
        source = self._source
        if source is None:
            shapes = {name: spec.shape for place in places for name, spec in place.specs.items()}
            source = Dummy(shapes, seed, dtype, device)
        described = asdict(config)
        del described["names"]  # Both formats may have the same head.
        revision = fill(places, source, described, None)
        if self._drafted is not None:
            head.drafted = self._drafted.to(device)
            revision = hashlib.sha256(
                revision.encode() + self._drafted.numpy().tobytes()
            ).hexdigest()[:16]
        return LoadedHead(head, config.kept, revision)

    def _shares(self) -> set[str]:
        """What the head takes from its model. A dummy takes the embedding."""
        if self._source is None:
            return {"embed_tokens"}
        there = self._source.headers
        return {name for name in SHARED if f"{BODY}.{name}.weight" not in there}


class _Named:
    """Tensors of a head by their names here. Both formats have equal ones."""

    def __init__(self, config: HeadConfig, folder: Path) -> None:
        self._source = Safetensors(folder)
        self._names = tensor_names(config, self._source.headers.keys())
        headers = self._source.headers
        self.headers: dict[str, Header] = {
            ours: headers[theirs] for ours, theirs in self._names.items()
        }

    def read(self, name: str, *where: Range) -> Tensor:
        """See `Source`."""
        return self._source.read(self._names[name], *where)


def _drafted(config: HeadConfig, source: Source) -> Tensor | None:
    """[V] int64: the model's tokens by the head's; None: they are the same.

    Raises:
        HeadError: one is no token of the model.
    """
    count = config.layer.vocab_size
    if "d2t" not in source.headers:
        if count != config.vocab_size:
            raise HeadError(
                f"the head drafts {count} of {config.vocab_size} tokens, and has no d2t that says"
                " which"
            )
        return None
    if source.headers["d2t"].shape != (count,):
        raise HeadError(f"the head's d2t is {source.headers['d2t'].shape}, of {count} tokens")
    if "t2d" in source.headers and source.headers["t2d"].shape != (config.vocab_size,):
        raise HeadError(
            f"the head's t2d is {source.headers['t2d'].shape}, and the model has"
            f" {config.vocab_size} tokens"
        )
    tokens = torch.arange(count) + source.read("d2t").long()
    if int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab_size:
        raise HeadError(f"the head's d2t names tokens beyond the {config.vocab_size} of the model")
    return tokens


def wrong_tensors(
    places: list[Place], source: Source, body: str, left: tuple[str, ...]
) -> Iterator[str]:
    """What of a head's tensors does not fit, one after the other.

    Args:
        places: what is to be filled.
        source: has the head's tensors alone.
        body: prefix of names that is not said.
        left: what follows it in names that need no place.
    """
    wanted = {name: spec for place in places for name, spec in place.specs.items()}
    for name, spec in wanted.items():
        header = source.headers.get(name)
        if header is None:
            yield f"it has no {name.removeprefix(body)}"
        elif not spec.fits(header.shape):
            sizes = f"{list(header.shape)}, and {list(spec.shape)} is needed"
            yield f"{name.removeprefix(body)} has shape {sizes}"
    for name in sorted(source.headers.keys() - wanted.keys()):
        if not name.removeprefix(body).startswith(left):
            yield f"{name.removeprefix(body)} is unknown"
