"""How a model is divided among ranks (Shoeybi et al. 2019, "Megatron-LM", section 3).

- q, k, v, gate and up: a rank has some rows, q, k and v by whole heads. If there are more ranks
  than KV heads, several ranks hold the same one.
- output and down: a rank has the columns that its own rows above feed. Its product is a part of a
  sum over all ranks.
- head: a rank has some rows, the last rank perhaps fewer. Embedding and norms are whole everywhere.

Every range follows from rank and number of ranks alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.model.config import (
    ExpertsConfig,
    FeedForwardConfig,
    GatedConfig,
    ModelConfig,
    UnsupportedModelError,
)
from engine.model.precision.base import Part, Stack
from engine.model.precision.choice import Precision
from engine.model.region import Range, Region

MOST_RANKS: Final = 64


class AttentionParts(NamedTuple):
    """The weights around a layer's attention."""

    qkv: list[Part]
    output: list[Part]


class GatedParts(NamedTuple):
    """The weights of a gated feed-forward."""

    gate_up: list[Part]
    down: list[Part]


class ExpertParts(NamedTuple):
    """The weights of a feed-forward of experts."""

    router: list[Part]
    gate_up: list[list[Part]]
    """By expert."""
    down: list[list[Part]]
    """By expert."""
    shared_gate: list[Part]
    """Empty: there is none."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model."""

    rank: int = 0
    count: int = 1
    """Number of ranks."""

    def heads(self, config: ModelConfig) -> Range:
        """Its query heads."""
        return self._even(config.num_heads)

    def kv_heads(self, config: ModelConfig) -> Range:
        """Its KV heads: those that its query heads read."""
        first = self.rank * config.num_kv_heads // self.count
        return Range(first, first + max(1, config.num_kv_heads // self.count))

    def vocab(self, config: ModelConfig) -> Range:
        """Its rows of the head."""
        each = -(-config.vocab_size // self.count)
        return Range(self.rank * each, min(config.vocab_size, (self.rank + 1) * each))

    def attention_parts(self, config: ModelConfig, index: int) -> AttentionParts:
        """Its parts of the weights of a layer's attention."""
        dim = config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        heads, kv_heads = (
            Range(own.start * dim, own.end * dim)
            for own in (self.heads(config), self.kv_heads(config))
        )
        sizes = [(q, heads), (kv, kv_heads), (kv, kv_heads)]
        return AttentionParts(
            _stacked(config, index, config.qkv, sizes),
            _columns(config, index, "self_attn.o_proj", q, heads),
        )

    def gated_parts(self, config: ModelConfig, index: int, own: GatedConfig) -> GatedParts:
        """Its parts of the weights of a gated feed-forward of a layer."""
        middle = self._even(own.width)
        sizes = [(own.width, middle)] * 2
        return GatedParts(
            _stacked(config, index, own.gate_up, sizes),
            _columns(config, index, own.down, own.width, middle),
        )

    def expert_parts(self, config: ModelConfig, index: int, own: ExpertsConfig) -> ExpertParts:
        """Its parts of the weights of a layer's experts: some of the width of each."""
        experts, names = range(own.routing.experts), own.names
        router = Region.whole(len(experts), config.hidden_size)
        gate = Region.whole(1, config.hidden_size)
        return ExpertParts(
            [Part(config.layer_name(index, names.router), router)],
            [
                [self._expert_part(config, index, own, e, name) for name in (names.gate, names.up)]
                for e in experts
            ],
            [[self._expert_part(config, index, own, e, names.down)] for e in experts],
            [Part(config.layer_name(index, own.shared_gate), gate)] if own.shared_gate else [],
        )

    def _expert_part(
        self, config: ModelConfig, index: int, own: ExpertsConfig, expert: int, name: str
    ) -> Part:
        names, middle = own.names, self._even(own.width)
        if name == names.down:
            region = Region.some_columns((config.hidden_size, own.width), middle)
            tensor, turn, turns = f"{names.experts}.{name}", 0, 1
        else:
            region = Region.some_rows((own.width, config.hidden_size), middle)
            tensor, turn, turns = f"{names.experts}.gate_up_proj", int(name == names.up), 2
        stack = None
        if names.stacked:
            tensor = config.layer_name(index, tensor)
            stack = Stack(tensor, own.routing.experts, expert, turn, turns)
        return Part(config.layer_name(index, names.module(expert, name)), region, stack)

    def parts(self, config: ModelConfig) -> Iterator[Part]:
        """Its parts of the weights of all layers."""
        for index, layer in enumerate(config.layers):
            for parts in self.attention_parts(config, index):
                yield from parts
            yield from self._feed_forward_parts(config, index, layer.feed_forward)

    def _feed_forward_parts(
        self, config: ModelConfig, index: int, own: FeedForwardConfig
    ) -> Iterator[Part]:
        if isinstance(own, ExpertsConfig):
            of_experts = self.expert_parts(config, index, own)
            for parts in (*of_experts.gate_up, *of_experts.down):
                yield from parts
        gated = own if isinstance(own, GatedConfig) else own.shared
        if gated is not None:
            for parts in self.gated_parts(config, index, gated):
                yield from parts

    def _even(self, count: int) -> Range:
        each = count // self.count
        return Range(self.rank * each, (self.rank + 1) * each)


def _stacked(
    config: ModelConfig, index: int, names: tuple[str, ...], sizes: list[tuple[int, Range]]
) -> list[Part]:
    """Weights that are kept one below the other.

    Args:
        config: of the model.
        index: of the layer.
        names: their modules: one for each weight, or one for all, in which they stand in order.
        sizes: rows of each weight, and those that the rank has of them.
    """
    hidden, total = config.hidden_size, sum(rows for rows, _ in sizes)
    parts, first = [], 0
    for place, (rows, own) in enumerate(sizes):
        if len(names) == len(sizes):
            name, region = names[place], Region.some_rows((rows, hidden), own)
        else:
            own = Range(first + own.start, first + own.end)
            name, region = names[0], Region.some_rows((total, hidden), own)
        parts.append(Part(config.layer_name(index, name), region))
        first += rows
    if len(names) < len(sizes) and sum(part.rows for part in parts) == total:
        return [Part(parts[0].module, Region.whole(total, hidden))]
    return parts


def _columns(config: ModelConfig, index: int, name: str, inputs: int, own: Range) -> list[Part]:
    region = Region.some_columns((config.hidden_size, inputs), own)
    return [Part(config.layer_name(index, name), region)]


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
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % count:
        return f"it does not divide the {heads} attention heads"
    if kv_heads % count and count % kv_heads:
        return f"it neither divides the {kv_heads} KV heads nor is a multiple of them"
    for middle in _widths(config):
        if middle % count:
            return f"it does not divide the feed-forward width {middle}"
    if count * count > config.vocab_size:
        return f"the vocabulary has {config.vocab_size} tokens only"
    for part in Shard(0, count).parts(config):  # Other ranks' parts begin at multiples of its own.
        if cut := _cut(part, precision):
            return cut
    return ""


def _widths(config: ModelConfig) -> Iterator[int]:
    """Of all feed-forwards."""
    for own in dict.fromkeys(layer.feed_forward for layer in config.layers):
        yield own.width
        if isinstance(own, ExpertsConfig) and own.shared is not None:
            yield own.shared.width


def _cut(part: Part, precision: Precision) -> str:
    """What of a quantised weight a boundary of this part would cut; empty: nothing."""
    region = part.region
    limits = zip((region.rows, region.columns), region.shape, precision.units(part), strict=True)
    for own, size, unit in limits:
        if own.start % unit or (own.end % unit and own.end != size):
            return f"it cuts {part.module}, which cannot be cut within {unit} channels"
    return ""
