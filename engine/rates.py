"""What steps took of late, and how fast they compute prompts."""

from __future__ import annotations

import time

from engine.step import StepPlan

TELLING_TOKENS = 64
"""Steps with fewer prompt tokens say nothing about the rate of computing prompts."""
UNKNOWN_STEP_S = 30.0
"""Announced for steps with prompts while no rate is known: the first one warms everything up."""


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
        """A step computed so many tokens."""
        rate, old = tokens / max(seconds, 1e-6), self.tokens_per_s
        self.tokens_per_s = rate if old == 0 else 0.8 * old + 0.2 * rate
        self._added = time.monotonic()


class StepRates:
    """How long steps take, and what they compute: told of each one that is launched and settled."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.prefill = _MovingRate()
        self.prompt_tokens = 0
        self.tokens_sampled = 0
        self._began: dict[int, float] = {}
        self._prompts: dict[int, int] = {}
        """Prompt tokens of each step in flight that has so many that they tell."""
        self._last_done = 0.0

    def launched(self, plan: StepPlan) -> None:
        """The step is about to be launched."""
        self._began[plan.number] = time.monotonic()
        if (prompt := plan.num_tokens - plan.num_decodes) >= TELLING_TOKENS:
            self._prompts[plan.number] = prompt

    def began(self, plan: StepPlan) -> float:
        """When a launched step began: at its launch, or when the step before it was done."""
        return max(self._began[plan.number], self._last_done)

    def settled(self, plan: StepPlan) -> None:
        """The step is done."""
        now = time.monotonic()
        self.step_s = now - self.began(plan)
        self._landed(plan)
        self._last_done = now
        prompt = plan.num_tokens - plan.num_decodes
        self.prompt_tokens += prompt
        self.tokens_sampled += len(plan.sample_slots)
        if prompt >= TELLING_TOKENS:
            self.prefill.add(prompt, self.step_s)

    def failed(self, plan: StepPlan) -> None:
        """The step did not run: it says nothing about rates."""
        self._landed(plan)

    def _landed(self, plan: StepPlan) -> None:
        del self._began[plan.number]
        self._prompts.pop(plan.number, None)

    def usual_s(self, plan: StepPlan) -> float:
        """How long a step's prompts usually take; 0: nobody knows."""
        rate = self.prefill.tokens_per_s
        return (plan.num_tokens - plan.num_decodes) / rate if rate else 0.0

    def expected_s(self) -> float:
        """How long the steps in flight may take, if that is longer than usual."""
        if not self._prompts:
            return 0.0
        if self.prefill.tokens_per_s == 0:
            return UNKNOWN_STEP_S
        return 2 * sum(self._prompts.values()) / self.prefill.tokens_per_s
