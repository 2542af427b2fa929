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
from engine.cuda.joining import Join, Joined, Reads, entered, joined, joiner
from engine.cuda.mixers.attention import RopeTables
from engine.cuda.mixers.base import FusedMixer, RowEnds, StepTokens
from engine.cuda.mixers.kinds import fused
from engine.cuda.products import CudaProducts
from engine.hooks.attention import Attend
from engine.model import Model
from engine.model.decoder import Input, Layer
from engine.model.experts.beside import Beside
from engine.model.experts.layer import Experts
from engine.model.feed_forward import Gated, Mlp
from engine.model.linear import RmsNorm
from engine.model.mixers.base import Mixer
from engine.model.precision.rounding import Rounded
from engine.pool.pools import KvPools
from engine.step.collective import Collective
from engine.step.dispatch import STAY

Behind = Gated | Mlp | Experts | Beside | Input
"""What may stand in a layer beside its mixer."""


class Sublayer(NamedTuple):
    """A mixer, or what stands behind it, with its norms."""

    layer: int
    before: RmsNorm | None
    reads: Reads
    """How it takes its input."""
    run: FusedMixer | Behind
    after: RmsNorm | None
    scalar: Tensor | None = None
    """A factor on the residual behind it."""
    again: bool = False
    """It reads what the part before it reads."""

    @property
    def rounds_one(self) -> bool:
        """Whether it rounds a single row itself."""
        return isinstance(self.run, Experts)

    def factor_of(self, model: float) -> float:
        """The factor on its output. `model`: on those of mixers and feed-forwards."""
        return 1.0 if isinstance(self.run, Input) else model

    @property
    def is_whole(self) -> bool:
        """Whether its output is no rank's part, but the sum."""
        return isinstance(self.run, Beside | Input)


class FusedLayers:
    """Layers one after the other, and the norm behind them. Its methods queue kernels."""

    def __init__(
        self,
        parts: Sequence[Sublayer],
        norm: RmsNorm | None,
        factor: float,
        collective: Collective,
        taps: Sequence[int] = (),
    ) -> None:
        """`norm`: None in other stages than the last. `factor`: on what mixers and feed-forwards
        give. `taps`: the parts before which the residual is wanted; the number of parts: what the
        last one gives."""
        by_all = joiner(collective)
        self._entry = Join(None, parts[0].before, parts[0].reads, 1.0)
        readers = [*((part.before, part.reads, part.again, part.rounds_one) for part in parts[1:])]
        readers.append((norm, _plain, False, False))
        self._parts: list[tuple[Sublayer, Join, Joined]] = [
            (
                part,
                Join(part.after, before, reads, part.factor_of(factor), part.scalar, *rest),
                joined if part.is_whole else by_all,
            )
            for part, (before, reads, *rest) in zip(parts, readers, strict=True)
        ]
        keepers = [
            at
            for at, part in enumerate(parts)
            if not isinstance(part.run, Behind) and part.run.keeps
        ]
        self._last_keeper = parts[keepers[-1]].run
        self._taps = tuple(taps)
        self._taps_all = any(at > keepers[-1] for at in taps)
        """Taps are read where otherwise only the last tokens of rows are left."""

    def entered(self, residual: Tensor) -> Tensor | Rounded:
        """What the first part reads, of what enters it."""
        return entered(residual, self._entry)

    def run(
        self,
        residual: Tensor,
        x: Tensor | Rounded,
        step: StepTokens,
        ends: RowEnds | None = None,
        tapped: Tensor | None = None,
        *,
        is_whole: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Runs all parts on [T, H], which is overwritten, and on what the first part reads of it.
        Returns what comes behind the last norm, and the residual there, [T, H] each.

        With `ends` they are [S, H] of those tokens only. Of the last mixer that keeps anything of
        the other tokens only that is read later, so the rest of their work is left out. Not so
        with `is_whole`: every layer computes all tokens. `tapped` takes the taps.
        """
        is_whole |= tapped is not None and self._taps_all
        out: Tensor | Parts
        for at, (part, join, add) in enumerate(self._parts):
            own = part.run
            self._tap(at, residual, tapped)
            if isinstance(own, Input):
                assert step.inputs is not None, "the model has them"
                out = feed_forward.layer_input(own, x, step.inputs[:, part.layer])
            elif isinstance(own, Behind):
                out = feed_forward.run(own, x)
            elif ends is None or is_whole or (own.keeps and own is not self._last_keeper):
                out = own.run(x, step)
            elif len(ends.tokens) == 0:
                own.store(x, step)
                return residual[:0], residual[:0]
            else:
                out = own.run_ends(x, step, ends)
                if own is self._last_keeper:
                    step, residual = step.ends(ends), residual.index_select(0, ends.tokens)
                    if join.keeps and isinstance(x, Tensor):
                        x = x.index_select(0, ends.tokens)
            after = add(residual, out, join)
            x = x if join.keeps else after
        assert isinstance(x, Tensor)
        self._tap(len(self._parts), residual, tapped)
        x = x if ends is None or not is_whole else x.index_select(0, ends.tokens)
        return x, residual

    def _tap(self, at: int, residual: Tensor, tapped: Tensor | None) -> None:
        """Keeps what enters the part there, if it is wanted."""
        if tapped is None or at not in self._taps:
            return
        size = residual.shape[1]
        for column, wanted in enumerate(self._taps):
            if wanted == at:
                tapped[:, column * size : (column + 1) * size].copy_(residual)


class FusedForward:
    """Runs a loaded model over a pool. It makes the model's weights ready for products."""

    def __init__(
        self,
        model: Model,
        pools: KvPools,
        attention: PagedGroups,
        max_context_tokens: int,
        taps: Sequence[int] = (),
    ) -> None:
        """`taps`: layers whose inputs are wanted; the number of layers: what the last one gives."""
        self._products = CudaProducts()
        model.finish(self._products)
        self._model = model
        self._is_whole = model.dispatch is not STAY
        """Others wait for all tokens at each layer of experts."""
        self._attention = attention
        ropes = RopeTables(model.ropes, model.embedding, max_context_tokens)
        layers = cast("list[Layer]", list(model.layers))
        fuse = partial(fused, pools=pools, attention=attention, ropes=ropes)
        parts = [part for layer in layers for part in sublayers_of(layer, fuse)]
        tapped = [
            sum(part.layer < layer for part in parts) if layer < len(layers) else len(parts)
            for layer in taps
        ]
        factor = model.config.residual_scale
        norm = model.norm if model.shard.is_last else None
        self._layers = FusedLayers(parts, norm, factor, model.collective, tapped)

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        stores: Sequence[Tensor],
        ends: RowEnds | None = None,
        hooked: Attend | None = None,
        tapped: Tensor | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """[T] int32 ids at [T] positions, stored at [T] places of each group's pool -> [T, H].

        With `ends` the result is [S, H] of those tokens only (`FusedLayers.run`). With `hooked`,
        hooks are around attention, and every layer computes all tokens. Else the attention backend
        must have been prepared for this step. `tapped` takes the taps.

        Of several stages, `states` are [T, H] that the stage before has made; in the first one they
        are overwritten by the embedding. Other stages than the last change them to what is handed
        on, of all tokens, and return them.
        """
        if not self._model.shard.is_last:
            ends = None
        residual = self._entered(token_ids, states)
        inputs = self._model.inputs
        step = StepTokens(
            positions,
            stores,
            hooked or self._attention.attend,
            {},
            None if inputs is None else inputs(token_ids, residual),
        )
        x = self._layers.entered(residual)
        is_whole = self._is_whole or hooked is not None
        return self._layers.run(residual, x, step, ends, tapped, is_whole=is_whole)[0]

    def _entered(self, token_ids: Tensor, states: Tensor | None) -> Tensor:
        """[T, H]: what enters the first layer here, which may be overwritten."""
        if states is None:
            return self._model.embed(token_ids)
        if self._model.shard.is_first:
            states.copy_(self._model.embed(token_ids))
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, vocab], in the model's dtype."""
        return self._model.shaped(self._products.linear(hidden, self._model.head, None))


def _plain() -> None:
    """See `Reads`."""


def sublayers_of(layer: Layer, fuse: Callable[[Mixer], FusedMixer]) -> Iterator[Sublayer]:
    """The parts of a layer, in order. `fuse`: the fused form of its mixer."""
    found: list[Sublayer] = []
    own, is_parallel = layer.feed_forward, layer.parallel and layer.mixer is not None
    if layer.mixer is not None:
        mixer = fuse(layer.mixer)
        # Two that read the same round it for themselves.
        reads: Reads = _plain if is_parallel else lambda: mixer.reader
        found.append(Sublayer(layer.index, layer.before_mixer, reads, mixer, layer.after_mixer))
    if own is not None:
        before, reads = layer.before_feed_forward, partial(feed_forward.reader_of, own)
        if is_parallel:
            before, reads = None, _plain
        after = layer.after_feed_forward
        found.append(Sublayer(layer.index, before, reads, own, after, again=is_parallel))
    if (given := layer.input) is not None:
        found.append(Sublayer(layer.index, None, lambda: given.gate.reads, given, given.norm))
    if found and layer.scalar is not None:
        found[-1] = found[-1]._replace(scalar=layer.scalar)
    yield from found
