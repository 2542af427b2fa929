"""Recent durations of steps, and their rate of computing prompts."""

from __future__ import annotations

import time
from collections.abc import Iterable

from engine.schedule.step import StepPlan

TELLING_TOKENS = 64
"""Least prompt tokens of a step that counts for the rate of computing prompts."""
UNKNOWN_STEP_S = 30.0
"""Announced duration of steps with prompts while no rate is known. The first one warms everything
up."""


class _MovingRate:
    """Tokens per second, a moving average over steps; 0 while unknown."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self._added = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since a step was last added, or since the start."""
        return time.monotonic() - self._added

    def add(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` tokens in `seconds`."""
        rate, old = tokens / max(seconds, 1e-6), self.tokens_per_s
        self.tokens_per_s = rate if old == 0 else 0.8 * old + 0.2 * rate
        self._added = time.monotonic()


class StepRates:
    """Durations and rates of steps. It is told of each settled step."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.prefill = _MovingRate()
        self.prompt_tokens = 0
        self.tokens_sampled = 0
        self._last_done = 0.0

    def began(self, launched_at: float) -> float:
        """Time at which a step began: at its launch, or when the step before it was done."""
        return max(launched_at, self._last_done)

    def settled(self, plan: StepPlan, launched_at: float) -> None:
        """The step is done."""
        now = time.monotonic()
        self.step_s = now - self.began(launched_at)
        self._last_done = now
        self.prompt_tokens += plan.prompt_tokens
        self.tokens_sampled += len(plan.sample_slots)
        if plan.prompt_tokens >= TELLING_TOKENS:
            self.prefill.add(plan.prompt_tokens, self.step_s)

    def usual_s(self, plan: StepPlan) -> float:
        """Usual duration of a step's prompts, seconds; 0 while unknown."""
        rate = self.prefill.tokens_per_s
        return plan.prompt_tokens / rate if rate else 0.0

    def expected_s(self, plans: Iterable[StepPlan]) -> float:
        """Expected duration of the steps in flight, seconds, if it is longer than usual."""
        tokens = sum(p.prompt_tokens for p in plans if p.prompt_tokens >= TELLING_TOKENS)
        if tokens and not self.prefill.tokens_per_s:
            return UNKNOWN_STEP_S
        return 2 * tokens / self.prefill.tokens_per_s if tokens else 0.0
