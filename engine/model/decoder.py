"""The decoder of all families. It knows features (`engine.model.config`), and no names.

The three projections of attention are one weight, and so are gate and up, for one product each.

One of several ranks holds its part of the weights (`engine.model.shard`). Behind output and down
the ranks add up.

Shapes: T tokens of a step, H hidden size, Hq query heads, Hkv KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.best import best_of_parts
from engine.model.config import ModelConfig, Rope
from engine.model.experts.weights import ExpertWeights
from engine.model.feed_forward import feed_forward
from engine.model.head_norms import QK_NORMS, HeadNorm, WholeNorm
from engine.model.linear import Build, Linear, RmsNorm
from engine.model.places import Place, of_linear, of_norm, plain
from engine.model.precision.base import Format, Kernels, parameter
from engine.model.precision.choice import Precision
from engine.model.precision.packing import pack, product
from engine.model.shard import Shard
from engine.step.attention import AttentionBackend, AttentionSpec, Specs
from engine.step.collective import Alone, Collective

ALL = Shard()
"""The whole model."""


Rotation = tuple[Tensor, Tensor]
"""Cos and sin of the T tokens of a step, [T, 1, R] each."""
Rotations = Mapping[Rope | None, Rotation]
"""By the ropes of the layers."""
BLOCK = 1 << 14
"""Positions of a table that are computed at once. Their angles are float32, in a few copies."""


class Ropes(nn.Module):
    """The rotations of all layers, with the halves in the layout of Hugging Face."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        found = dict.fromkeys(layer.rope for layer in config.layers)
        self.frequencies = {
            rope: torch.tensor(rope.frequencies, device=device) for rope in found if rope
        }

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotations:
        """At [T] positions."""
        return {rope: self.rotation(rope, positions, dtype) for rope in self.frequencies}

    def rotation(self, rope: Rope, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """That of one rope."""
        angles = positions.float()[:, None] * self.frequencies[rope]
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * rope.scale).to(dtype), (angles.sin() * rope.scale).to(dtype)

    def fill(self, rope: Rope, table: Tensor) -> None:
        """Writes cos and sin of the pairs at the first positions into [positions, 2, R / 2]."""
        for start in range(0, len(table), BLOCK):
            block = table[start : start + BLOCK]
            positions = torch.arange(start, start + len(block), device=table.device)
            for row, found in enumerate(self.rotation(rope, positions, table.dtype)):
                block[:, row] = found[:, 0, : len(rope.frequencies)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R numbers of each head of [T, heads, D]; cos and sin are [T, 1, R]."""
    if (size := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    """Attention and a feed-forward, each with a residual around it and norms where the model has
    them."""

    def __init__(self, config: ModelConfig, index: int, build: Build) -> None:
        super().__init__()
        self.index = index
        self.config = config
        self.own = config.layers[index]
        """The features of this layer."""
        self.head_dim = config.head_dim
        shard = build.shard
        heads, kv_heads = shard.heads(config).size, shard.kv_heads(config).size
        self.heads = (heads, kv_heads, kv_heads)
        self._collective = build.collective
        self._add_norms(build)
        parts = shard.attention_parts(config, index)
        self.qkv = Linear(parts.qkv, config.qkv_bias, build)
        self.output = Linear(parts.output, config.output_bias, build)
        self.sinks = parameter((heads,), build.dtype, build.device) if self.own.sinks else None
        self.feed_forward = feed_forward(config, index, build)

    def _add_norms(self, build: Build) -> None:
        config = self.config

        def norm(name: str | None, size: int = config.hidden_size) -> RmsNorm | None:
            if name is None:
                return None
            return RmsNorm(size, config.norm_eps, build, plus_one=config.norm_plus_one)

        self.before_attention = norm(config.norms.before_attention)
        self.after_attention = norm(config.norms.after_attention)
        self.before_feed_forward = norm(config.norms.before_feed_forward)
        self.after_feed_forward = norm(config.norms.after_feed_forward)
        self.qk_norm: HeadNorm | WholeNorm | None = None
        if config.qk_norm is not None:
            self.qk_norm = QK_NORMS[config.qk_norm](config, build)

    def forward(self, x: Tensor, rotations: Rotations, attention: AttentionBackend) -> Tensor:
        """[T, H] -> [T, H]."""
        out = self._attend(
            _normed(x, self.before_attention), rotations.get(self.own.rope), attention
        )
        x = self._added(x, _normed(out, self.after_attention))
        out = self.feed_forward(_normed(x, self.before_feed_forward))
        return self._added(x, _normed(out, self.after_feed_forward))

    def _added(self, residual: Tensor, x: Tensor) -> Tensor:
        scale = self.config.residual_scale
        return residual + (x if scale == 1.0 else x * scale)

    def _attend(self, x: Tensor, rotation: Rotation | None, attention: AttentionBackend) -> Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        q, k, v = heads.split(self.heads, dim=1)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        return self._collective.all_reduce(self.output(attention(self.index, q, k, v).flatten(1)))

    @property
    def attention_spec(self) -> AttentionSpec:
        """Its attention."""
        own = self.own
        return AttentionSpec(own.scale, own.window, own.soft_cap, self.sinks)

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """The parts of its weights, in a fixed order. `form`: the format of quantised weights."""
        names = self.config.norms
        norms = {
            names.before_attention: self.before_attention,
            names.after_attention: self.after_attention,
            names.before_feed_forward: self.before_feed_forward,
            names.after_feed_forward: self.after_feed_forward,
        }
        for name, norm in norms.items():
            if name is not None and norm is not None:
                yield of_norm(self.config.layer_name(self.index, name), norm)
        attention = self.config.layer_name(self.index, "self_attn")
        if self.qk_norm is not None:
            yield from self.qk_norm.places(attention)
        if self.sinks is not None:
            heads = shard.heads(self.config)
            yield plain(f"{attention}.sinks", self.sinks, heads, whole=self.config.num_heads)
        yield from of_linear(self.qkv, form, shard)
        yield from of_linear(self.output, form, shard)
        yield from self.feed_forward.places(form, shard)


def _normed(x: Tensor, norm: RmsNorm | None) -> Tensor:
    if norm is None:
        return x
    out: Tensor = norm(x)
    return out


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
    ) -> None:
        super().__init__()
        precision = precision or Precision(device, dtype)
        self.config = config
        """Of the whole model."""
        self.shard = shard
        self.collective = collective or Alone()
        hidden = config.hidden_size
        self.embedding = parameter((config.vocab_size, hidden), dtype, device)
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.ropes = Ropes(config, device)
        build = Build(dtype, device, precision, shard, self.collective)
        layers = [Layer(config, index, build) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RmsNorm(hidden, config.norm_eps, build, plus_one=config.norm_plus_one)
        self.head = self._head(dtype, device)

    def _head(self, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        """Memory of the head's rows, which a tied one shares with the embedding."""
        rows = self.shard.vocab(self.config)
        if not self.config.tie_embeddings:
            return parameter((rows.size, self.config.hidden_size), dtype, device)
        if self.shard.count == 1:
            return self.embedding
        return nn.Parameter(self.embedding[rows.slice], requires_grad=False)

    @property
    def attention_specs(self) -> Specs:
        """Attention of each layer."""
        layers = cast("list[Layer]", list(self.layers))
        return tuple(layer.attention_spec for layer in layers)

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
        for linear in self.linears:
            linear.method.finish(kernels)
        for module in self.modules():
            if isinstance(module, ExpertWeights):
                module.finish()
        if kernels is None:
            self.head = pack(self.head)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """[T] ids at [T] positions -> [T, H], after the last norm.

        `attention.begin` must have been called for this step.
        """
        x = self.embed(token_ids)
        rotations = self.ropes(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rotations, attention)
        normed: Tensor = self.norm(x)
        return normed

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
        """Those of this rank's part of the vocabulary."""
        return self.shaped(product(hidden, self.head).float())

    def shaped(self, logits: Tensor) -> Tensor:
        """What the head makes, scaled and capped where the model does. May overwrite them."""
        config = self.config
        if config.logits_scale != 1.0:
            logits *= config.logits_scale
        if (cap := config.logits_soft_cap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits
