"""A moving average of what is measured again and again."""

from __future__ import annotations

from typing import Final

NEW: Final = 0.2
"""Weight of the newest value: the latest five make two thirds of the average."""


def averaged(old: float, new: float) -> float:
    """The average with a new value. `old` is 0 while there is none: then the value is taken
    whole."""
    return old + NEW * (new - old) if old else new
