"""One thing that was looked at."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Level(enum.IntEnum):
    """How bad it is; the worst is the smallest."""

    ERROR = 0
    """Something does not work, or not as fast as it must."""
    WARNING = 1
    """It works, and somebody should know."""
    OK = 2


class Finding(NamedTuple):
    """What was found, and what to do about it."""

    level: Level
    subject: str
    """What was looked at, in a word or two."""
    found: str
    advice: str = ""
    """Set where something should be done."""


def ok(subject: str, found: str) -> Finding:
    """As it should be."""
    return Finding(Level.OK, subject, found)


def warning(subject: str, found: str, advice: str) -> Finding:
    """Works, but."""
    return Finding(Level.WARNING, subject, found, advice)


def error(subject: str, found: str, advice: str) -> Finding:
    """Does not work."""
    return Finding(Level.ERROR, subject, found, advice)
