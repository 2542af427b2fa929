"""How an unexpected exception is logged: its type and place, never its text."""

from __future__ import annotations

import traceback


def describe(error: BaseException) -> str:
    """Type and innermost place of an exception, such as "ValueError at wire.py:71"."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    file_name = frames[-1].filename.rpartition("/")[2]
    return f"{type(error).__name__} at {file_name}:{frames[-1].lineno}"
