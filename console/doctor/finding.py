"""The result of one check."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Level(enum.IntEnum):
    """How bad a finding is; the worst is the smallest number."""

    ERROR = 0
    """It does not work, or far too slowly."""
    WARNING = 1
    """It works, but somebody should know."""
    OK = 2


class Finding(NamedTuple):
    """The result of one check, and advice."""

    level: Level
    subject: str
    """The checked thing, in a word or two."""
    found: str
    advice: str = ""
    """What to do; empty if nothing is to be done."""


def ok(subject: str, found: str) -> Finding:
    """A finding that all is well."""
    return Finding(Level.OK, subject, found)


def warning(subject: str, found: str, advice: str) -> Finding:
    """A finding that something works with a restriction."""
    return Finding(Level.WARNING, subject, found, advice)


def error(subject: str, found: str, advice: str) -> Finding:
    """A finding that something does not work."""
    return Finding(Level.ERROR, subject, found, advice)
