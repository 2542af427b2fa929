"""The layers of draft heads with fused kernels: what leads into them, and how they draft.

Shapes: T tokens, H hidden size, N taps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.grouped import PagedGroups
from engine.attention.paged import PagedAttention
from engine.cuda import feed_forward, kernels
from engine.cuda.forward import FusedLayers, Sublayer, sublayers_of
from engine.cuda.mixers.attention import RopeTables
from engine.cuda.mixers.base import FusedMixer
from engine.cuda.mixers.kinds import fused
from engine.cuda.products import CudaProducts
from engine.cuda.ranks.vocabulary import Vocabulary, vocabulary_of, vocabulary_of_model
from engine.cuda.speculation.head_kernels import enter
from engine.model.decoder import Model
from engine.model.drafts.eagle3 import Eagle3
from engine.model.drafts.mtp import Mtp
from engine.model.feed_forward import Gated
from engine.model.mixers.base import Mixer
from engine.model.precision.rounding import Rounded
from engine.pool.kv_pool import KvPool
from engine.pool.pools import one_group


class HeadParts(NamedTuple):
    """What a head on a GPU is made of."""

    module: Eagle3 | Mtp
    pool: KvPool
    """The pool of what it keeps."""
    attention: PagedAttention
    """Over it."""
    model: Model
    """The model that it drafts for."""


class Entered(NamedTuple):
    """What a layer begins with."""

    residual: Tensor
    """[T, H]"""
    x: Tensor | Rounded
    """What its mixer reads."""


class Drafted(NamedTuple):
    """The tokens that a head may draft."""

    head: Tensor
    """[V, H], this rank's rows."""
    vocabulary: Vocabulary
    total: int
    """Tokens of all ranks."""
    tokens: Tensor | None = None
    """[total] int64, tokens of the model by those; None: they are the same."""


class DraftLayer(Protocol):
    """A head's layer. Its methods queue kernels."""

    width: int
    """Numbers of a token's taps."""
    layers: FusedLayers
    groups: PagedGroups
    """Attention of the only layer."""
    drafted: Drafted

    def features(self, tapped: Tensor) -> Tensor:
        """Taps [T, N * H] -> [T, H]."""
        ...

    def entered(self, ids: Tensor, features: Tensor) -> Entered:
        """What is made of [T] ids and [T, H] features of the tokens before. May overwrite
        `features`."""
        ...


def draft_layer(parts: HeadParts, max_tokens: int) -> DraftLayer:
    """A head's layer, for contexts of so many tokens. Makes its weights ready for products."""
    parts.module.finish(CudaProducts())
    if isinstance(parts.module, Eagle3):
        return _Eagle3Layer(parts, parts.module, max_tokens)
    return _MtpLayer(parts, parts.module, max_tokens)


class _Eagle3Layer:
    """See `engine.model.drafts.eagle3`."""

    def __init__(self, parts: HeadParts, module: Eagle3, max_tokens: int) -> None:
        self._module, config = module, module.config
        self.width = len(module.taps) * config.layer.hidden_size
        self.groups, fuse = _fuse(parts, 0, max_tokens)
        mixer, own = fuse(module.attention), module.feed_forward
        assert isinstance(own, Gated)
        before = module.norm_of("post_attention_layernorm")
        sublayers = (
            Sublayer(0, None, lambda: mixer.reader, mixer, None),
            Sublayer(0, before, partial(feed_forward.reader_of, own), own, None),
        )
        norm, ranks = module.norm_of("norm"), parts.model.collective
        self.layers = FusedLayers(sublayers, norm, 1.0, ranks)
        if module.head is None:
            self.drafted = _of_model(parts.model)
        else:
            own_rows = parts.model.shard.vocab(config.layer)
            size = config.layer.vocab_size
            vocabulary = vocabulary_of(ranks, own_rows.start, size)
            self.drafted = Drafted(module.head[own_rows.slice], vocabulary, size, module.drafted)

    def features(self, tapped: Tensor) -> Tensor:
        """See `DraftLayer`."""
        made: Tensor = self._module.fc(tapped)
        return made

    def entered(self, ids: Tensor, features: Tensor) -> Entered:
        """See `DraftLayer`. The mixer reads [T, 2 H]."""
        module = self._module
        token, feature = module.norm_of("input_layernorm"), module.norm_of("hidden_norm")
        gains, normed = (token.weight, feature.weight), module.config.norm_before_residual
        x = enter(module.embed(ids), features, gains, token.eps, normed=normed)
        return Entered(features, x)


class _MtpLayer:
    """See `engine.model.drafts.mtp`."""

    def __init__(self, parts: HeadParts, module: Mtp, max_tokens: int) -> None:
        self._module, self._model, config = module, parts.model, parts.model.config
        self.width = config.hidden_size
        self.groups, fuse = _fuse(parts, module.index, max_tokens)
        norm = module.norm_of("norm")
        sublayers = tuple(sublayers_of(module.layer, fuse))
        self.layers = FusedLayers(sublayers, norm, config.residual_scale, self._model.collective)
        self.drafted = _of_model(self._model)

    def features(self, tapped: Tensor) -> Tensor:
        """See `DraftLayer`."""
        norm = self._model.norm
        return kernels.rms_norm(tapped, norm.weight, norm.eps)

    def entered(self, ids: Tensor, features: Tensor) -> Entered:
        """See `DraftLayer`."""
        token, feature = self._module.norm_of("enorm"), self._module.norm_of("hnorm")
        gains, joined = (token.weight, feature.weight), self._module.joined
        both = enter(self._model.embed(ids), features, gains, token.eps, normed=False)
        residual: Tensor = joined(feed_forward.as_read(both, joined.reads))
        return Entered(residual, self.layers.entered(residual))


def _of_model(model: Model) -> Drafted:
    """All tokens of the model, by its own head."""
    return Drafted(model.head, vocabulary_of_model(model), model.config.vocab_size)


def _fuse(
    parts: HeadParts, layer: int, max_tokens: int
) -> tuple[PagedGroups, Callable[[Mixer], FusedMixer]]:
    """Attention of a head whose only layer has this number, and what fuses its mixer."""
    pools = one_group(parts.pool, layer)
    groups = PagedGroups([parts.attention], pools.places)
    like = torch.empty(0, dtype=parts.model.embedding.dtype, device=parts.pool.device)
    ropes = RopeTables(parts.module.ropes, like, max_tokens)
    return groups, partial(fused, pools=pools, attention=groups, ropes=ropes)
