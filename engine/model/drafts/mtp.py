"""The draft layers that a checkpoint has of its own: multi-token prediction (DeepSeek-V3,
arXiv 2412.19437, section 2.2).

At position i the layer reads what the model gives for token i, behind its last norm, and the
embedding of token i + 1, and guesses token i + 2 with the model's head. Of several such layers the
first one is used, again and again.

Shapes: T tokens of a step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.model.config import ModelConfig, read_json
from engine.model.decoder import ALL, Layer, Model, finish_products
from engine.model.drafts.formats import HeadError
from engine.model.drafts.loading import LoadedHead, wrong_tensors
from engine.model.drafts.sharing import SharingHead
from engine.model.linear import Build, Linear, RmsNorm
from engine.model.mixers.base import Step
from engine.model.mixers.rope import Ropes
from engine.model.places import Place, fill, of_linear, of_norm
from engine.model.precision.base import Format, Kernels, WeightSlice
from engine.model.precision.choice import Precision
from engine.model.precision.formats import read_format
from engine.model.region import Region
from engine.model.sources import Dummy, Safetensors, Source
from engine.step.attention import AttentionBatch, Specs, StepAttention
from engine.step.collective import Alone

COPIES = ("embed_tokens.", "shared_head.head.")
"""Tensors of a draft layer that are the model's own once more."""


class _First:
    """Attention of the only layer, whatever it calls itself."""

    def __init__(self, attention: StepAttention) -> None:
        self._attention = attention
        self.name = attention.name

    def begin(self, batch: AttentionBatch) -> None:
        """See `StepAttention`."""
        self._attention.begin(batch)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `StepAttention`."""
        return self._attention(0, q, k, v)


class Mtp(SharingHead):
    """See the module. It is a `DraftHead`."""

    def __init__(self, config: ModelConfig, model: Model | None, build: Build) -> None:
        """`config`: with the draft layer behind the others. `model`: None where only the shapes are
        wanted."""
        super().__init__(model)
        self.index = config.num_layers - 1
        self.taps: tuple[int, ...] = (self.index,)
        self.longest = config.max_position_embeddings
        self._config, self._shard = config, build.shard
        self._collective = build.collective
        hidden = config.hidden_size
        name = config.layer_name(self.index, "eh_proj")
        self.joined = Linear([WeightSlice(name, Region.whole(hidden, 2 * hidden))], False, build)
        self.norms = nn.ModuleDict(
            {
                name: RmsNorm(hidden, config.norm_eps, build, plus_one=config.norm_plus_one)
                for name in ("enorm", "hnorm", "norm")
            }
        )
        self.layer = Layer(config, self.index, build)
        self.ropes = Ropes([each.rope for each in config.mixers[-1:]], build.device)

    @property
    def specs(self) -> Specs:
        """See `DraftHead`."""
        return (self.layer.attention_spec,)

    def places(self, form: Format | None) -> Iterator[Place]:
        """The parts of its weights, in a fixed order."""
        names = {"enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm"}
        for own, name in names.items():
            yield of_norm(self._config.layer_name(self.index, name), self.norm_of(own))
        yield from of_linear(self.joined, form, self._shard)
        yield from self.layer.places(form, self._shard)

    def finish(self, kernels: Kernels | None = None) -> None:
        """See `DraftHead`."""
        finish_products(self, kernels)

    def features(self, tapped: Tensor) -> Tensor:
        """See `DraftHead`."""
        normed: Tensor = self._target.norm(tapped)
        return normed.nan_to_num()

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, attention: StepAttention
    ) -> Tensor:
        """See `DraftHead`."""
        embedded = self.norm_of("enorm")(self._target.embed(token_ids))
        x = self.joined(torch.cat((embedded, self.norm_of("hnorm")(features)), dim=-1))
        step = Step(self.ropes(positions, x.dtype), _First(attention), {})
        found: Tensor = self.layer(x, step).nan_to_num()
        return found

    def best(self, hidden: Tensor) -> Tensor:
        """See `DraftHead`."""
        ids = self._target.best(self.norm_of("norm")(hidden))[0]
        self._collective.broadcast(ids)
        return ids


class MtpLayers:
    """The draft layers of a model's checkpoint."""

    def __init__(self, folder: str, quantization: str, *, dummy: bool) -> None:
        """`dummy`: weights are drawn from a seed."""
        self._folder, self._quantization = Path(folder).expanduser(), quantization
        self._dummy = dummy
        self._config: ModelConfig | None = None

    def check(self, model: ModelConfig) -> None:
        """Looks whether the checkpoint has draft layers that are built.

        Raises:
            HeadError: it has none.
        """
        own = f"{model.body}.layers.{model.num_layers}."
        if any(kept.state for kept in model.keepers.values()):
            raise HeadError(
                f"speculation mtp: layers of a {model.architecture} fold tokens into states, from"
                " which a wrong draft cannot be taken back, so steps would take one token all the"
                " same"
            )
        if not any(each.prefix == own for each in model.unread):
            raise HeadError(
                f"speculation mtp: no draft layers of a {model.architecture} are read; those of"
                " GLM-4.5 to 4.7 and of DeepSeek-V3 are"
            )
        self._config = replace(model, layers=(*model.layers, model.layers[-1]), unread=())
        if self._dummy:
            return
        source = Safetensors(self._folder)
        if not any(name.startswith(own) for name in source.headers):
            raise HeadError(f"speculation mtp: the checkpoint has no tensors {own}*")
        form = read_format(read_json(self._folder / "config.json"), self._folder, model.head)
        meta = torch.device("meta")
        precision = Precision(meta, torch.float32, form, self._quantization)
        head = Mtp(self._config, None, Build(torch.float32, meta, precision, ALL, Alone()))
        source.headers = {name: each for name, each in source.headers.items() if own in name}
        for wrong in wrong_tensors(list(head.places(form)), source, own, COPIES):
            raise HeadError(f"the checkpoint's draft layer does not fit its config: {wrong}")

    def load(self, model: Model, dtype: torch.dtype, device: torch.device, seed: int) -> LoadedHead:
        """Fills the weights of a rank's part. It was checked before."""
        assert self._config is not None, "it was checked before"
        form: Format | None = None
        source: Source | None = None
        if not self._dummy:
            source = Safetensors(self._folder)
            stated = read_json(self._folder / "config.json")
            form = read_format(stated, self._folder, self._config.head)
        precision = Precision(device, dtype, form, self._quantization)
        build = Build(dtype, device, precision, model.shard, model.collective)
        head = Mtp(self._config, model, build)
        places = list(head.places(form))
        if source is None:
            shapes = {name: spec.shape for place in places for name, spec in place.specs.items()}
            source = Dummy(shapes, seed, dtype, device)
        revision = fill(places, source, asdict(self._config), None)
        kept = self._config.layers[-1].mixer
        assert kept is not None
        assert kept.kept is not None, "the layer attends"
        return LoadedHead(head, kept.kept, revision)
