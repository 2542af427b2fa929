"""How a model is divided among ranks (Shoeybi et al. 2019, "Megatron-LM", section 3).

- q, k, v, gate and up: a rank has some rows, q, k and v by whole heads. If there are more ranks
  than KV heads, several ranks hold the same one.
- output and down: a rank has the columns that its own rows above feed. Its product is a part of a
  sum over all ranks.
- head: a rank has some rows, the last rank perhaps fewer. Embedding and norms are whole everywhere.

Every range follows from rank and number of ranks alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.model.config import ModelConfig, UnsupportedModelError
from engine.model.precision.base import Part
from engine.model.precision.choice import Precision
from engine.model.region import Range, Region

MOST_RANKS: Final = 64


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

    def regions(self, config: ModelConfig) -> dict[str, Region]:
        """Its parts of the weights of a layer, by the ends of their names."""
        hidden, dim = config.hidden_size, config.head_dim
        q_shape, kv_shape = ((n * dim, hidden) for n in (config.num_heads, config.num_kv_heads))
        middle_shape = config.intermediate_size, hidden
        heads, kv_heads = (
            Range(own.start * dim, own.end * dim)
            for own in (self.heads(config), self.kv_heads(config))
        )
        middle = self._even(config.intermediate_size)
        return {
            "self_attn.q_proj": Region.some_rows(q_shape, heads),
            "self_attn.k_proj": Region.some_rows(kv_shape, kv_heads),
            "self_attn.v_proj": Region.some_rows(kv_shape, kv_heads),
            "self_attn.o_proj": Region.some_columns((hidden, q_shape[0]), heads),
            "mlp.gate_proj": Region.some_rows(middle_shape, middle),
            "mlp.up_proj": Region.some_rows(middle_shape, middle),
            "mlp.down_proj": Region.some_columns((hidden, middle_shape[0]), middle),
        }

    def _even(self, count: int) -> Range:
        each = count // self.count
        return Range(self.rank * each, (self.rank + 1) * each)


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
    heads, kv_heads, middle = config.num_heads, config.num_kv_heads, config.intermediate_size
    if heads % count:
        return f"it does not divide the {heads} attention heads"
    if kv_heads % count and count % kv_heads:
        return f"it neither divides the {kv_heads} KV heads nor is a multiple of them"
    if middle % count:
        return f"it does not divide the feed-forward width {middle}"
    if count * count > config.vocab_size:
        return f"the vocabulary has {config.vocab_size} tokens only"
    for layer in range(config.num_layers):
        for rank in range(count):
            for name, region in Shard(rank, count).regions(config).items():
                if cut := _cut(Part(f"model.layers.{layer}.{name}", region), precision):
                    return cut
    return ""


def _cut(part: Part, precision: Precision) -> str:
    """What of a quantised weight a boundary of this part would cut; empty: nothing."""
    region = part.region
    limits = zip((region.rows, region.columns), region.shape, precision.units(part), strict=True)
    for own, size, unit in limits:
        if own.start % unit or (own.end % unit and own.end != size):
            return f"it cuts {part.module}, which cannot be cut within {unit} channels"
    return ""
