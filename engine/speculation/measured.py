"""Widths by what they cost and bring: the width with the most tokens a second.

A step of width W brings each row one token, and one for each draft accepted in a row. How many
these are is learnt from settled steps, position by position. What the step costs was measured when
its graph was captured, for rows of no length. What KV and the draw add is learnt from settled
steps, for all widths together: one that was not taken for long is not thought to be as it was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.step.plan import StepPlan, StepResult

MEMORY: Final = 1000
"""Rows verified after which a share is mostly new."""
FITTED: Final = 256
"""Steps after which what a fit knows is mostly new: some of them are probes."""
PROBE_STEPS: Final = 64
"""After so many steps one has the next width: at width 1 nothing else shows when drafts are worth
it again (`bench/README.md`: some 5 % of the tokens of full batches). As long as that changes
nothing, the next such step comes twice as late."""
MOST_PROBE_STEPS: Final = 512
"""A head drafts only where a step is to verify, so of 256 rows a probe takes as long as two steps
more: 1 to 2 % of the tokens, one of 64, and 0.3 % one of 512 (simulated)."""


class MeasuredWidths:
    """`Widths` by times that were measured. It belongs to the step loop's thread."""

    def __init__(
        self, times: Mapping[tuple[int, int], float], *, drafts_by_width: bool = False
    ) -> None:
        """`times`: seconds of a step of rows of no length, by rows and width. Width 1 is there.
        `drafts_by_width`: a step of W tokens a row makes W - 1 drafts; else all that there may be.
        """
        self.widths = tuple(sorted({width for _, width in times}))
        self.most = self.widths[-1]
        self._rows = {
            width: sorted(rows for rows, other in times if other == width) for width in self.widths
        }
        self._times = dict(times)
        self._more = _Fit(3)
        """Seconds beyond those captured: of a step, of a token in KV, and of a column drawn."""
        self._tokens = 0.0
        """In KV, of all rows of the newest step."""
        self._shares = np.ones(self.most)
        """Shares of rows whose column j counts, j from 0."""
        self._seen = np.ones(self.most)
        """Rows that the share was learnt from, and one whose drafts were all accepted: what the
        first row shows is chance."""
        self._turn = self._probes = 0
        self._best, self._interval = 0, PROBE_STEPS
        """The width chosen last, and steps between probes."""
        self._next_probe = PROBE_STEPS
        """The turn from which on the next width is tried."""
        self._drafts_by_width = drafts_by_width
        self._drafted = self.most
        """Tokens of a row for which the step before has made drafts."""

    def choose(self, rows: int, room: int) -> int:
        """See `Widths`."""
        self._turn += 1
        fitting = [
            width
            for width in self.widths
            if width <= max(room, 1) and rows <= self._rows[width][-1]
        ]
        best = max(fitting, key=lambda width: self._rate(rows, width))
        return self._neighbour(fitting, best) if self._is_probe(best) else best

    def _is_probe(self, best: int) -> bool:
        """Whether this turn tries another width than the best one."""
        if best != self._best:
            self._best, self._interval = best, PROBE_STEPS
            self._next_probe = min(self._next_probe, self._turn + PROBE_STEPS)
        since = self._turn - self._next_probe
        if since < 0:
            return False
        # Of a probe that has to make its own drafts only the second step tells something.
        if since >= self._drafts_by_width:
            self._probes += 1
            self._interval = min(2 * self._interval, MOST_PROBE_STEPS)
            self._next_probe = self._turn + self._interval
        return True

    def settled(self, plan: StepPlan, result: StepResult, step_s: float) -> None:
        """A step with decode rows has settled."""
        if plan.num_decodes == 0:
            return
        if plan.only_decodes:
            self._note_time(plan, step_s)
        has_drafts = plan.width <= self._drafted
        if self._drafts_by_width:
            self._drafted = plan.width
        if plan.width == 1 or result.counts is None or not has_drafts:
            return
        counts = result.counts[: plan.num_decodes]
        if self._drafts_by_width and result.drafted is not None:
            # A row's first step verifies none, whatever its head is worth.
            counts = counts[result.drafted[: plan.num_decodes] > 0]
        if len(counts) == 0:
            return
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
            share = float(self._shares[column]) if self._seen[column] > 1 else share * ratio
            ratio = share / before if before else 0.0
            total += share
        return total

    def step_s(self, rows: int, width: int) -> float:
        """Seconds of a step."""
        sizes = self._rows[width]
        captured = self._times[sizes[bisect_left(sizes, rows)], width]
        return captured + max(0.0, self._more.at(_features(self._tokens, rows * width)))

    def _rate(self, rows: int, width: int) -> float:
        return self.expected_tokens(width) / self.step_s(rows, width)

    def _note_time(self, plan: StepPlan, step_s: float) -> None:
        rows, sizes = plan.num_decodes, self._rows.get(plan.width, [])
        self._tokens = float(plan.context_lens[:rows].sum())
        if sizes and rows <= sizes[-1]:
            captured = self._times[sizes[bisect_left(sizes, rows)], plan.width]
            self._more.add(_features(self._tokens, plan.decode_tokens), step_s - captured)

    def _neighbour(self, fitting: list[int], width: int) -> int:
        """The next width above or below, in turns."""
        at, up = fitting.index(width), self._probes % 2 == 0
        if up and at + 1 < len(fitting):
            return fitting[at + 1]
        return fitting[at - 1] if at else fitting[min(1, len(fitting) - 1)]


def _features(tokens: float, columns: int) -> NDArray[np.float64]:
    """What a step has, each about 1: itself, tokens in KV, and columns drawn."""
    return np.array([1.0, tokens / 1e4, columns / 1e2])


class _Fit:
    """A linear function, by least squares with exponential forgetting. What the samples leave open
    is drawn towards 0 (ridge regression)."""

    def __init__(self, features: int) -> None:
        self._squares = np.zeros((features, features))
        self._products = np.zeros(features)
        self._ridge = np.eye(features) * 1e-3
        self._line: NDArray[np.floating[Any]] = np.zeros(features)

    def add(self, at: NDArray[np.float64], value: float) -> None:
        """The function has this value there."""
        self._squares *= 1 - 1 / FITTED
        self._products *= 1 - 1 / FITTED
        self._squares += np.outer(at, at)
        self._products += at * value
        self._line = np.linalg.solve(self._squares + self._ridge, self._products)

    def at(self, at: NDArray[np.float64]) -> float:
        """Its value there."""
        return float(self._line @ at)
