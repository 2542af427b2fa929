"""The EAGLE-3 head (Li et al. 2025, arXiv 2503.01840, section 3).

At position i it reads the taps of token i and the embedding of token i + 1, and guesses token
i + 2. Its own output takes the place of the taps where the model has not been yet. With several
ranks the layer is divided as any layer is. What leads into it and the head of few tokens are whole
on each rank.

Shapes: T tokens of a step, H hidden size, N taps, V tokens that may be drafted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import GatedConfig
from engine.model.decoder import Model, finish_products
from engine.model.drafts.formats import BODY, HeadConfig
from engine.model.drafts.sharing import SharingHead
from engine.model.feed_forward import Gated
from engine.model.linear import Build, Linear, RmsNorm
from engine.model.mixers.attention import Attention
from engine.model.mixers.base import Step
from engine.model.mixers.config import AttentionConfig
from engine.model.mixers.rope import Ropes
from engine.model.places import Place, of_linear, of_norm, plain
from engine.model.precision.base import Kernels, WeightSlice, parameter
from engine.model.precision.packing import pack, product
from engine.model.region import Region
from engine.step.attention import Specs, StepAttention


class Eagle3(SharingHead):
    """A head over the model whose embedding, and perhaps head, it shares."""

    def __init__(
        self, config: HeadConfig, model: Model | None, build: Build, shares: set[str]
    ) -> None:
        """`model`: None where only the shapes are wanted. `shares`: which of `embed_tokens` and
        `lm_head` are the model's."""
        super().__init__(model)
        self.config = config
        self.taps, self.longest = config.taps, config.layer.max_position_embeddings
        layer, hidden = config.layer, config.layer.hidden_size
        own, forward = layer.layers[0].mixer, layer.layers[0].feed_forward
        assert isinstance(own, AttentionConfig)
        assert isinstance(forward, GatedConfig)
        self._shard = build.shard
        self._collective = build.collective
        whole = WeightSlice(f"{BODY}.fc", Region.whole(hidden, len(config.taps) * hidden))
        self.fc = Linear([whole], False, build)
        self.embedding: nn.Parameter | None = None
        if "embed_tokens" not in shares:
            shape = config.vocab_size, hidden
            self.embedding = parameter(shape, build.dtype, build.device)
        self.head: nn.Parameter | None = None
        if "lm_head" not in shares:
            self.head = parameter((layer.vocab_size, hidden), build.dtype, build.device)
        self.norms = nn.ModuleDict(
            {
                name: RmsNorm(hidden, layer.norm_eps, build)
                for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
            }
        )
        self.attention = Attention(layer, 0, own, build)
        self.feed_forward = Gated(layer, 0, forward, build)
        self.ropes = Ropes([own.rope], build.device)
        self.drafted: Tensor | None = None
        """[V] int64: tokens of the model, by those of the head; None: they are the same."""

    @property
    def specs(self) -> Specs:
        """Attention of its layer."""
        return (self.attention.spec,)

    def places(self) -> Iterator[Place]:
        """The parts of its weights, in a fixed order."""
        layer = self.config.layer
        if self.embedding is not None:
            yield plain(f"{BODY}.embed_tokens.weight", self.embedding)
        yield of_norm(f"{BODY}.norm", self.norm_of("norm"))
        if self.head is not None:
            yield plain(f"{BODY}.lm_head.weight", self.head)
        yield from of_linear(self.fc, None, self._shard)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            yield of_norm(layer.layer_name(0, name), self.norm_of(name))
        yield from self.attention.places(None, self._shard)
        yield from self.feed_forward.places(None, self._shard)

    def finish(self, kernels: Kernels | None = None) -> None:
        """See `DraftHead`."""
        finish_products(self, kernels)
        if self.head is not None and kernels is None:
            self.head = pack(self.head)

    def features(self, tapped: Tensor) -> Tensor:
        """Taps [T, N * H] -> [T, H]. What is no number becomes one, since K and V are kept."""
        made: Tensor = self.fc(tapped)
        return made.nan_to_num()

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, attention: StepAttention
    ) -> Tensor:
        """What is made of `features` [T, H] at [T] positions and the [T] ids behind them: [T, H],
        features of the positions behind. `attention.begin` must have been called."""
        embedded = self.norm_of("input_layernorm")(self.embed(token_ids))
        normed = self.norm_of("hidden_norm")(features)
        residual = normed if self.config.norm_before_residual else features
        step = Step(self.ropes(positions, features.dtype), attention, {})
        x = residual + self.attention(torch.cat((embedded, normed), dim=-1), step)
        x = x + self.feed_forward(self.norm_of("post_attention_layernorm")(x))
        found: Tensor = x.nan_to_num()
        return found

    def best(self, hidden: Tensor) -> Tensor:
        """[R, H], as `forward` gives it -> [R] int64, the likeliest tokens, equal on all ranks."""
        normed = self.norm_of("norm")(hidden)
        if self.head is None:
            ids = self._target.best(normed)[0]
        else:
            ids = product(normed, self.head).argmax(-1)
            ids = ids if self.drafted is None else self.drafted[ids]
        self._collective.broadcast(ids)
        return ids

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, H]."""
        if self.embedding is None:
            return self._target.embed(token_ids)
        return F.embedding(token_ids, self.embedding)
