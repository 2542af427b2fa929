"""What pieces of a prompt cost beside sequences that decode: how long the next one may be where the
others' pace is bounded, and how fast a prompt would be computed.

A step is taken to last as long as decode steps alone do, by a straight line through their numbers
of sequences, and for each token of its piece as long as a token cost of late. A token costs the
more the more tokens are before it, so there are two figures. That of the last steps says how long
the next piece may be: a step that was too long shortens it at once, one that was too short
lengthens it by one size. That of whole prompts says what a new one would take, and is where its
first piece begins.

Routers send a prompt here where that is faster, so an estimate that is too slow would have nothing
to learn from: while no prompt comes it is forgotten, towards pieces that cost nothing.

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
LAST_SHARE: Final = 0.5
"""Of the last step in what a token cost of late."""
RETURN_SHARE: Final = 0.1
"""Of what a token usually costs in what the next one is taken to cost, for each step without."""
USUAL_TOKENS: Final = 16_384
"""So many prompt tokens tell what one usually costs: a long prompt's last ones cost twice as much
as its first."""
USUAL_STEPS: Final = 500
"""So many decode steps tell how long they are."""
FORGET_STEPS: Final = 10_000
"""After so many decode steps without a prompt, a minute or so, two thirds are forgotten."""


class MixedPace:
    """Told of every settled step, in order; the figures are for the next one."""

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
        self._decoding = _Line(USUAL_STEPS)
        self._alone_s = 0.0
        """A step of those who decode now; 0 while none has only decoded: all of a step is charged
        to its piece then."""
        self._token_s = 0.0
        self._usual_token_s = _Line(USUAL_TOKENS)

    @property
    def tokens_per_s(self) -> float:
        """How fast a prompt would be computed beside those who decode now; 0 while unknown."""
        if not self._usual_token_s.weight:
            return 0.0
        token_s = self._usual_token_s.mean
        piece = self._fitting(token_s)
        return piece / (self._alone_s + piece * token_s)

    def settled(self, plan: StepPlan, step_s: float) -> None:
        """A step is done, and took so long on the device."""
        piece, decodes = plan.num_tokens - plan.num_decodes, plan.num_decodes
        if not decodes:
            return
        if piece == 0:
            self._decoding.add(decodes, step_s)
            self._usual_token_s.forget(1 / FORGET_STEPS)
            self._token_s += RETURN_SHARE * (self._usual_token_s.mean - self._token_s)
        self._alone_s = self._decoding.at(decodes)
        if 2 * piece > self._least:
            self._learn(max(piece, self._least), step_s)
        self.tokens = min(self._fitting(self._token_s), self.tokens + GRAIN_TOKENS)

    def _learn(self, piece: int, step_s: float) -> None:
        token_s = max(0.0, step_s - self._alone_s) / piece
        self._token_s += (LAST_SHARE if self._token_s else 1) * (token_s - self._token_s)
        if self._alone_s:
            self._usual_token_s.add(0, token_s, piece)

    def _fitting(self, token_s: float) -> int:
        if not self._step_s or not token_s:
            return self._most
        fits = min(self._most, (self._step_s - self._alone_s) / token_s)
        return max(self._least, int(fits) // GRAIN_TOKENS * GRAIN_TOKENS)


class _Line:
    """A straight line through points, of which those count that came of late: least squares over
    weights that fall off, and a level line through one x. 0 before the first."""

    def __init__(self, most_weight: float) -> None:
        self._most_weight = most_weight
        self.weight = 0.0
        self.mean = 0.0
        """Of y."""
        self._mean_x = 0.0
        self._variance = self._covariance = 0.0

    def add(self, x: float, y: float, weight: float = 1) -> None:
        """A point that counts so much beside `most_weight` of all before it."""
        self.weight = min(self._most_weight, self.weight + weight)
        share = min(1.0, weight / self.weight)
        off_x, off_y = x - self._mean_x, y - self.mean
        self._mean_x += share * off_x
        self.mean += share * off_y
        self._variance = (1 - share) * (self._variance + share * off_x * off_x)
        self._covariance = (1 - share) * (self._covariance + share * off_x * off_y)

    def at(self, x: float) -> float:
        """Its y."""
        # Sequences come by ones: a spread far below that is what is left of another time.
        slope = self._covariance / (self._variance + 0.05)
        return self.mean + slope * (x - self._mean_x)

    def forget(self, share: float) -> None:
        """So much of it all, the height included."""
        self.weight *= 1 - share
        self.mean *= 1 - share
