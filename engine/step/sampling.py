"""The sampling options of one step's rows, as plain arrays. The step loop's thread makes them, and
the executor's thread reads them. A part is None if no row needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.types import SamplingParams, StopRules, TokenIds

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Ints = NDArray[np.integer[Any]]


class Adjustments(NamedTuple):
    """Logit biases, and minus infinity where an id would end a sequence too early.

    Entry i adds `values[i]` to the logit of `ids[i]` in row `rows[i]`. No pair occurs twice, unless
    there are bounds: then a bias may stand beside a bound.
    """

    rows: I64
    ids: I64
    values: F32
    until: I64 | None = None
    """An entry counts for output indices below this; None: the host knew the indices."""


class Resets(NamedTuple):
    """Slots with a new sequence. They are cleared, then filled with these pairs."""

    slots: I64
    prompt_slots: I64
    """Slot of each of `prompt_ids`."""
    prompt_ids: I64
    generated_slots: I64
    """Slot of each of `generated_ids`."""
    generated_ids: I64


class Penalties(NamedTuple):
    """Rows with penalties for earlier tokens; all arrays are [P]."""

    rows: I64
    slots: I64
    repetition: F32
    """1 means no penalty."""
    frequency: F32
    presence: F32
    resets: Resets | None


class Nucleus(NamedTuple):
    """Rows cut to their best tokens; all arrays are [N]."""

    rows: I64
    """Indices into the rows of `Draw`."""
    top_k: I64
    """The vocabulary's size if top-k is not set."""
    top_p: F64
    """Infinite if top-p is not set."""
    width: int | None
    """The greatest top-k, which is the number of best logits to rank; None: perhaps all of a
    row."""


class NoiseKeys(NamedTuple):
    """What keys the noise of rows beside their output indices; all arrays are [D]."""

    seeds: I64
    """The bits of the seeds."""
    choices: I64


class Draw(NamedTuple):
    """Rows that are drawn rather than greedy; all arrays are [D]."""

    rows: I64
    temperature: F32
    uniforms: F64 | None
    """None: the host does not know the output indices, and the device makes them of `noise`."""
    floor: F32 | None
    """min-p as the least (logit - best) / temperature that stays; None if no row needs it."""
    nuclei: tuple[Nucleus, ...]
    noise: NoiseKeys | None = None


class LogprobRows(NamedTuple):
    """Rows whose log probabilities are wanted."""

    rows: I64
    top_n: int
    """The most alternatives that any row asks for. The reader takes each row's own number."""


class Masks(NamedTuple):
    """Rows that may draw only some tokens."""

    rows: I64
    """[M]. Draws of the step; in a step of width W > 1: draw * W + column."""
    bits: NDArray[np.int32]
    """[M, W]: bit i % 32 of word i // 32 stands for token i."""


def words_of(vocab_size: int) -> int:
    """Words of 32 bits in a mask."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """The sampling of one step. If every part is None, it is an argmax over the rows."""

    num_rows: int
    draw: Draw | None = None
    penalties: Penalties | None = None
    adjustments: Adjustments | None = None
    logprobs: LogprobRows | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the best of its row."""
        return self == SamplePlan(self.num_rows)


class SamplePlanner(Protocol):
    """What the scheduler knows of the sampler. The step loop's thread calls it."""

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        stop: StopRules,
        choice: int,
        prompt_ids: TokenIds,
        generated_ids: TokenIds,
    ) -> None:
        """Gives the slot to a sequence, whose output so far is `generated_ids`."""
        ...

    def plan(
        self, slots: Ints, indices: Ints, choices: Ints | None = None, *, known: bool = True
    ) -> SamplePlan:
        """Plans one draw a row: [R] slots, output indices, and choices that key the noise. Where
        the indices are not `known`, they are the least, and the device knows more."""
        ...
