"""Recent durations of steps, and their rate of computing prompts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from engine.averages import averaged
from engine.step.plan import StepPlan

TELLING_TOKENS = 64
"""Least prompt tokens of a step that counts for the rate of computing prompts."""
UNKNOWN_STEP_S = 30.0
"""Announced duration of steps with prompts while no rate is known. The first one warms everything
up."""
_NEW_IN_FIT = 0.05
"""Weight of the newest step in a fit, which needs steps of many contexts."""
_ALIKE_TOKENS = 256
"""Contexts that differ by less than this say little about what a context costs."""


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
        self.tokens_per_s = averaged(self.tokens_per_s, tokens / max(seconds, 1e-6))
        self._added = time.monotonic()


class TokenCost(NamedTuple):
    """Seconds to compute a prompt token: `token_s + context_s * tokens before it`."""

    token_s: float = 0.0
    """0 while unknown."""
    context_s: float = 0.0


class _ContextFit:
    """What a prompt token costs, by the number of tokens before it.

    A line through (mean context, seconds per token) of steps, by least squares with exponential
    forgetting. Steps whose contexts are about equal say nothing about the slope, so that of
    variances below `_ALIKE_TOKENS` squared is drawn towards 0 (ridge regression).
    """

    def __init__(self) -> None:
        self._context = self._seconds = self._variance = self._covariance = 0.0
        self._is_known = False

    def add(self, context: float, seconds: float) -> None:
        """A step took `seconds` for each token, with `context` tokens before it on average."""
        weight = _NEW_IN_FIT if self._is_known else 1.0
        off_context, off_seconds = context - self._context, seconds - self._seconds
        self._context += weight * off_context
        self._seconds += weight * off_seconds
        kept = 1 - weight
        self._variance = kept * (self._variance + weight * off_context**2)
        self._covariance = kept * (self._covariance + weight * off_context * off_seconds)
        self._is_known = True

    @property
    def cost(self) -> TokenCost:
        """The line, which neither falls nor begins below half of the mean."""
        slope = max(0.0, self._covariance / (self._variance + _ALIKE_TOKENS**2))
        base = max(self._seconds - slope * self._context, self._seconds / 2)
        return TokenCost(base, (self._seconds - base) / self._context if self._context else 0.0)


class _ChunkDelay:
    """How much longer steps that decode take with a prompt's chunk beside the rows."""

    def __init__(self) -> None:
        self.tokens = 0.0
        """Tokens of such a chunk, on average."""
        self._without_s = self._with_s = 0.0

    def add(self, prompt_tokens: int, seconds: float) -> None:
        """A step with decode rows took `seconds`."""
        if not prompt_tokens:
            self._without_s = averaged(self._without_s, seconds)
            return
        self._with_s = averaged(self._with_s, seconds)
        self.tokens = averaged(self.tokens, prompt_tokens)

    @property
    def seconds(self) -> float:
        """The delay; 0 while unknown."""
        is_known = self._without_s and self._with_s
        return max(0.0, self._with_s - self._without_s) if is_known else 0.0


class StepRates:
    """Durations and rates of steps. It sees each settled step."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.prefill = _MovingRate()
        self.chunk = _ChunkDelay()
        self.prompt_tokens = 0
        self.tokens_sampled = 0
        self._fit = _ContextFit()
        self._last_done = 0.0

    @property
    def token_cost(self) -> TokenCost:
        """What a prompt token costs here."""
        return self._fit.cost

    def began(self, launched_at: float) -> float:
        """Time at which a step began: at its launch, or when the step before it was done."""
        return max(launched_at, self._last_done)

    def settled(
        self, plan: StepPlan, launched_at: float, ended_at: float, tokens: int | None = None
    ) -> None:
        """The step is done, and has drawn so many tokens; None: one a draw."""
        self.step_s = ended_at - self.began(launched_at)
        self._last_done = ended_at
        self.prompt_tokens += plan.prompt_tokens
        self.tokens_sampled += len(plan.sample_slots) if tokens is None else tokens
        if plan.num_decodes:
            self.chunk.add(plan.prompt_tokens, self.step_s)
        if plan.prompt_tokens >= TELLING_TOKENS:
            self.prefill.add(plan.prompt_tokens, self.step_s)
            self._fit.add(_mean_context(plan), self.step_s / plan.prompt_tokens)

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


def _mean_context(plan: StepPlan) -> float:
    """Tokens before a prompt token of the step, on average."""
    new, after = plan.query_lens[plan.num_decodes :], plan.context_lens[plan.num_decodes :]
    return float((new * (after - new / 2)).sum()) / plan.prompt_tokens
