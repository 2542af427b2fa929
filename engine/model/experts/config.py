"""The features of a feed-forward of experts. Families read them from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple


class Scores(StrEnum):
    """What a router's logits become."""

    SOFTMAX = "softmax"
    """Over all experts."""
    SIGMOID = "sigmoid"
    """Each expert by itself (DeepSeek-V3, arXiv 2412.19437)."""
    SOFTMAX_OF_CHOSEN = "softmax of chosen"
    """The best logits are chosen, then softmax over those (gpt-oss)."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How the experts of a token are chosen and weighed."""

    experts: int
    chosen: int
    """Experts of a token."""
    scores: Scores = Scores.SOFTMAX
    normalised: bool = False
    """Weights are divided by their sum."""
    factor: float = 1.0
    """On all weights."""
    groups: int = 1
    """The experts lie in so many groups of neighbours, and only the best groups are open."""
    open_groups: int = 1
    best_of_group: int = 1
    """A group is as good as the sum of its so many best scores."""
    bias: bool = False
    """The choice, but not the weight, adds a bias for each expert to the scores."""

    def __post_init__(self) -> None:
        """Refuses what cannot be.

        Raises:
            ValueError: it says what.
        """
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"{self.chosen} of {self.experts} experts cannot be chosen")
        if self.experts % self.groups or not 1 <= self.open_groups <= self.groups:
            raise ValueError(
                f"{self.experts} experts with {self.open_groups} of {self.groups} groups open"
            )
        if self.chosen > self.open_groups * (self.experts // self.groups):
            raise ValueError(f"{self.open_groups} groups hold fewer than {self.chosen} experts")


class Held(NamedTuple):
    """Which experts a rank holds whole: `rank`, `rank + ranks` and so on. Neighbours, which routing
    by groups takes together, lie on several ranks so."""

    rank: int = 0
    ranks: int = 1

    def of(self, experts: int) -> range:
        """The numbers of those that it holds, of so many."""
        return range(self.rank, experts, self.ranks)


EACH: Final = Held()
"""All of them."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What an expert does with gate and up: gate * sigmoid(sharpness * gate) * (up + shift)."""

    sharpness: float = 1.0
    shift: float = 0.0
    limit: float | None = None
    """Gate is at most this, and up at most this in magnitude."""
    gelu: bool = False
    """It is gelu(gate) * up instead, by tanh."""
    squared: bool = False
    """There is no gate: it is relu(up)^2 instead."""


SILU: Final = Gate()
"""silu(gate) * up."""
SQUARED: Final = Gate(squared=True)
"""relu(up)^2."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a checkpoint has experts, by names within a layer."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"
    """Gate and up of all experts, where tensors hold all."""
    bias: str = "mlp.gate.e_score_correction_bias"
    """Name of the bias of the choice."""
    stacked: bool = False
    """Tensors hold all experts, those of weights transposed, and gate and up lie in turns in one
    (gpt-oss). A module such as `mlp.experts.3.gate_proj` is then a part of such tensors."""
    behind: bool = False
    """In such a tensor up lies behind gate instead (Qwen3-VL)."""
    straight: bool = False
    """So it does, and weights are not transposed (Gemma 4)."""

    def module(self, expert: int, part: str) -> str:
        """A part of an expert."""
        return f"{self.experts}.{expert}.{part}"


USUAL_NAMES: Final = ExpertNames()
