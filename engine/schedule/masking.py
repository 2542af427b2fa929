"""Requests whose tokens are restricted: by a grammar, by allowed tokens, by bad words.

Each of their sequences has a matcher. It takes a token when the step that drew it settles, and the
first token of a hand-off when that is delivered. It stays with the sequence while that is
preempted, and a request that was begun elsewhere has matchers that took its earlier tokens. So the
matcher of a sequence has always taken the tokens that the host knows, and no others.

A step with such rows is launched in two parts. Its forward pass is queued at once. Its draw is
queued when the step before it has settled, because only then the masks can be filled: behind
tokens, and behind drafts, which the device returns with the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.masks.matchers import MaskFiller, Wanted
from engine.schedule.batch import Batch
from engine.schedule.requests import Requests
from engine.schedule.sequences import Sequence
from engine.step.plan import StepPlan, StepResult
from engine.step.sampling import Masks


class Masking:
    """Fills the masks of steps, and gives matchers the tokens that were drawn. A step that verifies
    drafts needs a mask for each column."""

    def __init__(self, batch: Batch, requests: Requests) -> None:
        self._batch = batch
        self._requests = requests

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Notes the drafts that the next step of each masked row will verify."""
        if result.next_drafts is None or result.next_ready is None:
            return
        for draw in plan.masked.tolist():
            if (owner := self._batch.owner_of_row(plan, draw)) is not None:
                owner.drafts = result.next_drafts[draw, : result.next_ready[draw]].tolist()

    def consume(self, slots: NDArray[np.intp], token_ids: NDArray[np.int32]) -> None:
        """Gives the matchers of sequences that go on their newest tokens, one a slot."""
        for i in np.flatnonzero(self._batch.slots.is_masked[slots]).tolist():
            owner = self._batch.owners[int(slots[i])]
            if owner is None or owner.matcher is None:
                continue
            owner.matcher.consume([int(token_ids[i])])
            if owner.matcher.is_broken:
                self._requests.fail(owner.active, owner.matcher.failure)

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
        asked: dict[int, _Asked] = {}
        for draw in plan.masked.tolist():
            owner = self._batch.owner_of_row(plan, draw)
            if owner is None or owner.matcher is None:
                continue
            # The first tokens of a prompt's choices share the matcher, since they share the slot.
            found = asked.setdefault(id(owner.matcher), _Asked(owner, self._wanted(plan, draw)))
            found.draws.append(draw)
        if not asked:
            return None
        masks = memory(sum(one.wanted.masks for one in asked.values()))
        holding = filler.fill(masks, [one.wanted for one in asked.values()])
        rows: list[int] = []
        taken: list[int] = []
        first = 0
        for one, count in zip(asked.values(), holding, strict=True):
            if not count and one.owner.slot >= 0:
                self._requests.fail(one.owner.active, one.wanted.matcher.failure)
            for draw in one.draws:
                columns = range(max(1, count))
                rows += [draw * plan.width + column for column in columns]
                taken += [first + column for column in columns]
            first += one.wanted.masks
        if taken != list(range(len(masks))):
            filled, masks = masks, memory(len(taken))
            np.copyto(masks, filled[taken])
        return Masks(np.array(rows, np.int64), masks)

    def _wanted(self, plan: StepPlan, draw: int) -> Wanted:
        """The masks of a draw: the steps before it have settled, so the host knows its index, and
        its drafts."""
        owner = self._batch.owner_of_row(plan, draw)
        assert owner is not None, "a live draw has an owner"
        assert owner.matcher is not None, "its draw is masked"
        if draw >= plan.num_decodes:
            return Wanted(owner.matcher, int(plan.sample_indices[draw]))
        index = int(self._batch.slots.output_len[owner.slot])
        return Wanted(owner.matcher, index, owner.drafts[: plan.width - 1])


class _Asked:
    """What a step asks of one matcher."""

    def __init__(self, owner: Sequence, wanted: Wanted) -> None:
        self.owner = owner
        self.wanted = wanted
        self.draws: list[int] = []
