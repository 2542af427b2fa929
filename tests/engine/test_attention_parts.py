"""How decode attention divides contexts, and when it takes rows for different."""

from __future__ import annotations

import numpy as np
import pytest

from engine.attention.parts import (
    LEAST_PARTS,
    MOST_PARTS,
    PROCESSORS,
    division,
    has_two,
    lengths_differ,
)


def contexts(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("rows", [1, 2, 9, 16, 17, 64, 128, 256, 1024])
def test_divisions(rows: int, kv_heads: int) -> None:
    different, alike = (division(rows, kv_heads, differ=differ) for differ in (True, False))
    assert (different != alike) is has_two(rows, kv_heads) is (rows * kv_heads > 32)
    assert LEAST_PARTS <= different.most <= MOST_PARTS
    assert different.most * rows * kv_heads <= max(4096, LEAST_PARTS * rows * kv_heads)
    if rows * kv_heads > PROCESSORS:
        assert alike.most == 1
    elif has_two(rows, kv_heads):
        assert 1 < alike.most < different.most


@pytest.mark.parametrize(
    ("rows", "differ"),
    [
        (contexts(*[1152] * 64), False),
        (contexts(*range(800, 1500, 11)), False),
        (contexts(*[300] * 63, 4000), True),
        (contexts(*[100] * 63, 1000), False),
        (contexts(*[2176] * 256), False),
        (contexts(*range(1000, 3300, 9)), True),
        (contexts(100, 8000), True),
        (contexts(), False),
    ],
)
def test_rows_differ_where_the_longest_has_parts(rows: np.ndarray, differ: bool) -> None:
    """The fourth has no context of two parts."""
    assert lengths_differ(rows, 8) is differ


def test_long_sums_do_not_overflow() -> None:
    assert not lengths_differ(contexts(*[1 << 24] * 1024), 8)
