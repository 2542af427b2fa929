"""Errors of a benchmark."""

from __future__ import annotations


class BenchError(Exception):
    """A benchmark cannot run, or did not end. The message says why and what to do."""


class WrongUseError(BenchError):
    """The options make no sense, whatever the server does."""
