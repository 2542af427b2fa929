"""How many tokens of each row a step computes."""

from __future__ import annotations

from typing import Protocol


class Widths(Protocol):
    """Chooses the width of steps. It belongs to the step loop's thread."""

    most: int
    """The largest width."""

    def choose(self, rows: int) -> int:
        """Tokens of each row in the next step, 1 to `most`, if it has so many decode rows. 1: no
        draft is verified."""
        ...


class FixedWidth:
    """Always the same width: where a column without a draft costs nothing, as in
    `engine.speculation.verifying`."""

    def __init__(self, most: int) -> None:
        self.most = most

    def choose(self, rows: int) -> int:
        """See `Widths`."""
        return self.most
