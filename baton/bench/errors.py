"""What keeps a benchmark from being run."""

from __future__ import annotations


class BenchError(Exception):
    """It cannot be run, or did not come to its end; the message says why and what to do."""


class WrongUseError(BenchError):
    """What was asked for cannot be measured, whatever the server does."""
