"""Prompts whose KV arrives between the launch of a step and the end of the one before it.

    a Delivery comes      -> delivered at once, and its row is offered to the step launched last
    the step before ended -> the device has taken the row, and its draw is queued; or not, and the
                             row is in the next plan, of which nothing was changed
    the step ended        -> the row's token goes out with those of the step

Which rows may come late: one choice, whose tokens nothing restricts, without an adapter; and to a
step whose draw waits for no masks, as draws are queued in the order of their plans. Others wait for
the next plan, as they do where a step has no free place.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.adapters.slots import NO_SLOT
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequences import NO_IDS, ActiveRequest, RequestState
from engine.schedule.slots import SlotState
from engine.step.executor import LateRow, LateRows, Launched
from engine.step.plan import StepPlan
from engine.types import TokenRecord

log = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class Delivery:
    """The command of the step loop for a prompt whose KV is in its pages. See
    `Requests.deliver`."""

    request_id: bytes
    records: Seq[TokenRecord]
    drafted_from: int | None = None

    def __call__(self, scheduler: Scheduler) -> None:
        """Runs it."""
        scheduler.requests.deliver(self.request_id, self.records, self.drafted_from)


class _Offered(NamedTuple):
    row: LateRow
    generation: int
    """The generation of the row's slot."""
    number: int
    """The step that may have it."""


class _Late(NamedTuple):
    plan: StepPlan
    """The row's own, with the number of the step that has it."""
    launched: Launched


class LateJoins:
    """Belongs to the step loop's thread."""

    def __init__(self, scheduler: Scheduler, rows: LateRows) -> None:
        self._scheduler = scheduler
        self._rows = rows
        self._offered: _Offered | None = None
        self._late: _Late | None = None
        """The draw of a row that came late, in flight."""

    def expect(self) -> None:
        """A step is about to be launched: those who still wait for their KV may join it late."""
        slots = self._scheduler.batch.slots
        reserved = slots.page_count[slots.state == SlotState.RESERVED]
        self._rows.expect(int(reserved.max(initial=-1)) + 1)

    def offers(self, command: object, plan: StepPlan) -> bool:
        """Runs a command, if it is a delivery whose row may join the step launched last, which has
        this plan. Returns whether it ran."""
        if not isinstance(command, Delivery) or self._offered:
            return False
        if not plan.only_decodes or plan.masked.size:
            return False
        active = self._scheduler.requests.by_id.get(command.request_id)
        if active is None or not _may_be_late(active):
            return False
        slots, slot = self._scheduler.batch.slots, active.sequences[0].slot
        if self._rows.room() <= slots.page_count[slot]:
            return False
        generation = int(slots.generation[slot])
        command(self._scheduler)
        if slots.generation[slot] == generation and self._has_page(slot):
            token = command.records[0].token_id
            row = LateRow(slot, token, int(slots.kv_len[slot]), slots.pages(slot))
            last = row.pages[row.position // slots.page_size :][:1]
            self._scheduler.blocks.mark_written(last, plan.number)
            self._rows.offer(row)
            self._offered = _Offered(row, generation, plan.number)
        return True

    def _has_page(self, slot: int) -> bool:
        """Whether one more step is wanted, and there is a page for the token that it stores."""
        slots, blocks = self._scheduler.batch.slots, self._scheduler.blocks
        position, count = int(slots.kv_len[slot]), int(slots.page_count[slot])
        if position + 1 >= slots.limit_len[slot]:
            return False
        if position >= count * slots.page_size:
            if not blocks.available:
                return False
            slots.page_table[slot, count] = blocks.allocate_apart(1)[0]
            slots.page_count[slot] += 1
        return True

    def begun(self) -> None:
        """The step before the one launched last has ended: has the device taken what was offered?
        If so, the row is drawn. Nothing was changed for one that was not taken, or has left."""
        if self._offered is None:
            return
        offered, self._offered = self._offered, None
        slots, slot = self._scheduler.batch.slots, offered.row.slot
        stays = slots.generation[slot] == offered.generation
        if self._rows.is_taken() and stays and slots.state[slot] == SlotState.RUNNING:
            plan = self._plan(offered)
            self._late = _Late(plan, self._rows.draw(plan))

    def _plan(self, offered: _Offered) -> StepPlan:
        """The plan of the row, which has moved the columns past it."""
        batch, row = self._scheduler.batch, offered.row
        slots, where = batch.slots, np.array([row.slot])
        as_int, position = where.astype(np.int32), np.array([row.position], np.int32)
        index = position + 1 - slots.prompt_len[where]
        sample = batch.sampler.plan(as_int, index, slots.noise_choice[where])
        batch.is_written(row.slot)
        slots.launch(where, position + 1, 1)
        slots.count_in_flight(as_int, 1)
        return StepPlan(
            number=offered.number,
            token_ids=np.zeros(1, np.int32),
            positions=position,
            row_slots=as_int,
            query_lens=np.ones(1, np.int32),
            context_lens=position + 1,
            num_decodes=1,
            page_table=row.pages[None],
            sample_tokens=np.zeros(1, np.int32),
            sample_slots=as_int,
            sample_generations=slots.generation[where],
            sample_indices=index,
            sample=sample,
            copy_source=NO_IDS,
            copy_target=NO_IDS,
            write_slots=NO_IDS,
            write_tokens=NO_IDS,
            whole_logits=not sample.is_greedy,
        )

    def settle(self, plan: StepPlan, step_ns: tuple[int, int]) -> int:
        """The step with this plan has ended, and is settled next: what its late row has drawn goes
        first. Returns how many rows came late."""
        if self._late is None or self._late.plan.number != plan.number:
            return 0
        late, self._late = self._late, None
        try:
            result = late.launched.result()
        except Exception as error:
            log.exception("the late row of step %d failed", plan.number)
            self._scheduler.recovery.recover(late.plan, error)
            return 0
        self._scheduler.settler.settle(late.plan, result, step_ns=step_ns)
        return 1


def _may_be_late(active: ActiveRequest) -> bool:
    """Whether it has one row, which draws by itself what it likes, of the base model."""
    request = active.request
    if active.state is not RequestState.RESERVED or len(active.sequences) != 1:
        return False
    return request.beams is None and active.matchers is None and active.adapter_slot == NO_SLOT
