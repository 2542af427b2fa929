"""Which numbers of ranks can share a model."""

from __future__ import annotations

from collections.abc import Iterator

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
from engine.model.mixers.kinds import parts_of
from engine.model.precision.base import WeightSlice
from engine.model.precision.choice import Precision
from engine.model.shard import Shard


def check_ranks(config: ModelConfig, precision: Precision, count: int) -> None:
    """Refuses a number of ranks that the model cannot be divided among.

    Raises:
        UnsupportedModelError: it says why, and which numbers work.
    """
    if obstacle := _obstacle(config, precision, count):
        fit = [n for n in range(1, MOST_RANKS + 1) if not _obstacle(config, precision, n)]
        raise UnsupportedModelError(
            f"tp {count} does not fit this model: {obstacle}; these fit: {', '.join(map(str, fit))}"
        )


def _obstacle(config: ModelConfig, precision: Precision, count: int) -> str:
    """Why so many ranks cannot hold the model; empty: they can."""
    if count == 1:
        return ""
    for mixer in dict.fromkeys(config.mixers):
        if obstacle := mixer.obstacle(count):
            return obstacle
    for middle in _widths(config):
        if middle % count:
            return f"it does not divide the feed-forward width {middle}"
    if count * count > config.vocab_size:
        return f"the vocabulary has {config.vocab_size} tokens only"
    for part in _parts(
        config, Shard(0, count)
    ):  # Other ranks' parts begin at multiples of its own.
        if cut := _cut(part, precision):
            return cut
    return ""


def _widths(config: ModelConfig) -> Iterator[int]:
    """Widths of all feed-forwards."""
    for own in dict.fromkeys(layer.feed_forward for layer in config.layers):
        for part in _parts_of(own):
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
