"""What pieces of a prompt cost beside sequences that decode: how long the next one may be where the
others' pace is bounded, and how fast a prompt would be computed.

A step is taken to last as long as decode steps alone do, by a straight line through their numbers
of sequences, and for each token of its piece as long as a token cost of late. A token costs the
more the more tokens are before it, so there are two figures. That of the last steps says how long
the next piece may be: a step that was too long shortens it at once, one that was too short
lengthens it by one size. That of whole prompts says what a new one would take, and is where its
first piece begins.

Routers send a prompt here where that is faster, so an estimate that is too slow would have nothing
to learn from. What was seen is forgotten, then, and from little nothing is concluded.

The idea of a chunk as long as the time between tokens allows: Agrawal et al., Taming
Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve, OSDI 2024, where the length is
found before a server starts.
"""

from __future__ import annotations

import math
from typing import Final

from engine.late_budget import SHORT_STEPS
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
DECODE_STEPS: Final = 500
"""So many decode steps tell how long they are."""
HELD_UP: Final = 3.0
"""A step that took so many times as long as expected was held up by something else, and counts as
so long: one of 0.3 s would tell of itself for half a minute."""
DOUBT_TOKENS: Final = 512
"""An estimate from fewer tells little."""
FORGET_STEPS: Final = 3000
"""After so many decode steps without a prompt, some 20 s, two thirds of what was seen is gone.
Four times as long, and it is worth no more than those in doubt."""


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
        self._decoding = _Line()
        self._alone_s = 0.0
        """A step of those who decode now; 0 while none has only decoded: all of a step is charged
        to its piece then."""
        self._token_s = 0.0
        self._long_token_s = 0.0
        """In steps with more than `most_tokens`, for which others' tokens come late."""
        self._since_long = 0
        """Decode steps."""
        self._usual = _Usual()

    @property
    def tokens_per_s(self) -> float:
        """How fast a prompt would be computed beside those who decode now, and keep their pace; 0
        while unknown."""
        token_s = self._usual.hoped
        if not token_s or self._usual.is_in_doubt:
            return 0.0
        piece = min(self._fitting(token_s), self._room_s / token_s)
        return max(1.0, piece / (self._alone_s + piece * token_s))

    @property
    def has_room(self) -> bool:
        """Whether those who decode now leave a piece any time within their pace."""
        return self._room_s > 0

    def settled(self, plan: StepPlan, step_s: float) -> None:
        """A step is done, and took so long on the device."""
        piece, decodes = plan.num_tokens - plan.num_decodes, plan.num_decodes
        if not decodes:
            return
        self._alone_s = self._decoding.at(decodes)
        if piece > self._most:
            self._learn_long(piece, step_s)
            return
        if self._token_s if piece else self._alone_s:
            step_s = min(step_s, HELD_UP * (self._alone_s + piece * self._token_s))
        if piece == 0:
            self._decoding.add(decodes, step_s)
            self._alone_s = self._decoding.at(decodes)
            self._usual.forget(1 / FORGET_STEPS)
            self._since_long += 1
            if self._since_long == FORGET_STEPS:  # Too slow, it would keep all others away.
                self._long_token_s = 0.0
            self._token_s += RETURN_SHARE * (self._usual.hoped - self._token_s)
        if 2 * piece > self._least:
            self._learn(max(piece, self._least), step_s)
        self.tokens = min(self._fitting(self._token_s), self.tokens + GRAIN_TOKENS)

    def _learn(self, piece: int, step_s: float) -> None:
        token_s = max(0.0, step_s - self._alone_s) / piece
        self._token_s += (LAST_SHARE if self._token_s else 1) * (token_s - self._token_s)
        if self._alone_s:
            self._usual.add(token_s, piece)

    def long_tokens_per_s(self, piece: int) -> float:
        """How fast prompts are computed beside those who decode now in steps with so many tokens of
        them, more than the pace allows, and the short ones between; 0 while unknown."""
        if not self._long_token_s:
            return 0.0
        between = SHORT_STEPS * self.tokens
        alone_s = (1 + SHORT_STEPS) * self._alone_s
        pieces_s = piece * self._long_token_s + between * self._usual.hoped
        return (piece + between) / (alone_s + pieces_s)

    def _learn_long(self, piece: int, step_s: float) -> None:
        self._since_long = 0
        token_s = max(0.0, step_s - self._alone_s) / piece
        if self._long_token_s:
            token_s = min(token_s, HELD_UP * self._long_token_s)
        self._long_token_s += (LAST_SHARE if self._long_token_s else 1) * (
            token_s - self._long_token_s
        )

    @property
    def _room_s(self) -> float:
        """Of a step for its piece."""
        return self._step_s - self._alone_s if self._step_s else math.inf

    def _fitting(self, token_s: float) -> int:
        if self._room_s <= 0:
            return self._least
        fits = min(self._most, self._room_s / token_s) if token_s else self._most
        if fits == self._most:
            return self._most
        return max(self._least, int(fits) // GRAIN_TOKENS * GRAIN_TOKENS)


class _Usual:
    """What a token costs over whole prompts, seconds; 0 while unknown."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._seen_tokens = 0.0

    @property
    def is_in_doubt(self) -> bool:
        """Too little was seen, or too long ago."""
        return self._seen_tokens < DOUBT_TOKENS

    @property
    def hoped(self) -> float:
        """As if DOUBT_TOKENS more had been seen that cost nothing."""
        return self._mean_s * self._seen_tokens / (self._seen_tokens + DOUBT_TOKENS)

    def add(self, token_s: float, tokens: int) -> None:
        """So many cost that much each."""
        self._seen_tokens = min(USUAL_TOKENS, self._seen_tokens + tokens)
        self._mean_s += tokens / max(tokens, self._seen_tokens) * (token_s - self._mean_s)

    def forget(self, share: float) -> None:
        """So much of what was seen."""
        self._seen_tokens *= 1 - share


class _Line:
    """A straight line through points, of which those of late count: least squares with weights that
    fall off. It neither falls nor goes below 0: more sequences take no less time, and none none."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = 0.0
        self._variance = self._covariance = 0.0

    def add(self, x: float, y: float) -> None:
        """A point."""
        self._weight = min(DECODE_STEPS, self._weight + 1)
        share = 1 / self._weight
        off_x, off_y = x - self._x, y - self._y
        self._x += share * off_x
        self._y += share * off_y
        self._variance = (1 - share) * (self._variance + share * off_x * off_x)
        self._covariance = (1 - share) * (self._covariance + share * off_x * off_y)

    def at(self, x: float) -> float:
        """Its y, where x > 0; 0 before the first point."""
        if not self._x:
            return 0.0
        # Sequences come by ones: a spread far below that is what is left of another time.
        slope = self._covariance / (self._variance + 0.01)
        return self._y + min(max(0.0, slope), self._y / self._x) * (x - self._x)
