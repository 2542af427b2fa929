"""The width of steps by what they cost and bring, over a device that the test makes up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from timed_device import plan

from engine.config import EngineConfig
from engine.speculation.choosing import SpeculationError, check
from engine.speculation.measured import PROBE_STEPS, MeasuredWidths
from engine.step.plan import StepResult

ROWS = (1, 2, 4, 8, 64, 256)


def times(token_s: float) -> dict[tuple[int, int], float]:
    """Of steps that read weights in 4 ms, and compute a token in `token_s`."""
    return {
        (rows, width): max(4e-3, token_s * rows * width)
        for rows in ROWS
        for width in (1, 2, 4)
    }  # fmt: skip


class Device:
    """Accepts each draft with one probability, and takes what the times say, and more for KV."""

    def __init__(
        self,
        token_s: float,
        acceptance: float,
        context: int = 100,
        fixed_s: float = 0.0,
        *,
        has_head: bool = False,
    ) -> None:
        """`has_head`: a step of W tokens verifies the drafts that the one before has made, which
        are as many as that has verified."""
        self._fixed_s = fixed_s
        self._has_head, self._made = has_head, 0
        self._times = times(token_s)
        self.widths = MeasuredWidths(self._times, drafts_by_width=has_head)
        self.tokens, self.seconds = 0, 0.0
        self._random = np.random.default_rng(1)
        self.acceptance = acceptance
        self._context = context

    def run(self, rows: int, steps: int) -> list[int]:
        """The widths of so many steps."""
        taken = []
        for _ in range(steps):
            width = self.widths.choose(rows, 8)
            accepts = self._random.random((rows, width - 1)) < self.acceptance
            there = min(width - 1, self._made) if self._has_head else width - 1
            accepts[:, there:], self._made = False, width - 1
            counts = 1 + np.cumprod(accepts, 1).sum(1).astype(np.int32)
            step = replace(
                plan(rows * width, rows), width=width,
                context_lens=np.full(rows, self._context, np.int32),
            )  # fmt: skip
            nothing = np.zeros(0, np.int32)
            result = StepResult(nothing, nothing > 0, None, None, None, counts=counts)
            result = replace(result, drafted=np.full(rows, there, np.int32))
            size = min(size for size in ROWS if size >= rows)
            seconds = self._times[size, width] + 1e-8 * rows * self._context + self._fixed_s
            self.widths.settled(step, result, seconds)
            self.tokens, self.seconds = self.tokens + counts.sum(), self.seconds + seconds
            taken.append(width)
        return taken


@pytest.mark.parametrize(
    ("rows", "acceptance", "want"),
    [(1, 0.3, 4), (64, 0.8, 4), (64, 0.05, 2), (256, 0.8, 1), (256, 0.9, 1)],
)
def test_the_width_with_the_most_tokens_a_second(rows, acceptance, want):
    """4 ms are 200 tokens of 20 us: 64 rows have room for 3 each, 256 for none."""
    taken = Device(20e-6, acceptance).run(rows, 400)
    assert taken[-2 * PROBE_STEPS :].count(want) >= 2 * PROBE_STEPS - 3


def test_the_choice_follows_acceptance_and_is_steady_meanwhile():
    device = Device(20e-6, 0.9)
    taken = device.run(64, 300)
    assert taken[-1] == 4
    device.acceptance = 0.02
    taken = device.run(64, 600)
    assert taken[-1] == 2
    assert (np.diff(taken) != 0).sum() < 600 / PROBE_STEPS * 2 + 12
    device.acceptance = 0.95
    assert device.run(64, 64 * 60)[-1] == 4, "probes tell when drafts are worth it again"


def test_the_first_steps_are_few_where_drafts_do_not_pay():
    assert Device(20e-6, 0.5).run(256, 40).count(4) <= 3


@pytest.mark.parametrize("acceptance", [0.1, 0.6, 0.9])
def test_a_heads_probes_cost_little(acceptance):
    """One that has to draft costs two steps. With any best width few tokens are lost by looking at
    others, and by first steps, which verify nothing."""
    device = Device(20e-6, acceptance, has_head=True)
    device.run(256, 1500)
    best = max(
        256 * sum(acceptance**j for j in range(width)) / (device._times[256, width] + 256e-6)
        for width in (1, 2, 4)
    )
    assert device.tokens / device.seconds > 0.985 * best
    assert Device(20e-6, 0.9, context=20000, has_head=True).run(256, 300)[-2] == 4


def test_reading_long_contexts_makes_drafts_cheap():
    """At 256 rows the products cost more than drafts bring, unless KV costs far more than they."""
    assert Device(20e-6, 0.8, context=100).run(256, 300)[-2] == 1
    assert Device(20e-6, 0.8, context=20000).run(256, 300)[-2] == 4


def test_what_one_row_costs_says_nothing_of_many():
    """A fixed cost of a step, learnt with one short row, is no cost of tokens in KV."""
    device = Device(20e-6, 0.8, fixed_s=5e-4)
    assert device.run(1, 500)[-1] == 4
    assert device.run(64, 40)[-1] == 4


def test_batches_beyond_the_graphs_of_a_width_have_another():
    known = {(rows, 1): 1e-3 for rows in ROWS} | {(8, 4): 1e-3}
    widths = MeasuredWidths(known)
    assert widths.choose(8, 8) == 4
    assert widths.choose(9, 8) == 1
    assert widths.choose(8, 3) == 1


@pytest.mark.parametrize(
    ("options", "device", "words"),
    [
        ({"load_format": "auto"}, "cuda", "synthetic_acceptance makes up the output"),
        ({"speculation": "off"}, "cuda", "needs speculation, and a GPU"),
        ({}, "cpu", "needs speculation, and a GPU"),
        ({"synthetic_acceptance": 1.5}, "cuda", "synthetic_acceptance 1.5 must be at most 1"),
    ],
)
def test_what_cannot_be_is_named(options, device, words):
    usual = {"load_format": "dummy", "speculation": "suffix", "synthetic_acceptance": 0.8}
    check(EngineConfig(model="m", **usual), "cuda")
    with pytest.raises(SpeculationError, match=words):
        check(EngineConfig(model="m", **usual | options), device)
