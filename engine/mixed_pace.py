"""How long a piece of a prompt may be beside sequences that decode, where their pace is bounded.

A piece lengthens a decode step about in proportion to its tokens, and each token costs the more the
more tokens are before it. Both change slowly from step to step. So the next step is taken to last
as long as decode steps do alone, and for each token of its piece what a token cost in the last
steps with one; the piece is the longest that fits. A step that was too long shortens the next one
at once, one that was too short lengthens it by one size.

The idea of a chunk as long as the time between tokens allows: Agrawal et al., Taming
Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve, OSDI 2024, where the length is
found before a server starts.
"""

from __future__ import annotations

from typing import Final

from engine.step import StepPlan

GRAIN_TOKENS: Final = 32
"""Pieces are a multiple of that: a GPU's graphs are made for those."""
LEAST_TOKENS: Final = 64
"""A prompt is computed in pieces of so many even where that takes longer than allowed. Somewhat
shorter ones, of short prompts or long pages, count as that: a GPU's graph pads them to it. Those
shorter than half of it say little about what a token costs."""
WEIGHT: Final = 0.5
"""Of the last step among all that were seen."""


class MixedPace:
    """Told of every settled step, in order; `tokens` is for the next one."""

    def __init__(self, most_tokens: int, step_s: float, page_size: int = 1) -> None:
        """
        Args:
            most_tokens: of a piece, whatever the pace.
            step_s: how long a step that decodes and computes a prompt may take; 0: no matter.
            page_size: tokens; a piece is at least one page.
        """
        self.tokens = most_tokens
        """Most prompt tokens of the next step that decodes, too."""
        self._most = most_tokens
        self._least = min(most_tokens, max(LEAST_TOKENS, page_size))
        self._step_s = step_s
        self._alone_s = 0.0
        """0 while no step has only decoded: all of a step is charged to its piece."""
        self._token_s = 0.0

    def settled(self, plan: StepPlan, step_s: float) -> None:
        """A step is done, and took so long on the device."""
        piece = plan.num_tokens - plan.num_decodes
        if not self._step_s or not plan.num_decodes:
            return
        if piece == 0:
            self._alone_s = _moved(self._alone_s, step_s)
        elif 2 * piece > self._least:
            longer_s = max(0.0, step_s - self._alone_s)
            self._token_s = _moved(self._token_s, longer_s / max(piece, self._least))
            self.tokens = self._fitting()

    def _fitting(self) -> int:
        room_s = self._step_s - self._alone_s
        fits = room_s / self._token_s if self._token_s else self._most
        sized = int(min(fits, self.tokens + GRAIN_TOKENS)) // GRAIN_TOKENS * GRAIN_TOKENS
        return max(self._least, min(self._most, sized))


def _moved(before: float, now: float) -> float:
    return (1 - WEIGHT) * before + WEIGHT * now if before else now
