"""Moves the sequences of a request as its chooser says: between settled steps.

A *chosen* sequence is planned only while the host knows its last token. After a step each waits in
its slot until all of its request have settled. Then the chooser says which of them go on:

- the first continuation of a sequence stays in its slot and keeps its pages;
- a sequence without a continuation lets its pages go, and its slot takes a further continuation of
  another one: full pages are shared, and the partial page is copied before the next step.

So a request keeps its slots, a partial page is let go for each that is copied, and as many
sequences run as before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.beams.chooser import Candidates, Chooser, Continuation, Hypothesis
from engine.beams.search import BeamSearch
from engine.bounds import Bounds
from engine.schedule.batch import Batch
from engine.schedule.sequences import ActiveRequest, Sequence
from engine.step.plan import StepPlan, StepResult


def candidates_of(
    plan: StepPlan, result: StepResult, draws: NDArray[np.intp]
) -> Iterator[tuple[int, Candidates]]:
    """The likeliest tokens of some of a step's draws, with the slot of each. Those of the first
    column, if the step verifies drafts. Draws that do not count are left out."""
    ids, logprobs = result.top_ids, result.top_logprobs
    assert ids is not None, "they are planned for chosen rows"
    assert logprobs is not None, "they are planned for chosen rows"
    for draw in draws.tolist():
        if result.counts is None:
            yield int(plan.sample_slots[draw]), Candidates(ids[draw], logprobs[draw])
        elif result.counts[draw]:
            at = (draw, 0) if result.tokens.ndim > 1 else draw
            yield int(plan.sample_slots[draw]), Candidates(ids[at], logprobs[at])


class Choosing:
    """Hears of candidates, and moves sequences in the batch."""

    def __init__(self, config: Bounds, batch: Batch) -> None:
        self.forks = 0
        """Sequences that went on from another one's pages, since the start."""
        self.searches = 0
        """Choosers that came to an end."""
        self._config = config
        self._batch = batch

    def hear(self, sequence: Sequence, candidates: Candidates) -> list[Hypothesis] | None:
        """Takes the candidates of one sequence. Returns what the chooser found, once it is over."""
        active = sequence.active
        chooser = active.chooser or self._begin(active)
        active.heard[sequence.slot] = candidates
        if len(active.heard) < chooser.awaits:
            return None
        heard = [active.heard[one.slot] for one in active.sequences[: chooser.awaits]]
        active.heard = {}
        if continuations := chooser.choose(heard):
            self._move(active, continuations)
            return None
        self.searches += 1
        return chooser.outputs()

    def _begin(self, active: ActiveRequest) -> Chooser:
        request = active.request
        assert request.beams is not None, "its sequences are chosen"
        active.chooser = BeamSearch(request.beams, request.stop, self._config.eos_token_ids)
        return active.chooser

    def _move(self, active: ActiveRequest, continuations: list[Continuation]) -> None:
        """Lets the request's sequences go on so. All of them began with the prompt, so the first
        time each has its pages already."""
        former = active.sequences
        is_first = int(self._batch.slots.output_len[former[0].slot]) == 0
        if is_first:
            going_on = list(former)
        else:
            going_on = self._placed(former, [one.parent for one in continuations])
        for sequence, one in zip(going_on, continuations, strict=True):
            self._batch.append(sequence, one.token_id)
        active.sequences = going_on

    def _placed(self, former: list[Sequence], parents: list[int]) -> list[Sequence]:
        """The sequence in whose slot each continuation goes on."""
        left = [one for i, one in enumerate(former) if i not in parents]
        for sequence in left:  # All of them first: the copies need their partial pages.
            self._batch.prune(sequence)
        placed, taken = list[Sequence](), set[int]()
        for parent in parents:
            sequence = former[parent]
            if parent in taken:
                sequence = left.pop()
                self._batch.graft(former[parent], sequence)
                self.forks += 1
            taken.add(parent)
            placed.append(sequence)
        return placed
