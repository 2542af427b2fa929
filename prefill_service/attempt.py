"""One attempt at a prefill worker, as the event loop sees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.worker_attempts import Attempt


class PrefillState(enum.IntEnum):
    """State of an attempt under way; failure is the smallest."""

    QUIESCING = 0
    RECEIVED = 1
    COMPUTING = 2
    SENDING = 3


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillAttempt(Attempt):
    """One attempt, as the event loop sees it."""

    state: PrefillState = PrefillState.RECEIVED
    computed_tokens: int = 0
    """Tokens of the prompt whose KV is there, cached ones included."""
    chunks: int = 0
    computed_ns: int = 0
    sending_s: float | None = None
    """Since when only its send has been left of it: computed and granted, or given up after its
    grant; on the table's clock."""
    deadline_s: float = 0.0
    """What `expires_s` was before it was cut short for the grant."""
    error: str = ""
    """Why it ended before it was delivered, where that was no success."""
