"""How a fetch ends, for metrics and traces: one word each."""

from __future__ import annotations

from typing import Final

FETCHED: Final = "fetched"
SHORT: Final = "short"
"""The holder had only the first of the pages."""
TIMED_OUT: Final = "late"
NO_PATH: Final = "no_path"
NOBODY_WAITS: Final = "nobody_waits"
INTERNAL: Final = "internal"
# Why nothing is given.
MISSING: Final = "missing"
"""None of the keys is here any more, or others get too many pages already."""
MALFORMED: Final = "malformed"
RANKS: Final = "ranks"
"""A worker of several ranks fetches nothing, and gives nothing."""
TRANSPORT: Final = "transport"
"""Nor does one with this transport."""
HOLDER_GONE: Final = "holder_gone"
"""A router knows no such worker that may give pages (`router.workers.between`)."""
OTHER: Final = "other"
"""A refusal names a cause that this worker does not know."""
REFUSALS: Final = frozenset({MISSING, MALFORMED, NO_PATH, RANKS, TRANSPORT, HOLDER_GONE})
"""The causes that a refusal of a holder or router may name."""


def outcome_of(cause: str) -> str:
    """The outcome of a fetch that was refused. The cause is a peer's word, which may be anything:
    it becomes a label of a metric only if it is known."""
    return cause if cause in REFUSALS else OTHER
