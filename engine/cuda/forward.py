"""The forward pass with fused kernels, over the weights of `engine.model.decoder`.

The next norm adds a part's output to the residual, so every value goes through memory once between
two products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

from torch import Tensor

from engine.attention.grouped import PagedGroups
from engine.cuda import feed_forward
from engine.cuda.experts.summing import Parts
from engine.cuda.joining import Join, entered, joiner
from engine.cuda.mixers.attention import RopeTables
from engine.cuda.mixers.base import FusedMixer, RowEnds, StepTokens
from engine.cuda.mixers.kinds import fused
from engine.cuda.products import CudaProducts
from engine.hooks.attention import Attend
from engine.model import Model
from engine.model.decoder import Layer
from engine.model.experts.beside import Beside
from engine.model.experts.layer import Experts
from engine.model.feed_forward import Gated
from engine.model.linear import RmsNorm
from engine.model.mixers.base import Mixer
from engine.model.precision.rounding import Rounding
from engine.pool.pools import KvPools


class _Part(NamedTuple):
    """A mixer or a feed-forward, with its norms."""

    before: RmsNorm | None
    reader: Rounding | None
    """How it takes its input."""
    run: FusedMixer | Gated | Experts
    after: RmsNorm | None


class FusedForward:
    """Runs a loaded model over a pool. It makes the model's weights ready for products."""

    def __init__(
        self, model: Model, pools: KvPools, attention: PagedGroups, max_context_tokens: int
    ) -> None:
        self._products = CudaProducts()
        model.finish(self._products)
        self._model = model
        self._attention = attention
        self._joined = joiner(model.collective)
        ropes = RopeTables(model, max_context_tokens)
        layers = cast("list[Layer]", list(model.layers))
        fuse = partial(fused, pools=pools, attention=attention, ropes=ropes)
        parts = [part for layer in layers for part in _parts_of(layer, fuse)]
        self._entry = Join(None, parts[0].before, parts[0].reader, 1.0)
        factor = model.config.residual_scale
        readers = [*((part.before, part.reader) for part in parts[1:]), (model.norm, None)]
        self._parts = [
            (part, Join(part.after, *reader, factor))
            for part, reader in zip(parts, readers, strict=True)
        ]
        self._last_mixer = [
            part.run for part in parts if not isinstance(part.run, Gated | Experts)
        ][-1]

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        stores: Sequence[Tensor],
        ends: RowEnds | None = None,
        hooked: Attend | None = None,
    ) -> Tensor:
        """[T] int32 ids at [T] positions, stored at [T] places of each group's pool -> [T, H].

        With `ends` the result is [S, H] of those tokens only. In the last mixer only what it keeps
        of the other tokens is read later, so the rest of their work is left out.
        With `hooked`, hooks are around attention, and every layer computes all tokens. Else the
        attention backend must have been prepared for this step.
        """
        step = StepTokens(positions, stores, hooked or self._attention.attend)
        residual = self._model.embed(token_ids)
        x = entered(residual, self._entry)
        out: Tensor | Parts
        for part, join in self._parts:
            own = part.run
            if isinstance(own, Gated | Experts):
                out = feed_forward.run(own, x)
            elif ends is None or hooked is not None or own is not self._last_mixer:
                out = own.run(x, step)
            elif len(ends.tokens) == 0:
                own.store(x, step)
                return residual[:0]
            else:
                out = own.run_ends(x, step, ends)
                residual = residual.index_select(0, ends.tokens)
            x = self._joined(residual, out, join)
        assert isinstance(x, Tensor)
        return x if ends is None or hooked is None else x.index_select(0, ends.tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, vocab], in the model's dtype."""
        return self._model.shaped(self._products.linear(hidden, self._model.head, None))


def _parts_of(layer: Layer, fuse: Callable[[Mixer], FusedMixer]) -> Iterator[_Part]:
    if layer.mixer is not None:
        mixer = fuse(layer.mixer)
        yield _Part(layer.before_mixer, mixer.reader, mixer, layer.after_mixer)
    if (own := layer.feed_forward) is not None:
        assert not isinstance(own, Beside), "see `engine.cuda.features`"
        reader = feed_forward.reader_of(own)
        yield _Part(layer.before_feed_forward, reader, own, layer.after_feed_forward)
