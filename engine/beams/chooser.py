"""Whoever chooses how the sequences of a request go on.

It stands beside the sampler: the sampler draws one token a row and knows nothing of other rows. A
chooser reads the best candidates of all sequences of a request, after a step has settled.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from engine.types import EndReason, TokenRecord


class Candidates(NamedTuple):
    """The likeliest next tokens of a sequence, best first."""

    ids: NDArray[np.int32]
    """[K]"""
    logprobs: NDArray[np.float32]
    """[K]"""

    @classmethod
    def of(cls, record: TokenRecord) -> Self:
        """Candidates that came with a token."""
        ids = np.array(record.top_ids, np.int32)
        return cls(ids, np.array(record.top_logprobs, np.float32))


class Continuation(NamedTuple):
    """A sequence of the next step."""

    parent: int
    """Which of the sequences so far it continues."""
    token_id: int


class Hypothesis(NamedTuple):
    """A finished output."""

    records: tuple[TokenRecord, ...]
    score: float
    reason: EndReason


class Chooser(Protocol):
    """Chooses for one request. The step loop's thread calls it."""

    @property
    def awaits(self) -> int:
        """Sequences whose candidates it needs to choose next: one behind the prompt."""
        ...

    @property
    def scores(self) -> NDArray[np.float32]:
        """Scores of the sequences that go on, in their order: what the device adds up."""
        ...

    def choose(self, candidates: list[Candidates]) -> list[Continuation]:
        """The sequences that go on, from the candidates of those so far, in their order; empty: it
        is over."""
        ...

    def outputs(self) -> list[Hypothesis]:
        """What it found, best first."""
        ...
