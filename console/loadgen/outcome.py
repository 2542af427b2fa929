"""One request as its client saw it, and the report of one sender process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

OK: Final = "OK"
SHORT: Final = "SHORT"
"""The answer ended without an error, but with fewer tokens than were forced."""
PROTOCOL: Final = "PROTOCOL"
"""The answer is malformed, or tokens in it are missing or doubled."""
NO_TOKEN_IDS: Final = "NO_TOKEN_IDS"
"""A conversation cannot go on: the server does not send the tokens of its answers."""
TIMEOUT: Final = "TIMEOUT"
UNREACHABLE: Final = "UNREACHABLE"


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds after the start of the run."""

    number: int
    """Number of the request, in the order of due times."""
    due_s: float
    sent_s: float
    prompt_tokens: int
    arrivals_s: NDArray[np.float64]
    """Arrival of each message that carried tokens."""
    ended_s: float
    """End of the answer, whatever the status."""
    tokens: int
    """Number of tokens received."""
    status: str
    """`OK`, one of the words above, or the server's own word: a gRPC reason, `HTTP 429`."""
    trace_id: str = ""
    cached_tokens: int = 0
    """Prompt tokens that the server found cached, as its usage says."""
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Cached tokens that came from beyond the pool, by source."""
    turn: int = -1
    """Index of its turn in a conversation; -1: it is in none."""

    @property
    def ok(self) -> bool:
        """Whether the answer was complete and had at least one token."""
        return self.status == OK and len(self.arrivals_s) > 0

    @property
    def lag_s(self) -> float:
        """Delay between due time and sending, seconds."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return float(self.arrivals_s[0]) - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the last token."""
        return float(self.arrivals_s[-1]) - self.sent_s

    @property
    def gaps_s(self) -> NDArray[np.float64]:
        """Seconds between messages. A hand-off lengthens the first gap."""
        return np.diff(self.arrivals_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds a token after the first message; None without a second message."""
        if self.tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return float(self.arrivals_s[-1] - self.arrivals_s[0]) / (self.tokens - 1)

    @property
    def times_s(self) -> dict[str, float]:
        """Times of a complete request that service levels bound, seconds; 0 where a single message
        leaves one undefined. `itl_p99` is the 99th percentile of the request's own gaps."""
        gaps_s = self.gaps_s
        return {
            "ttft": self.ttft_s,
            "itl_p99": float(np.percentile(gaps_s, 99)) if len(gaps_s) else 0.0,
            "tpot": self.tpot_s or 0.0,
            "e2e": self.e2e_s,
        }


@dataclass(slots=True)
class SenderReport:
    """The report of one sender process: its requests, and its own load."""

    outcomes: list[Outcome] = field(default_factory=list)
    loop_lags_s: list[float] = field(default_factory=list)
    """Samples of how late its event loop woke up: a message may be stamped as late."""
    cpu_s: float = 0.0
    """CPU seconds of the process during the run."""
    wall_s: float = 0.0
