"""Tokens on their way from the last stage, which draws them, to the first one, which embeds them.

The last stage sends the tokens of each step that draws any, in the order of the steps. The first
one takes them before the step that decodes behind them, on its device: it has been launched before
the host knows them (`engine.step.lanes`). It takes those that no step asks for when they have been
drawn for certain, so only as many wait as steps are in flight.

Both see the same plans, so nothing says which tokens come.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.step.lanes import flights_of
from engine.step.plan import StepPlan

_BY_HOST: Final = -1
"""In place of a step: the host wrote the token. No step has this number."""


class Feedback:
    """What the first stage of several has still to take. It sees every plan, in order."""

    def __init__(self, stages: int, max_slots: int) -> None:
        self._flights = flights_of(stages)
        self._nobody = max_slots
        self._drawn = np.full(max_slots, _BY_HOST, np.int64)
        """By slot, the step that draws its last token; or the host wrote it."""
        self._coming: deque[tuple[int, NDArray[np.int32]]] = deque()
        """Steps whose tokens are not taken, oldest first, and the slots of their draws."""

    def due(self, plan: StepPlan) -> list[NDArray[np.int32]]:
        """The draws to take before a step runs and behind the writes of its plan, oldest first: the
        slot of each token. It is `max_slots` where a later token is in the table already."""
        self._drawn[plan.write_slots] = _BY_HOST
        asked = self._drawn[plan.row_slots[: plan.num_decodes]].max(initial=_BY_HOST)
        last, found = max(int(asked), plan.number - self._flights), []
        while self._coming and self._coming[0][0] <= last:
            number, slots = self._coming.popleft()
            found.append(np.where(self._drawn[slots] == number, slots, self._nobody))
        if plan.sample is not None:
            self._coming.append((plan.number, plan.sample_slots))
            self._drawn[plan.sample_slots] = plan.number
        return [slots.astype(np.int32) for slots in found]
