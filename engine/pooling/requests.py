"""How the hidden states of a prompt are pooled, and the event that has the result.

The device adds up rows of the last hidden states (`engine.sampling.pooling`), chunk by chunk. The
host ends it here: it divides, multiplies by the head that scores, cuts and normalises.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class PoolKind(enum.IntEnum):
    """Which hidden states of a prompt are pooled."""

    LAST = 0
    """The state of the last token."""
    MEAN = 1
    """The mean of all tokens."""
    FIRST = 2
    """The state of the first token, which encoders call CLS."""


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    """What a request wants of its prompt's hidden states."""

    kind: PoolKind = PoolKind.LAST
    normalise: bool = False
    """Whether the vector gets length 1, after it was cut."""
    dimensions: int = 0
    """Leading numbers to keep; 0: all."""
    scores: bool = False
    """Whether the numbers are those of the checkpoint's head that scores."""
    head: Floats | None = None
    """The head, [L, H]. `Engine.submit` sets it."""

    @property
    def reads_all(self) -> bool:
        """Whether a token that the prefix cache has must be computed all the same, because its
        hidden state is read."""
        return self.kind is not PoolKind.LAST

    def rows(self, start: int, end: int, tokens: int) -> tuple[int, int] | None:
        """The tokens of a chunk [start, end) of a prompt of `tokens` tokens whose states are added
        up: the first one's place in the chunk, and their number. None: the chunk has none."""
        if self.kind is PoolKind.MEAN:
            return 0, end - start
        if self.kind is PoolKind.FIRST:
            return (0, 1) if start == 0 else None
        return (end - start - 1, 1) if end == tokens else None

    def finish(self, total: NDArray[np.float64], tokens: int) -> Floats:
        """Makes the result of the sum [H] of the states that were read: [L] scores, or an
        embedding."""
        values = total / tokens if self.kind is PoolKind.MEAN else total
        if self.head is not None:
            values = self.head.astype(np.float64) @ values
        if self.dimensions:
            values = values[: self.dimensions]
        if self.normalise:
            values = values / max(float(np.linalg.norm(values)), 1e-12)
        return values.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """POOL: the result. The engine holds nothing of the request any more."""

    request_id: bytes
    values: Floats
    """[H], [D] where it was cut, or [L] scores."""
    at_ns: int
