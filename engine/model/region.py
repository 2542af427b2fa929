"""Which part of a tensor a rank holds.

Shapes: N output channels (rows), K input channels (columns) of a weight.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Range(NamedTuple):
    """Places [start, end) of one dimension."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """How many places."""
        return self.end - self.start

    @property
    def slice(self) -> slice:
        """The range as an index."""
        return slice(self.start, self.end)

    def over(self, unit: int) -> Range:
        """The units of so many places that these touch."""
        return Range(self.start // unit, -(-self.end // unit))


class Region(NamedTuple):
    """Some rows and columns of a weight [N, K]."""

    shape: tuple[int, int]
    """Shape of the whole weight."""
    rows: Range
    columns: Range

    @classmethod
    def whole(cls, outputs: int, inputs: int) -> Region:
        """All of a weight."""
        return cls((outputs, inputs), Range(0, outputs), Range(0, inputs))

    @classmethod
    def some_rows(cls, shape: tuple[int, int], rows: Range) -> Region:
        """Whole rows."""
        return cls(shape, rows, Range(0, shape[1]))

    @classmethod
    def some_columns(cls, shape: tuple[int, int], columns: Range) -> Region:
        """Whole columns."""
        return cls(shape, Range(0, shape[0]), columns)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.size == self.shape

    @property
    def size(self) -> tuple[int, int]:
        """Its rows and columns."""
        return self.rows.size, self.columns.size

    def of(self, tensor: Tensor, rows: int = 1, columns: int = 1) -> Tensor:
        """Cuts a tensor that has an entry for each `rows` x `columns` of the whole weight."""
        return tensor[self.rows.over(rows).slice, self.columns.over(columns).slice]
