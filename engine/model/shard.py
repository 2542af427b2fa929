"""How a model is divided among ranks (Shoeybi et al. 2019, "Megatron-LM", section 3).

- Of several stages, each has some layers. The first one has the embedding, the last one the head.
  What follows is of the ranks of one stage.

- What leads into a mixer, gate and up: a rank has some rows, of a mixer by whole heads.
- What leads out of a mixer, and down: a rank has the columns that its own rows above feed. Its
  product is a part of a sum over all ranks.
- head: a rank has some rows, the last rank perhaps fewer. Embedding and norms are whole everywhere.
- experts: a rank has some of the width of each, or some of them whole (expert parallelism). Its sum
  over those is a part of the sum over all ranks, either way.

Every range follows from rank and number of ranks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.model.config import (
    ExpertsConfig,
    GatedConfig,
    MlpConfig,
    ModelConfig,
)
from engine.model.experts.config import EACH, Held
from engine.model.precision.base import Stack, WeightSlice
from engine.model.region import Range, Region


class GatedParts(NamedTuple):
    """The weights of a feed-forward that is no mixture."""

    gate_up: list[WeightSlice]
    """Up alone where there is no gate."""
    down: list[WeightSlice]


class ExpertParts(NamedTuple):
    """The weights of a feed-forward of experts."""

    router: list[WeightSlice]
    gate_up: list[list[WeightSlice]]
    """By expert, of those that the rank holds."""
    down: list[list[WeightSlice]]
    """As these."""
    shared_gate: list[WeightSlice]
    """Empty: there is none."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model."""

    rank: int = 0
    """Its place in its stage."""
    count: int = 1
    """Ranks of each stage."""
    stage: int = 0
    """0 has the first layers."""
    stages: int = 1
    layers: Range | None = None
    """The stage's layers; None: all."""
    experts: Held | None = None
    """The experts that it holds whole; None: some of the width of each."""
    bands: int = 1
    """Stages for which pages are laid out (`EngineConfig.kv_bands`)."""
    band_ends: tuple[int, ...] = ()
    """Where the layers of each of these end; empty: there is one, or nobody knows yet."""

    def has_layer(self, index: int) -> bool:
        """Whether its stage has a layer."""
        return self.layers is None or self.layers.start <= index < self.layers.end

    @property
    def is_first(self) -> bool:
        """Whether it embeds."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.stage == self.stages - 1

    def even(self, count: int) -> Range:
        """Its part of units that the ranks share evenly."""
        each = count // self.count
        return Range(self.rank * each, (self.rank + 1) * each)

    def shared(self, count: int) -> Range:
        """Its part of units that several ranks hold if there are fewer than ranks."""
        first = self.rank * count // self.count
        return Range(first, first + max(1, count // self.count))

    @property
    def held(self) -> Held:
        """The experts of which it holds something."""
        return self.experts or EACH

    def vocab(self, config: ModelConfig) -> Range:
        """Its rows of the head."""
        each = -(-config.vocab_size // self.count)
        return Range(self.rank * each, min(config.vocab_size, (self.rank + 1) * each))

    def gated_parts(
        self, config: ModelConfig, index: int, own: GatedConfig | MlpConfig
    ) -> GatedParts:
        """Its parts of the weights of a layer's feed-forward that is no mixture."""
        middle = self.even(own.width)
        opening, count = ([own.up], 1) if isinstance(own, MlpConfig) else (own.gate_up, 2)
        return GatedParts(
            stacked(config, index, opening, [(own.width, middle)] * count),
            columns(config, index, own.down, own.width, middle),
        )

    def expert_parts(self, config: ModelConfig, index: int, own: ExpertsConfig) -> ExpertParts:
        """Its parts of the weights of a layer's experts."""
        experts, names = self.held.of(own.routing.experts), own.names
        router = Region.whole(own.routing.experts, config.hidden_size)
        gate = Region.whole(1, config.hidden_size)
        opening = (names.up,) if own.gate.squared else (names.gate, names.up)
        return ExpertParts(
            [WeightSlice(config.layer_name(index, names.router), router)],
            [[self._expert_part(config, index, own, e, name) for name in opening] for e in experts],
            [[self._expert_part(config, index, own, e, names.down)] for e in experts],
            [WeightSlice(config.layer_name(index, own.shared_gate), gate)]
            if own.shared_gate
            else [],
        )

    def _expert_part(
        self, config: ModelConfig, index: int, own: ExpertsConfig, expert: int, name: str
    ) -> WeightSlice:
        names = own.names
        middle = Range(0, own.width) if self.experts else self.even(own.width)
        hidden = own.reduced.size if own.reduced else config.hidden_size
        if name == names.down:
            region = Region.some_columns((hidden, own.width), middle)
            tensor, turn, turns = f"{names.experts}.{name}", 0, 1
        else:
            region = Region.some_rows((own.width, hidden), middle)
            tensor, turn, turns = f"{names.experts}.{names.gate_up}", int(name == names.up), 2
        stack = None
        if names.stacked:
            tensor = config.layer_name(index, tensor)
            stack = Stack(
                tensor, own.routing.experts, expert, turn, turns, names.behind, names.straight
            )
        return WeightSlice(config.layer_name(index, names.module(expert, name)), region, stack)


def stacked(
    config: ModelConfig,
    index: int,
    names: Sequence[str],
    sizes: list[tuple[int, Range]],
    inputs: int | None = None,
) -> list[WeightSlice]:
    """Weights that are kept one below the other.

    Args:
        config: of the model.
        index: of the layer.
        names: their modules: one for each weight, or one for all, in which they stand in order.
        sizes: rows of each weight, and those that the rank has of them.
        inputs: columns of each; None: the hidden size.
    """
    hidden, total = inputs or config.hidden_size, sum(rows for rows, _ in sizes)
    parts, first = [], 0
    for place, (rows, own) in enumerate(sizes):
        if len(names) == len(sizes):
            name, region = names[place], Region.some_rows((rows, hidden), own)
        else:
            own = Range(first + own.start, first + own.end)
            name, region = names[0], Region.some_rows((total, hidden), own)
        parts.append(WeightSlice(config.layer_name(index, name), region))
        first += rows
    if len(names) < len(sizes) and sum(part.rows for part in parts) == total:
        return [WeightSlice(parts[0].module, Region.whole(total, hidden))]
    return parts


def columns(
    config: ModelConfig, index: int, name: str, inputs: int, own: Range
) -> list[WeightSlice]:
    """A weight of which the rank reads these of so many inputs."""
    region = Region.some_columns((config.hidden_size, inputs), own)
    return [WeightSlice(config.layer_name(index, name), region)]
