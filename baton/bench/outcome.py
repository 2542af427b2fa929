"""What a client saw of one request, and what a sender process says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

OK: Final = "OK"
SHORT: Final = "SHORT"
"""The answer ended well, with fewer tokens than were forced."""
PROTOCOL: Final = "PROTOCOL"
"""The answer cannot be understood, or tokens in it are missing or doubled."""
TIMEOUT: Final = "TIMEOUT"
UNREACHABLE: Final = "UNREACHABLE"


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds after the start of the run."""

    number: int
    """In the order in which requests are due."""
    due_s: float
    sent_s: float
    prompt_tokens: int
    arrivals_s: NDArray[np.float64]
    """Of messages that carried tokens."""
    ended_s: float
    """When nothing more came, whatever the status."""
    tokens: int
    """Received."""
    status: str
    """`OK`, one of the words above, or the server's own: a gRPC reason, `HTTP 429`."""
    trace_id: str = ""

    @property
    def ok(self) -> bool:
        """Whether it got all it asked for, in more than no token."""
        return self.status == OK and len(self.arrivals_s) > 0

    @property
    def lag_s(self) -> float:
        """How late it was sent."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """From sending it to its first token."""
        return float(self.arrivals_s[0]) - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending it to its last token."""
        return float(self.arrivals_s[-1]) - self.sent_s

    @property
    def gaps_s(self) -> NDArray[np.float64]:
        """Between messages; the first is the one that a hand-off stretches."""
        return np.diff(self.arrivals_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first message; None where nothing followed it."""
        if self.tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return float(self.arrivals_s[-1] - self.arrivals_s[0]) / (self.tokens - 1)


@dataclass(slots=True)
class SenderReport:
    """What one sender process did, and how it did."""

    outcomes: list[Outcome] = field(default_factory=list)
    loop_lags_s: list[float] = field(default_factory=list)
    """How late its event loop woke up, sampled: how late a message may have been stamped."""
    cpu_s: float = 0.0
    """CPU time of the process during the run."""
    wall_s: float = 0.0
