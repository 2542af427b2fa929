"""Which numbers of ranks can share a model, and which layers each stage has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from torch import Tensor, nn

from engine.bounds import MOST_RANKS
from engine.model.config import (
    BesideConfig,
    ExpertsConfig,
    FeedForwardConfig,
    GatedConfig,
    MlpConfig,
    ModelConfig,
    UnsupportedModelError,
)
from engine.model.decoder import Model
from engine.model.experts.config import Held
from engine.model.mixers.config import AttentionConfig
from engine.model.mixers.kinds import parts_of
from engine.model.precision.base import WeightSlice
from engine.model.precision.choice import Precision
from engine.model.region import Range
from engine.model.shard import Shard


def check_ranks(config: ModelConfig, precision: Precision, shard: Shard) -> None:
    """Refuses a number of ranks that the model cannot be divided among.

    Args:
        config: the model's.
        precision: of its weights.
        shard: a part of it, whose layers need not be known.

    Raises:
        UnsupportedModelError: it says why, and which numbers work.
    """
    if shard.experts is not None and not any(mixtures(config)):
        raise UnsupportedModelError(
            f"{_name(shard)} is for models with experts, and this one has none: leave it out"
        )
    if obstacle := _obstacle(config, precision, shard):
        fit = [
            n
            for n in range(1, MOST_RANKS + 1)
            if not _obstacle(config, precision, _among(n, shard))
        ]
        count = f"tp {shard.count}"
        if shard.experts is not None:
            count = f"{_name(shard)} with {shard.experts.ranks} ranks"
        raise UnsupportedModelError(
            f"{count} does not fit this model: {obstacle}; these fit: {', '.join(map(str, fit))}"
        )


def _name(shard: Shard) -> str:
    """The setting that divides experts whole."""
    return "expert_parallel" if shard.count > 1 else "expert_group"


def _among(count: int, shard: Shard) -> Shard:
    """The first of so many ranks, which hold experts as those of `shard` do."""
    if shard.experts is None:
        return Shard(0, count)
    return Shard(0, count if shard.count > 1 else 1, experts=Held(0, count))


def _feed_forwards(config: ModelConfig) -> Iterator[GatedConfig | MlpConfig | ExpertsConfig]:
    """What the feed-forwards of all layers are made of."""
    for own in dict.fromkeys(layer.feed_forward for layer in config.layers):
        yield from _parts_of(own)


def mixtures(config: ModelConfig) -> Iterator[ExpertsConfig]:
    """The kinds of layers with experts that a model has."""
    yield from (part for part in _feed_forwards(config) if isinstance(part, ExpertsConfig))


def _obstacle(config: ModelConfig, precision: Precision, shard: Shard) -> str:
    """Why such ranks cannot hold the model; empty: they can."""
    count = shard.count
    if shard.experts is not None:
        for own in mixtures(config):
            if own.routing.experts % shard.experts.ranks:
                return f"it does not divide {own.routing.experts} experts"
    if count == 1:
        return ""
    for mixer in dict.fromkeys(config.mixers):
        if obstacle := mixer.obstacle(count):
            return obstacle
    for middle in _widths(config, shard):
        if middle % count:
            return f"it does not divide the feed-forward width {middle}"
    if count * count > config.vocab_size:
        return f"the vocabulary has {config.vocab_size} tokens only"
    # Other ranks' parts begin at multiples of the first one's.
    for part in _parts(config, _among(count, shard)):
        if cut := _cut(part, precision):
            return cut
    return ""


def staged(model: Model, shard: Shard, asked: Sequence[int] = ()) -> Shard:
    """A stage's part of a model, with the range of its layers.

    Stages get about equally many bytes: the first one with the embedding, the last one with the
    head. Both have fewer layers for that.

    Args:
        model: all layers of the part, without memory.
        shard: the part, of one of several stages.
        asked: layers of each stage; empty: as said above.

    Raises:
        UnsupportedModelError: the model cannot be divided so.
    """
    config, count = model.config, model.config.num_layers
    if shard.stages > count:
        raise _no_stages(shard, f"it has {count} layers")
    if asked and (len(asked), sum(asked), min(asked) > 0) != (shard.stages, count, True):
        given = ",".join(map(str, asked))
        raise UnsupportedModelError(
            f"pp_layers {given} must be {shard.stages} numbers above 0, one for each stage, whose"
            f" sum is {count}, the layers of this model"
        )
    if config.layer_inputs is not None:
        raise _no_stages(shard, "each of its layers reads the tokens themselves")
    if any(kept.state for kept in config.keepers.values()):
        why = "some layers keep states, and a stage could not tell that it has found a wrong one"
        raise _no_stages(shard, why)
    ends = list(accumulate(asked)) if asked else _stage_ends(model, shard.stages)
    for index, layer in enumerate(config.layers):
        lender = layer.mixer.kv_from if isinstance(layer.mixer, AttentionConfig) else None
        if lender is not None and any(lender < end <= index for end in ends):
            raise _no_stages(
                shard, f"layer {index} reads K and V of layer {lender}, of another one"
            )
    first = [0, *ends][shard.stage]
    return replace(shard, layers=Range(first, ends[shard.stage]))


def banded(model: Model, shard: Shard) -> Shard:
    """A part of a model, with the bands of its pages. `model`: all layers, without memory.

    Raises:
        UnsupportedModelError: the model has too few layers.
    """
    if shard.bands > (count := model.config.num_layers):
        raise UnsupportedModelError(
            f"kv_bands {shard.bands} does not fit this model: it has {count} layers"
        )
    return replace(shard, band_ends=tuple(_stage_ends(model, shard.bands)))


def _stage_ends(model: Model, stages: int) -> list[int]:
    """Where the layers of each stage end, if nobody says so."""
    sizes = [_bytes(layer) for layer in model.layers]
    sizes[0] += _bytes_of(model.embedding)
    sizes[-1] += _bytes_of(model.embedding if model.shares_head else model.head)
    return _even_ends(sizes, stages)


def _no_stages(shard: Shard, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"pp {shard.stages} does not fit this model: {why}")


def _bytes(module: nn.Module) -> int:
    return sum(map(_bytes_of, (*module.parameters(), *module.buffers())))


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _even_ends(sizes: Sequence[int], parts: int) -> list[int]:
    """Where each of so many runs of neighbours ends, so that the largest run is as small as it can
    be, and none is empty."""
    before = [0, *accumulate(sizes)]

    @cache
    def best(end: int, runs: int) -> tuple[int, tuple[int, ...]]:
        """The largest of so many runs of the first `end`, and where they end."""
        if runs == 1:
            return before[end], (end,)
        found = []
        for start in range(runs - 1, end):
            largest, ends = best(start, runs - 1)
            found.append((max(largest, before[end] - before[start]), (*ends, end)))
        return min(found)

    return list(best(len(sizes), parts)[1])


def _widths(config: ModelConfig, shard: Shard) -> Iterator[int]:
    """Widths of all feed-forwards that are cut."""
    for part in _feed_forwards(config):
        if shard.experts is None or not isinstance(part, ExpertsConfig):
            yield part.width


def _cut(part: WeightSlice, precision: Precision) -> str:
    """What of a quantised weight a boundary of this part would cut; empty: nothing."""
    region = part.region
    limits = zip((region.rows, region.columns), region.shape, precision.units(part), strict=True)
    for own, size, unit in limits:
        if own.start % unit or (own.end % unit and own.end != size):
            return f"it cuts {part.module}, which cannot be cut within {unit} channels"
    return ""


def _parts(config: ModelConfig, shard: Shard) -> Iterator[WeightSlice]:
    """A rank's parts of the weights of all layers."""
    for index, layer in enumerate(config.layers):
        if layer.mixer is not None:
            yield from parts_of(config, index, layer.mixer, shard)
        if layer.feed_forward is not None:
            yield from _feed_forward_parts(config, shard, index, layer.feed_forward)


def _feed_forward_parts(
    config: ModelConfig, shard: Shard, index: int, own: FeedForwardConfig
) -> Iterator[WeightSlice]:
    for each in _parts_of(own):
        if isinstance(each, GatedConfig | MlpConfig):
            for parts in shard.gated_parts(config, index, each):
                yield from parts
        else:
            of_experts = shard.expert_parts(config, index, each)
            for parts in (*of_experts.gate_up, *of_experts.down):
                yield from parts


def _parts_of(own: FeedForwardConfig | None) -> Iterator[GatedConfig | MlpConfig | ExpertsConfig]:
    """The feed-forwards that it is made of."""
    if isinstance(own, BesideConfig):
        yield own.gated
        yield own.experts
    elif own is not None:
        yield own
        if isinstance(own, ExpertsConfig) and own.shared is not None:
            yield own.shared
