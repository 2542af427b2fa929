"""Where kernels find what a layer with a state reads and keeps.

Both recurrences are described in the words of attention. The gated delta rule has q, k and v; of
Mamba-2, C is q, B is k, and x is v. A unit has one q, one k and R heads of values, which are
channels of its convolution.

Shapes: T tokens of a step, U units of this rank, R heads of a unit, Dk numbers of q and of k, Dv of
a head's values, C channels of a unit, K taps.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import Tensor

from engine.attention.paged import PagedStep
from engine.pool.state_pool import STAMP_NUMBERS, StatePool

LEAST_TILE: Final = 64
"""Products of prompts have tiles of at least so many rows and columns, filled up with zeros. With
16 `_solve` ended with an illegal memory access on an H200, in bfloat16; with 128 it is right."""


class Shape(NamedTuple):
    """What is equal in all layers of a kind."""

    is_delta: bool
    """The gated delta rule; else Mamba-2."""
    heads: int
    """R"""
    key_dim: int
    value_dim: int
    kernel: int
    """K"""
    q_channel: int
    """Where q begins among the channels of a unit."""
    k_channel: int
    v_channel: int

    @property
    def channels(self) -> int:
        """C"""
        return 2 * self.key_dim + self.heads * self.value_dim


class Places(NamedTuple):
    """Where a token's row of a product has something: of unit u at `first` + u * `stride`, and that
    of as many units as `shared_by` at one place."""

    first: int
    stride: int
    shared_by: int = 1


class Made(NamedTuple):
    """What products make of the step's tokens."""

    inputs: Tensor
    """[T, ..], with q, k, v and the gate of the output."""
    q: Places
    k: Places
    v: Places
    gate: Places
    """R * Dv numbers of a unit."""
    gates: Tensor
    """[T, ..]; may be `inputs`."""
    rate: Places
    """What the decay is made of, R numbers of a unit."""
    beta: Places
    """R numbers of a unit; the delta rule's alone."""

    @property
    def sources(self) -> tuple[int, ...]:
        """Where kernels of prompts find q, k and v."""
        return *self.q[:2], *self.k[:2], *self.v[:2], self.q.shared_by


class Weights(NamedTuple):
    """Small weights of a layer."""

    taps: Tensor
    """[U, C, K], the newest token's last."""
    bias: Tensor | None
    """[U, C], of the convolution."""
    rate: Tensor
    """[U, R] float32: log of how fast a head fades."""
    rate_bias: Tensor
    """[U, R] float32."""
    skip: Tensor | None
    """[U, R] float32: D of Mamba-2."""
    steps: tuple[float, float]
    """The least and the most time step of Mamba-2."""


class Kept(NamedTuple):
    """The states of a layer."""

    pool: StatePool
    layer: int

    @property
    def strides(self) -> tuple[int, int, int]:
        """Numbers from one page to the next, from one unit to the next, and before the layer."""
        of_layer = STAMP_NUMBERS + self.pool.numbers
        of_unit = self.pool.num_layers * of_layer
        return self.pool.units * of_unit, of_unit, self.layer * of_layer


class States(NamedTuple):
    """A step's rows, as kernels of states have them."""

    step: PagedStep
    """Its page table is one of states: see `engine.step.plan.GroupTable`."""
    spoilt: Tensor
    """[R] int32, 1 where a row has found a wrong state. Kernels only ever set it."""

    @property
    def prompts(self) -> int:
        """Number of rows of prompts."""
        return 0 if self.step.query_starts is None else len(self.step.query_starts) - 1
