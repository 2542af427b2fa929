"""Where adapters add: the products of a model whose rows may have one.

A product asks its `Addition` after it has multiplied. Which rows of a step have which adapter is
given before the step, for all products at once. Fused steps have others (`engine.cuda.adapters`).

Shapes: T tokens of a step, K inputs and N outputs of a product, R a rank.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.slots import NO_SLOT, Wanted
from engine.adapters.types import Adapter, LowRank
from engine.model import Decoder
from engine.model.feed_forward import Gated, Mlp
from engine.model.linear import Linear
from engine.model.mixers.attention import Attention
from engine.model.mixers.latent import LatentAttention
from engine.model.precision.rounding import Rounded, plain_of
from engine.model.region import Range
from engine.model.wrapped.decoder import WrappedModel

_OWNERS: Final = (Attention, LatentAttention, Gated, Mlp)
"""Modules of our decoder whose products take adapters."""


class Part(NamedTuple):
    """Rows of a product that are one module of a checkpoint, or a rank's part of it."""

    module: str
    outputs: Range
    """Rows of the product."""
    rows: Range
    """Rows of the module's weight."""
    columns: Range


class StepRows:
    """Which tokens of the step that runs have the adapter of which slot."""

    def __init__(self) -> None:
        self.tokens: dict[int, Tensor | None] = {}
        """By slot: [tokens] int64; None: all of the step."""

    def begin(
        self, slots: NDArray[np.int32], counts: NDArray[np.int32], device: torch.device
    ) -> None:
        """A step begins, of rows with these slots and so many tokens."""
        by_token = np.repeat(slots, counts)
        found = [int(slot) for slot in np.unique(by_token) if slot != NO_SLOT]
        alone = len(found) == 1 and bool((by_token == found[0]).all())
        self.tokens = {
            slot: None if alone else torch.from_numpy(np.flatnonzero(by_token == slot)).to(device)
            for slot in found
        }


class Additions:
    """What adapters add to one product."""

    def __init__(self, linear: Linear, rows: StepRows) -> None:
        self._rows = rows
        self._pairs: dict[int, list[tuple[Range, LowRank]]] = {}
        self._parts = parts_of(linear)
        self._device = next(linear.parameters()).device

    @property
    def active(self) -> bool:
        """See `engine.model.linear.Addition`."""
        return bool(self._rows.tokens)

    def put(self, slot: int, adapter: Adapter) -> None:
        """The slot has this adapter from now on."""
        self._pairs[slot] = [
            (
                part.outputs,
                pair._replace(
                    a=pair.a[:, part.columns.slice].to(self._device),
                    b=pair.b[part.rows.slice].to(self._device),
                ),
            )
            for part in self._parts
            if (pair := adapter.modules.get(part.module)) is not None
        ]

    def __call__(self, x: Tensor | Rounded, linear: Linear) -> Tensor:
        """See `engine.model.linear.Addition`. The product's rounded output and what is added meet
        in the output's dtype, as in peft."""
        out, x = linear.multiply(x), plain_of(x)
        for slot, tokens in self._rows.tokens.items():
            own = x if tokens is None else x[tokens]
            for outputs, pair in self._pairs.get(slot, ()):
                low = own.to(pair.a.dtype) @ pair.a.T
                added = ((low @ pair.b.T) * pair.scale).to(out.dtype)
                if tokens is None:
                    out[:, outputs.slice] += added
                else:
                    out[tokens, outputs.slice] += added
        return out


class AdapterSites:
    """All products of a model that take adapters."""

    def __init__(self, model: Decoder) -> None:
        self._rows = StepRows()
        self._contents: dict[int, bytes] = {}
        """Digests by slot."""
        self._additions: list[Additions] = []
        self._device = next(model.parameters()).device
        for linear in linears_of(model):
            linear.addition = own = Additions(linear, self._rows)
            self._additions.append(own)

    def begin(self, wanted: Wanted, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """A step begins.

        Args:
            wanted: what its slots must have.
            slots: [rows], `NO_SLOT` for rows without; empty: no row has one.
            counts: [rows] tokens of each.
        """
        for slot, adapter in wanted:
            if self._contents.get(slot) != adapter.digest:
                for addition in self._additions:
                    addition.put(slot, adapter)
                self._contents[slot] = adapter.digest
        self._rows.begin(slots, counts if len(slots) else slots, self._device)


def parts_of(linear: Linear) -> list[Part]:
    """The modules of a product."""
    found, first = [], 0
    for part in linear.parts:
        own = Range(first, first + part.rows)
        found.append(Part(part.module, own, part.region.rows, part.region.columns))
        first = own.end
    return found


def linears_of(model: Decoder) -> list[Linear]:
    """The products that take adapters."""
    if isinstance(model, WrappedModel):
        return model.linears
    owners = [module for module in model.modules() if isinstance(module, _OWNERS)]
    every = [each for owner in owners for each in owner.children() if isinstance(each, Linear)]
    return [each for each in every if all(part.stack is None for part in each.parts)]


def shapes_of(linears: list[Linear]) -> dict[str, tuple[int, int]]:
    """(N, K) of the whole modules that may have a pair, by their names in the checkpoint."""
    return {part.module: part.region.shape for each in linears for part in each.parts}
