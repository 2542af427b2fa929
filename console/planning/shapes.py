"""Shapes of models: what they have of parameters and of KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from console.loadgen.errors import WrongUseError

BYTES: Final = 2
"""Size of a bfloat16 number."""
_OTHERS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
"""Keys of configs whose parameters are not all read, or whose KV is not that of all heads."""


class Shape(NamedTuple):
    """The shape of a decoder of the Llama family, as in its config.json."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @property
    def parameters(self) -> int:
        """Number of parameters in matrices. Norms and biases add only a thousandth."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)

    def rank_bytes(self, ranks: int, layer_bytes: int) -> int:
        """Bytes of the weights of one of so many ranks: its part of the layers, with so many bytes
        a number, and of the head, and the whole embedding."""
        vocab = self.vocab * self.hidden
        layers = self.parameters - vocab * (1 if self.tied else 2)
        head = 0 if self.tied else vocab // ranks
        return layers // ranks * layer_bytes + (vocab + head) * BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's KV: a key and a value for each layer and KV head."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


def shape_of(folder: Path) -> Shape:
    """The shape of a model's folder.

    Raises:
        WrongUseError: it has none, or it is not of that family.
    """
    instead = "give --parameters and --kv-bytes"
    try:
        given: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if found := [key for key in _OTHERS if given.get(key)]:
            raise WrongUseError(f"{folder}: plans are for dense models ({found[0]}): {instead}")
        heads, hidden = given["num_attention_heads"], given["hidden_size"]
        return Shape(
            folder.name,
            given["num_hidden_layers"],
            hidden,
            given["intermediate_size"],
            heads,
            given.get("num_key_value_heads") or heads,
            given.get("head_dim") or hidden // heads,
            given["vocab_size"],
            bool(given.get("tie_word_embeddings")),
        )
    except OSError as error:
        raise WrongUseError(f"{folder}/config.json: {error.strerror}: {instead}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise WrongUseError(f"{folder}: its shape cannot be read ({error!r}): {instead}") from None
