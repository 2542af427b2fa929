"""The decoder of all families. It knows features (`engine.model.config`), and no names.

One of several ranks holds its part of the weights (`engine.model.shard`). Behind mixers and
feed-forwards the ranks of a stage add up. Behind its last layer a stage hands on what it made.

Shapes: T tokens of a step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.best import best_of_parts
from engine.model.config import LayerInputs, ModelConfig
from engine.model.experts.counting import PairCount
from engine.model.experts.weights import ExpertWeights
from engine.model.feed_forward import ACTIVATIONS, feed_forward
from engine.model.linear import Build, Linear, RmsNorm
from engine.model.mixers.base import Step
from engine.model.mixers.kinds import mixer
from engine.model.mixers.rope import Ropes
from engine.model.places import Place, of_linear, of_norm, plain
from engine.model.precision.base import Format, Kernels, WeightSlice, parameter
from engine.model.precision.choice import Precision
from engine.model.precision.packing import pack, product
from engine.model.region import Range, Region
from engine.model.shard import Shard
from engine.step.attention import AttentionSpec, Specs, StepAttention
from engine.step.collective import Alone, Collective
from engine.step.dispatch import STAY, Dispatch
from engine.step.stages import OneStage, Stages

ALL = Shard()
"""The whole model."""
NO_ATTENTION = AttentionSpec(1.0)
"""Attention of a layer without a mixer. Nobody attends there."""


class Tapped(NamedTuple):
    """What enters some layers, for draft heads."""

    layers: tuple[int, ...]
    """The number of layers: what the last one gives."""
    found: dict[int, Tensor]
    """[T, H] by layer, of a step."""

    @property
    def states(self) -> Tensor:
        """[T, layers * H]."""
        return torch.cat([self.found[layer] for layer in self.layers], dim=1)


class Inputs(nn.Module):
    """What the layers read of the tokens themselves: an embedding of each token for each layer, and
    what a product makes of the usual one.

    Shapes: L layers, P numbers of each.
    """

    def __init__(self, config: ModelConfig, own: LayerInputs, build: Build) -> None:
        super().__init__()
        self._own, self._body, layers = own, config.body, config.num_layers
        outputs, hidden = layers * own.width, config.hidden_size
        self.embedding = parameter((own.vocab_size, outputs), build.dtype, build.device)
        part = WeightSlice(
            f"{config.body}.per_layer_model_projection", Region.whole(outputs, hidden)
        )
        self.product = Linear([part], False, build)
        self.norm = RmsNorm(own.width, config.norm_eps, build)
        self._scale = torch.tensor(own.width**0.5, dtype=build.dtype).item()
        self._factor = hidden**-0.5

    def forward(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """[T] ids and their embeddings [T, H] -> [T, L, P]."""
        made = (self.product(x) * self._factor).view(len(x), -1, self._own.width)
        of_token = F.embedding(token_ids, self.embedding) * self._scale
        both: Tensor = (self.norm(made) + of_token.view_as(made)) * 2.0**-0.5
        return both

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """The parts of its weights, in a fixed order."""
        yield plain(f"{self._body}.embed_tokens_per_layer.weight", self.embedding)
        yield of_norm(f"{self._body}.per_layer_projection_norm", self.norm)
        yield from of_linear(self.product, form, shard)


class Input(nn.Module):
    """How a layer reads its part of `Inputs`, behind its feed-forward."""

    def __init__(self, config: ModelConfig, index: int, own: LayerInputs, build: Build) -> None:
        super().__init__()
        hidden = config.hidden_size

        def linear(name: str, outputs: int, inputs: int) -> Linear:
            region = Region.whole(outputs, inputs)
            return Linear([WeightSlice(config.layer_name(index, name), region)], False, build)

        self.gate = linear("per_layer_input_gate", own.width, hidden)
        self.product = linear("per_layer_projection", hidden, own.width)
        self.norm = RmsNorm(hidden, config.norm_eps, build)
        self.activation = own.activation
        self._activate = ACTIVATIONS[own.activation]
        self._norm_name = config.layer_name(index, "post_per_layer_input_norm")

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """[T, H] and [T, P] -> [T, H]."""
        out: Tensor = x + self.norm(self.product(self._activate(self.gate(x)) * own))
        return out

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """The parts of its weights, in a fixed order."""
        yield of_norm(self._norm_name, self.norm)
        yield from of_linear(self.gate, form, shard)
        yield from of_linear(self.product, form, shard)


class Layer(nn.Module):
    """A mixer and a feed-forward, each with a residual around it and norms where the model has
    them. It may lack one of them."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__()
        self.index = index
        self.config = config
        self.parallel = config.layers[index].parallel
        own, norms = config.layers[index], config.layers[index].norms

        def norm(name: str | None) -> RmsNorm | None:
            if name is None:
                return None
            return _norm_of(config, build)

        self.before_mixer, self.after_mixer = norm(norms.before_mixer), norm(norms.after_mixer)
        self.before_feed_forward = norm(norms.before_feed_forward)
        self.after_feed_forward = norm(norms.after_feed_forward)
        self.scalar = None
        if own.scalar is not None:
            self.scalar = parameter((1,), build.dtype, build.device)
        self.input = None
        if config.layer_inputs is not None:
            self.input = Input(config, index, config.layer_inputs, build)
        self.mixer = None if own.mixer is None else mixer(config, index, own.mixer, build)
        self.feed_forward = None
        if own.feed_forward is not None:
            self.feed_forward = feed_forward(config, index, own.feed_forward, build)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H]."""
        read = None
        if self.mixer is not None:
            read = _normed(x, self.before_mixer)
            x = self._added(x, _normed(self.mixer(read, step), self.after_mixer))
        if self.feed_forward is not None:
            if read is None or not self.parallel:
                read = _normed(x, self.before_feed_forward)
            out = self.feed_forward(read)
            x = self._added(x, _normed(out, self.after_feed_forward))
        if self.input is not None and step.inputs is not None:
            x = self.input(x, step.inputs[:, self.index])
        return x if self.scalar is None else x * self.scalar

    def _added(self, residual: Tensor, x: Tensor) -> Tensor:
        scale = self.config.residual_scale
        return residual + (x if scale == 1.0 else x * scale)

    @property
    def attention_spec(self) -> AttentionSpec:
        """Its attention."""
        return NO_ATTENTION if self.mixer is None else self.mixer.spec

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """The parts of its weights, in a fixed order. `form`: the format of quantised weights."""
        names = self.config.layers[self.index].norms
        norms = {
            names.before_mixer: self.before_mixer,
            names.after_mixer: self.after_mixer,
            names.before_feed_forward: self.before_feed_forward,
            names.after_feed_forward: self.after_feed_forward,
        }
        for name, norm in norms.items():
            if name is not None and norm is not None:
                yield of_norm(self.config.layer_name(self.index, name), norm)
        if self.scalar is not None:
            name = self.config.layers[self.index].scalar
            yield plain(self.config.layer_name(self.index, str(name)), self.scalar)
        if self.input is not None:
            yield from self.input.places(form, shard)
        if self.mixer is not None:
            yield from self.mixer.places(form, shard)
        if self.feed_forward is not None:
            yield from self.feed_forward.places(form, shard)


def _norm_of(config: ModelConfig, build: Build) -> RmsNorm:
    """One over the hidden size."""
    features = {"plus_one": config.norm_plus_one, "centred": config.norm_centred}
    return RmsNorm(config.hidden_size, config.norm_eps, build, **features)


def _normed(x: Tensor, norm: RmsNorm | None) -> Tensor:
    if norm is None:
        return x
    out: Tensor = norm(x)
    return out


def finish_products(module: nn.Module, kernels: Kernels | None = None) -> None:
    """Makes the filled weights of all products of a module ready. See `Model.finish`."""
    for own in module.modules():
        if isinstance(own, Linear):
            own.method.finish(kernels)
        elif isinstance(own, ExpertWeights):
            own.finish()
    _put_at_hand(module)


def _put_at_hand(module: nn.Module) -> None:
    """Puts the parameters and modules of each module among its plain attributes, where Python finds
    them at once. PyTorch takes the host 0.7 us to find one, and a layer of experts asks for two
    dozen. A module or parameter that is set later takes the place of the one here. None does not,
    nor does `del` take it away: nobody may do that from then on."""
    for own in module.modules():
        own.__dict__.update(own._parameters)
        own.__dict__.update(own._modules)


class Model(nn.Module):
    """The decoder. Weights are uninitialised until the loader has filled them."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        precision: Precision | None = None,
        shard: Shard = ALL,
        collective: Collective | None = None,
        stages: Stages | None = None,
        dispatch: Dispatch = STAY,
    ) -> None:
        super().__init__()
        precision = precision or Precision(device, dtype)
        self.config = config
        """Config of the whole model, not of a rank's part."""
        self.shard = shard
        self.collective = collective or Alone()
        self.stages = stages or OneStage()
        self.dispatch = dispatch
        self.pairs = None if shard.experts is None else PairCount(device)
        """What this rank's experts compute; None: each rank has as much to do."""
        rows = config.vocab_size if shard.is_first else 0
        self.embedding = parameter((rows, config.hidden_size), dtype, device)
        """[vocab, H]. No rows in stages that do not embed."""
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.ropes = Ropes((each.rope for each in config.mixers), device)
        build = Build(dtype, device, precision, shard, self.collective, dispatch, self.pairs)
        self.inputs = None
        if config.layer_inputs is not None:
            self.inputs = Inputs(config, config.layer_inputs, build)
        own = filter(shard.has_layer, range(config.num_layers))
        self.layers = nn.ModuleList(Layer(config, index, build) for index in own)
        self.norm = _norm_of(config, build)
        self.head = self._head(dtype, device)

    def _head(self, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        """Memory of the head's rows, which a tied one shares with the embedding of its stage. No
        rows in other stages than the last."""
        rows = self.shard.vocab(self.config)
        if not self.shard.is_last:
            rows = Range(0, 0)
        elif self.shares_head and self.shard.count == 1:
            return self.embedding
        elif self.shares_head:
            return nn.Parameter(self.embedding[rows.slice], requires_grad=False)
        return parameter((rows.size, self.config.hidden_size), dtype, device)

    @property
    def shares_head(self) -> bool:
        """Whether the head is the embedding of the same stage."""
        return self.config.tie_embeddings and self.shard.is_first

    @property
    def attention_specs(self) -> Specs:
        """Attention of each layer of the model; those of other stages have none here."""
        layers = cast("list[Layer]", list(self.layers))
        own = {layer.index: layer.attention_spec for layer in layers}
        return tuple(own.get(index, NO_ATTENTION) for index in range(self.config.num_layers))

    @property
    def linears(self) -> list[Linear]:
        """All products of the layers, in the order in which a token meets them."""
        return [module for module in self.modules() if isinstance(module, Linear)]

    def finish(self, kernels: Kernels | None = None) -> None:
        """Makes the filled weights ready for products, one by one.

        On a CPU an embedding that is also the head is kept twice, because rows of a packed weight
        cannot be looked up.

        Args:
            kernels: products of the device; None: PyTorch's.
        """
        finish_products(self, kernels)
        if kernels is None and self.shard.is_last:
            self.head = pack(self.head)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: StepAttention,
        tapped: Tapped | None = None,
    ) -> Tensor:
        """[T] ids at [T] positions -> [T, H], after the last norm; in other stages than the last
        what is handed on.

        `attention.begin` must have been called for this step. `tapped` takes its layers' inputs.
        """
        x = self.entry(token_ids)
        inputs = None if self.inputs is None else self.inputs(token_ids, x)
        step = Step(self.ropes(positions, x.dtype), attention, {}, inputs)
        wanted = () if tapped is None else tapped.layers
        for index, layer in enumerate((*self.layers, None)):
            if tapped is not None and index in wanted:
                tapped.found[index] = x
            x = x if layer is None else layer(x, step)
        if not self.shard.is_last:
            self.stages.send(x)
            return x
        normed: Tensor = self.norm(x)
        return normed

    def entry(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, H]: what enters the first layer of the stage."""
        if self.shard.is_first:
            return self.embed(token_ids)
        return self.stages.receive(self._room(len(token_ids)))

    def pass_on(self) -> None:
        """Takes part in a step without tokens."""
        x = self._room(1)
        if not self.shard.is_first:
            x = self.stages.receive(x)
        if not self.shard.is_last:
            self.stages.send(x)

    def _room(self, rows: int) -> Tensor:
        return self.embedding.new_zeros(rows, self.config.hidden_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, H], scaled by a factor that is rounded to the model's dtype."""
        x = F.embedding(token_ids, self.embedding)
        return x if self._embedding_scale == 1.0 else x * self._embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, vocab] float32 on rank 0; elsewhere this rank's part."""
        return self.collective.gather(self._own_logits(hidden), self.config.vocab_size)

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[R, H] -> the best tokens and whether the logits are finite, as `best_of_parts`."""
        first_id = self.shard.vocab(self.config).start
        return best_of_parts(self._own_logits(hidden), first_id, self.collective)

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary."""
        return self.shaped(product(hidden, self.head).float())

    def shaped(self, logits: Tensor) -> Tensor:
        """What the head makes, scaled and capped where the model does. May overwrite them."""
        config = self.config
        if config.logits_scale != 1.0:
            logits *= config.logits_scale
        if (cap := config.logits_soft_cap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits
