"""The token budget of a step, which falls when the device lacks memory."""

from __future__ import annotations

from typing import Final

from engine.bounds import Bounds

MAX_SHRINKS: Final = 3
"""Most steps in a row that may lack memory. The batch is an eighth by then and not the cause."""


class StepBudget:
    """Most new tokens in a step, and the failures in a row that have cut them."""

    def __init__(self, config: Bounds) -> None:
        self.tokens = config.max_step_tokens
        self.failures = 0
        """Failed steps in a row. A step in flight behind a failed one does not count."""
        self._most = config.max_step_tokens
        self._least = config.max_sequences + config.chunk_tokens

    def succeeded(self) -> None:
        """The device ran a step. A budget that was cut grows by one token."""
        self.failures = 0
        self.tokens = min(self.tokens + 1, self._most)

    @property
    def may_shrink(self) -> bool:
        """Whether a step that lacked memory may be tried again with fewer tokens."""
        return self.failures <= MAX_SHRINKS

    def shrink(self, num_tokens: int) -> None:
        """A step of so many tokens lacked memory: the next ones have half as many."""
        self.tokens = max(self._least, min(self.tokens, num_tokens) // 2)
