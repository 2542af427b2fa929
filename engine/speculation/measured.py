"""Widths by what they cost and bring: the width with the most tokens a second.

A step of width W brings each row one token, and one for each draft accepted in a row. How many
these are is learnt from settled steps, position by position. What the step costs was measured when
its graph was captured, for rows of no length. What a length adds, and the draw, is learnt from
settled steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

import numpy as np

from engine.step.plan import StepPlan, StepResult

MEMORY: Final = 1000
"""Rows verified after which a share is mostly new."""
STEPS: Final = 32
"""Least steps of a width before another one is taken for good."""
GAIN: Final = 1.03
"""Another width must bring this much more."""
PROBE_STEPS: Final = 64
"""Every so many steps one has the next width, so that what is known of it stays true."""


class MeasuredWidths:
    """`Widths` by times that were measured. It belongs to the step loop's thread."""

    def __init__(self, times: Mapping[tuple[int, int], float]) -> None:
        """`times`: seconds of a step of rows of no length, by rows and width. Width 1 is there."""
        self.widths = tuple(sorted({width for _, width in times}))
        self.most = self.widths[-1]
        self._rows = {
            width: sorted(rows for rows, other in times if other == width) for width in self.widths
        }
        self._times = dict(times)
        self._costs: dict[int, float] = {}
        """By width: seconds that a token in KV adds."""
        self._tokens = 0.0
        """In KV, of all rows of the newest step."""
        self._shares = np.ones(self.most)
        """Shares of rows whose column j counts, j from 0."""
        self._seen = np.zeros(self.most)
        """Rows that have told the share."""
        self._width = self.most
        self._since, self._turn = STEPS, 0

    def choose(self, rows: int, room: int) -> int:
        """See `Widths`."""
        self._since += 1
        self._turn += 1
        fitting = [
            width
            for width in self.widths
            if width <= max(room, 1) and rows <= self._rows[width][-1]
        ]
        if self._width not in fitting:
            self._take(fitting[-1])
        best = max(fitting, key=lambda width: self._rate(rows, width))
        if self._since >= STEPS and self._rate(rows, best) > GAIN * self._rate(rows, self._width):
            self._take(best)
        if self._turn % PROBE_STEPS == 0:
            return self._neighbour(fitting)
        return self._width

    def settled(self, plan: StepPlan, result: StepResult, step_s: float) -> None:
        """A step with decode rows has settled."""
        if plan.num_decodes == 0:
            return
        if plan.only_decodes:
            self._note_time(plan, step_s)
        if plan.width == 1 or result.counts is None:
            return
        counts = result.counts[: plan.num_decodes]
        for column in range(1, min(plan.width, self.most)):
            share = float((counts > column).mean())
            self._seen[column] += len(counts)
            weight = min(1.0, len(counts) / min(self._seen[column], MEMORY))
            self._shares[column] += weight * (share - self._shares[column])

    def expected_tokens(self, width: int) -> float:
        """Tokens of a row that a step of this width is expected to give. A position that was never
        seen is as its predecessor: where nothing is known, every draft is accepted."""
        total, share, ratio = 1.0, 1.0, 1.0
        for column in range(1, width):
            before = share
            share = float(self._shares[column]) if self._seen[column] else share * ratio
            ratio = share / before if before else 0.0
            total += share
        return total

    def step_s(self, rows: int, width: int) -> float:
        """Seconds of a step."""
        sizes = self._rows[width]
        captured = self._times[sizes[bisect_left(sizes, rows)], width]
        return captured + self._cost(width) * self._tokens

    def _rate(self, rows: int, width: int) -> float:
        return self.expected_tokens(width) / self.step_s(rows, width)

    def _cost(self, width: int) -> float:
        """Cost of a step of this width, or of the nearest width that was measured."""
        if not self._costs:
            return 0.0
        return self._costs[min(self._costs, key=lambda other: abs(other - width))]

    def _note_time(self, plan: StepPlan, step_s: float) -> None:
        tokens = float(plan.context_lens[: plan.num_decodes].sum())
        sizes = self._rows.get(plan.width, [])
        self._tokens = tokens
        if not sizes or plan.num_decodes > sizes[-1]:
            return
        captured = self._times[sizes[bisect_left(sizes, plan.num_decodes)], plan.width]
        cost = max(0.0, step_s - captured) / max(tokens, 1.0)
        known = self._costs.get(plan.width)
        self._costs[plan.width] = cost if known is None else known + (cost - known) / STEPS

    def _take(self, width: int) -> None:
        if width != self._width:
            self._width, self._since = width, 0

    def _neighbour(self, fitting: list[int]) -> int:
        """The next width above or below, in turns."""
        at, up = fitting.index(self._width), self._turn // PROBE_STEPS % 2 == 0
        if up and at + 1 < len(fitting):
            return fitting[at + 1]
        return fitting[at - 1] if at else fitting[min(1, len(fitting) - 1)]
