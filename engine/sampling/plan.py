"""What the rows of one step ask of the sampler, as plain arrays: made by the step loop's thread,
read by the executor's. A part that is None was asked for by no row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class Adjustments(NamedTuple):
    """Logit biases, and minus infinity where an id would end a sequence too early.

    Entry i adds `values[i]` to the logit of `ids[i]` in row `rows[i]`; no pair occurs twice.
    """

    rows: I64
    ids: I64
    values: F32


class Resets(NamedTuple):
    """Slots that changed hands: they forget everything, then start with these pairs."""

    slots: I64
    prompt_slots: I64
    """Slot of each of `prompt_ids`."""
    prompt_ids: I64
    generated_slots: I64
    """Slot of each of `generated_ids`."""
    generated_ids: I64


class Penalties(NamedTuple):
    """Rows penalised for what they said before; all arrays [P]."""

    rows: I64
    slots: I64
    repetition: F32
    """1 is none."""
    frequency: F32
    presence: F32
    resets: Resets | None


class Nucleus(NamedTuple):
    """Rows cut to their best tokens; arrays [N]."""

    rows: I64
    """Into the rows of `Draw`."""
    top_k: I64
    """The vocabulary's size where nothing is asked."""
    top_p: F64
    """Infinite where nothing is asked."""
    width: int | None
    """The greatest top-k: so many of a row's best have to be ranked; None: perhaps all of them."""


class Draw(NamedTuple):
    """Rows that are drawn rather than greedy; arrays [D]."""

    rows: I64
    temperature: F32
    uniforms: F64
    floor: F32 | None
    """min-p as the least (logit - best) / temperature that stays; None: no row asks."""
    nuclei: tuple[Nucleus, ...]


class LogprobRows(NamedTuple):
    """Rows whose log probabilities are wanted."""

    rows: I64
    top_n: int
    """The most that any of them asks for; the reader takes each row's own."""


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """One step's sampling. With every part None it is an argmax over the rows."""

    num_rows: int
    draw: Draw | None = None
    penalties: Penalties | None = None
    adjustments: Adjustments | None = None
    logprobs: LogprobRows | None = None
