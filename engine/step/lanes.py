"""Which sequences decode in the next step, where several steps are in flight.

Through S stages, S steps run at the same time. So each has at most 1/S of the sequences that
decode, those that have waited longest: a lane. One more step is in flight, launched before the host
knows the tokens of the lane's last one. The device has them: in its table, or it waits for them
(`engine.step.feedback`). So no stage waits for the host. With one stage, that is the next step of
all sequences.

A lane whose last step still runs in an early stage would keep the first one waiting. Others go
first, and prompts: it goes on where there is nothing else to launch. A sequence whose draw waits
for masks goes on when its last token is known on the host, because the last stage would wait for
them.

With several stages, a prompt's chunk needs only what chunks before it store, and stages run steps
in order. So it is a step of its own. Where there are rows as well, one comes behind a step of each
lane.

K chunks through S stages take as long as K + S - 1 of a stage. So a prompt that waits alone has
smaller chunks than many, which fill the stages one behind the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.step.grid import STAGE_CHUNKS
from engine.step.plan import StepPlan

_LEAST_CHUNK: Final = 512
"""Tokens. Reading the weights takes as long as the products of about 300 on an H100. Not tuned."""
_CHUNK_GRID: Final = 64
"""Tokens. Graphs of prompts have sizes so far apart."""
_LOOKAHEAD: Final = 1
"""Steps in flight beyond those that run, one a stage."""
Rows = NDArray[np.intp]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


def flights_of(stages: int) -> int:
    """Most steps in flight through so many stages."""
    return stages + _LOOKAHEAD


class Lanes:
    """Belongs to the step loop's thread. Lanes even out by themselves: the share of a step follows
    from how many sequences decode now."""

    def __init__(self, stages: int, max_slots: int) -> None:
        self.stages = stages
        self.flights = flights_of(stages)
        """Most steps in flight."""
        self.mixes = stages == 1
        """Whether a step may have rows and prompts."""
        self._steps: deque[int] = deque()
        """Steps with rows that are in flight, oldest first."""
        self._last = np.full(max_slots, -1, np.int64)
        """By slot, the step that drew its last token."""
        self._since_prompts = 0
        """Steps with rows since the last one with prompts."""

    @property
    def is_busy(self) -> bool:
        """Whether what waits for a step can wait for one with rows, which will come."""
        return bool(self._steps) and not self.mixes

    def prompts_are_due(self, running: int) -> bool:
        """Whether prompts that wait go before the rows, so many of which decode."""
        return not self.mixes and self._since_prompts >= min(self.stages, running)

    def choose(
        self, running: Rows, in_flight: Int32s, masked: Bools, number: int, *, early: bool
    ) -> Rows:
        """The slots that decode in a step, in their order.

        Args:
            running: slots of all sequences that decode.
            in_flight: by slot, the steps in flight that draw a token for it.
            masked: by slot, whether its draws wait for masks.
            number: of the step.
            early: those, too, for whose tokens the first stage would wait.
        """
        flying = in_flight[running]
        ready = flying <= _LOOKAHEAD
        if not self.mixes:
            ready &= (flying == 0) | ~masked[running]
            if not early:
                ready &= (flying == 0) | (self._last[running] <= number - self.stages)
        rows, most = running[ready], -(-running.size // self.stages)
        if rows.size > most:
            longest = np.argsort(self._last[rows], kind="stable")[:most]
            rows = rows[np.sort(longest)]
        return rows

    def chunk(self, waiting: Iterable[int], most: int) -> int:
        """The prompt tokens of a step, at most `most`. The prompts that are not computed whole have
        so many each."""
        if self.mixes:
            return most
        chunks, total = STAGE_CHUNKS * self.stages, 0
        for tokens in waiting:
            total += tokens
            if total >= chunks * most:
                return most
        each = -(-total // (chunks * _CHUNK_GRID)) * _CHUNK_GRID
        return min(most, max(_LEAST_CHUNK, each))

    def launched(self, plan: StepPlan) -> None:
        """A step is launched."""
        self._last[plan.sample_slots] = plan.number
        if plan.num_decodes:
            self._steps.append(plan.number)
        self._since_prompts = self._since_prompts + 1 if plan.num_decodes else 0

    def over(self, number: int) -> None:
        """This step and all before it are over."""
        while self._steps and self._steps[0] <= number:
            self._steps.popleft()
