"""Sequences of a request that are chosen together: beams.

The device chooses them at the end of each step (`engine.sampling.beams`), so the next one is
planned and launched like any other. When a step settles, the host chooses by the same candidates,
and follows: the sequence in each slot goes on from its parent's tokens. It lets its full pages go
and shares its parent's. The page that it stores into stays its own: the device has copied there
what its parent's had.

All sequences of such a request are in a step, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from engine.beams.chooser import Candidates, Chooser, Hypothesis
from engine.beams.plan import SearchPlan
from engine.beams.search import BeamSearch
from engine.bounds import Bounds
from engine.schedule.batch import Batch
from engine.schedule.sequences import NO_IDS, ActiveRequest, ChunkPlan, Sequence
from engine.step.plan import GroupTable, Int32s, StepPlan, StepResult
from engine.stopping import end_ids

Slots = NDArray[np.intp]


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
    """Plans what the device chooses, hears of candidates, and moves sequences in the batch."""

    def __init__(self, config: Bounds, batch: Batch) -> None:
        self.forks = 0
        """Sequences that went on from another one's pages, since the start."""
        self.searches = 0
        """Choosers that came to an end."""
        self._config = config
        self._batch = batch

    # -- planning -------------------------------------------------------------------------------

    def together(self, rows: Slots) -> Slots:
        """The slots among these that may decode: those of a request only if all are there."""
        if not self._batch.slots.num_chosen:  # The usual case.
            return rows
        here = set(rows.tolist())
        apart = [
            one.slot
            for active in self._chosen(rows)
            if not all(one.slot in here for one in active.sequences)
            for one in active.sequences
        ]
        return np.setdiff1d(rows, apart)

    def planned(
        self,
        rows: Slots,
        least: Int32s,
        chunks: Seq[ChunkPlan],
        page_table: Int32s,
        others: Seq[GroupTable],
    ) -> tuple[SearchPlan, ...]:
        """What the device chooses in a step.

        Args:
            rows: [B] slots of the decode rows.
            least: [B], the position that each stores.
            chunks: the prompts' rows.
            page_table: [R, P], of group 0.
            others: of the other groups.
        """
        slots, size = self._batch.slots, self._config.page_size
        if not slots.num_chosen:
            return ()
        row_of = {slot: row for row, slot in enumerate(rows.tolist())}
        found = []
        for active in self._chosen(rows):
            own = np.array([row_of[one.slot] for one in active.sequences], np.int32)
            position, leader = int(least[own[0]]), active.sequences[0].slot
            follows = slots.in_flight[leader] > 0
            moved = [NO_IDS] * (1 + len(others))
            if (position + 1) % size:
                moved[0] = page_table[own, position // size]
            for group, pages in enumerate(self._batch.others.stored(others, own, position), 1):
                moved[group] = pages
            full = position // size if follows else 0
            found.append(self._plan(active, own, active.scores, own, full, tuple(moved)))
            active.scores = None
        for chunk in chunks:
            active = chunk.task.leader.active
            if chunk.is_last and active.request.beams is not None and active.request.mode.decodes:
                first = np.array([chunk.first_sample], np.int32)
                nothing = (NO_IDS,) * (1 + len(others))
                start = np.zeros(1, np.float32)
                found.append(self._plan(active, first, start, NO_IDS, 0, nothing))
        return tuple(found)

    def _plan(
        self,
        active: ActiveRequest,
        draws: Int32s,
        scores: NDArray[np.float32] | None,
        rows: Int32s,
        followed: int,
        moved: tuple[Int32s, ...],
    ) -> SearchPlan:
        ends = sorted(end_ids(active.request.stop, self._config.eos_token_ids))
        slots = np.array([one.slot for one in active.sequences], np.int32)
        return SearchPlan(slots, draws, np.array(ends, np.int32), scores, rows, followed, moved)

    def _chosen(self, rows: Slots) -> Iterable[ActiveRequest]:
        chosen = rows[self._batch.slots.is_chosen[rows]].tolist()
        return dict.fromkeys(self._batch.owner(slot).active for slot in chosen)

    # -- settling -------------------------------------------------------------------------------

    def hear(self, sequence: Sequence, candidates: Candidates) -> list[Hypothesis] | None:
        """Takes the candidates of one sequence from a step. Returns what the chooser found, once it
        is over."""
        active = sequence.active
        chooser = active.chooser or self._begin(active)
        active.heard[sequence.slot] = candidates
        if len(active.heard) < chooser.awaits:
            return None
        heard = [active.heard[one.slot] for one in active.sequences[: chooser.awaits]]
        active.heard = {}
        return self._choose(active, chooser, heard)

    def begin(self, active: ActiveRequest, candidates: Candidates) -> list[Hypothesis] | None:
        """As `hear`, of a prompt that another worker has computed. The device gets what was
        chosen."""
        chooser = self._begin(active)
        if (found := self._choose(active, chooser, [candidates])) is None:
            self._batch.write_last(active.sequences)
            active.scores = chooser.scores
        return found

    def _begin(self, active: ActiveRequest) -> Chooser:
        request = active.request
        assert request.beams is not None, "its sequences are chosen"
        active.chooser = BeamSearch(request.beams, request.stop, self._config.eos_token_ids)
        return active.chooser

    def _choose(
        self, active: ActiveRequest, chooser: Chooser, heard: list[Candidates]
    ) -> list[Hypothesis] | None:
        continuations = chooser.choose(heard)
        if not continuations:
            self.searches += 1
            return chooser.outputs()
        parents, tokens = (list(column) for column in zip(*continuations, strict=True))
        self._batch.follow(active.sequences, parents, tokens)
        if len(heard) > 1:
            self.forks += len(parents) - len(set(parents))
        return None
