"""Requests whose tokens are restricted: by a grammar, by allowed tokens, by bad words.

Each of their sequences has a matcher. It takes a token when the step that drew it settles, and the
first token of a hand-off when that is delivered. It stays with the sequence while that is
preempted, and a request that was begun elsewhere has matchers that took its earlier tokens. So the
matcher of a sequence has always taken the tokens that the host knows, and no others.

A step with such rows is launched in two parts. Its forward pass is queued at once. Its draw is
queued when the step before it has settled, because only then the masks can be filled.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.masks.matchers import MaskFiller, TokenMatcher
from engine.schedule.batch import Batch
from engine.schedule.requests import Requests
from engine.schedule.sequences import Sequence
from engine.step.plan import StepPlan
from engine.step.sampling import Masks
from engine.types import FailureReason


class Masking:
    """Fills the masks of steps, and tells matchers the tokens that were drawn."""

    def __init__(self, batch: Batch, requests: Requests) -> None:
        self._batch = batch
        self._requests = requests

    def consume(self, slots: NDArray[np.intp], token_ids: NDArray[np.int32]) -> None:
        """Tells the matchers of sequences that go on their newest tokens, one a slot."""
        for i in np.flatnonzero(self._batch.slots.is_masked[slots]).tolist():
            owner = self._batch.owners[int(slots[i])]
            if owner is None or owner.matcher is None:
                continue
            owner.matcher.consume([int(token_ids[i])])
            if owner.matcher.is_broken:
                self._requests.fail(owner.active, FailureReason.STRUCTURE)

    def fill(
        self,
        plan: StepPlan,
        filler: MaskFiller,
        memory: Callable[[int], NDArray[np.int32]],
    ) -> Masks | None:
        """The masks of a step whose predecessor has settled. A request for which no token is left
        fails, and so does one whose grammar is out of fuel. None: the masked rows' sequences have
        all ended.

        Args:
            plan: the plan of the step.
            filler: fills the masks.
            memory: gives room for a number of masks, [M, W].
        """
        wanted: dict[int, tuple[TokenMatcher, int]] = {}
        rows: dict[int, list[int]] = {}
        owners: dict[int, Sequence] = {}
        for row in plan.masked.tolist():
            owner = self._batch.owner_of_row(plan, row)
            if owner is None or owner.matcher is None:
                continue
            # The first tokens of a prompt's choices share the matcher, since they share the slot.
            key = id(owner.matcher)
            wanted[key] = owner.matcher, int(plan.sample_indices[row])
            rows.setdefault(key, []).append(row)
            owners[key] = owner
        if not wanted:
            return None
        masks = memory(len(wanted))
        found = filler.fill(masks, list(wanted.values()))
        for owner, is_open in zip(owners.values(), found, strict=True):
            if not is_open and owner.slot >= 0:
                self._requests.fail(owner.active, FailureReason.STRUCTURE)
        counts = [len(each) for each in rows.values()]
        if any(count > 1 for count in counts):
            shared, masks = masks, memory(sum(counts))
            np.copyto(masks, np.repeat(shared, counts, axis=0))
        return Masks(np.fromiter((row for each in rows.values() for row in each), np.int64), masks)
