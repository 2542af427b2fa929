"""Recovers from a step that the device could not run.

- Out of memory: the step's sequences are preempted and computed again from the host's tokens. Steps
  carry half as many tokens, and every step that succeeds gives one token back. A request that only
  prefills is given up instead, because a transfer may already read its pages.
- Any other error, or repeated lack of memory: the requests in the step are given up, and their
  router tries them elsewhere.
- A state was not that of the tokens before it, and the step did not fail: it goes out of the cache,
  if it was there, so that it is found once. A prompt that went on from it is computed again, behind
  another place. What decodes from a wrong state is given up.
- A hook failed, and the step did not: the requests that it has to do with are given up, or go on
  without it, as the hook declares.
- The device is lost if its error says so (an accelerator's error stays in its context), or if many
  steps in a row failed. Nothing can succeed here any more, and the owner is notified.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.groups.state import StatePages
from engine.hooks.requests import RequestHooks
from engine.pages.blocks import BlockManager
from engine.schedule.batch import Batch
from engine.schedule.requests import Requests
from engine.schedule.sequences import Sequence
from engine.schedule.slots import SlotState
from engine.step.budget import StepBudget
from engine.step.hooks import HookFailure, OnFailure
from engine.step.lanes import Lanes
from engine.step.plan import StepPlan
from engine.tiers.protocol import PageTiers
from engine.types import FailureReason, Mode

log = logging.getLogger("baton.engine")

MAX_FAILED_STEPS: Final = 8
"""Failed steps in a row after which the device counts as lost. So many failures in different
requests are no coincidence."""


class Recovery:
    """Undoes steps that failed. Deals with hooks and states that failed in steps that did not."""

    def __init__(
        self,
        blocks: BlockManager,
        batch: Batch,
        requests: Requests,
        budget: StepBudget,
        hooks: RequestHooks | None,
        tiers: PageTiers,
        lanes: Lanes,
    ) -> None:
        self._lanes = lanes
        self._blocks = blocks
        self._batch = batch
        self._requests = requests
        self._budget = budget
        self._hooks = hooks
        self._tiers = tiers

    def is_lost(self, error: Exception) -> bool:
        """Whether the device will run no further step."""
        return (
            isinstance(error, torch.AcceleratorError) or self._budget.failures >= MAX_FAILED_STEPS
        )

    def step_is_over(self, plan: StepPlan) -> None:
        """This step and all before it, whether they failed or not, write no pages any more, and no
        hook has rows of theirs."""
        self._lanes.over(plan.number)
        self._blocks.settle(plan.number)
        self._batch.others.settle(plan.number)
        if self._hooks is not None:
            self._hooks.settled(plan.number)

    def recover(self, plan: StepPlan, error: Exception) -> None:
        """Undoes the plan of the oldest step in flight, which failed."""
        self.step_is_over(plan)
        self._blocks.arrivals.again(plan.arrived)  # Hooks have not seen these yet.
        late = self._batch.begin_again(plan.begins) if plan.begins is not None else set()
        touched = self._touched(plan, late)
        self._batch.chunks.pop(plan.number, None)
        # A step in flight behind a failed one has lost its requests by now and shows nothing new.
        self._budget.failures += bool(touched)
        lacks_memory = isinstance(error, torch.OutOfMemoryError)
        if lacks_memory and self._budget.may_shrink:
            self._shrink(plan, touched)
        else:
            for active in {owner.active for owner in touched}:
                self._requests.fail(active, FailureReason.INTERNAL)

    def lose_hooks(self, plan: StepPlan, failures: Seq[HookFailure]) -> None:
        """Deals with hooks that failed in the oldest step in flight."""
        hooks = self._hooks
        assert hooks is not None, "hooks have failed"
        touched = {owner.active: None for owner in self._touched(plan)}
        for failure in failures:
            hooks.count(failure)
            hook = hooks.hook(failure)
            for active in [one for one in touched if one.hooked.tags[failure.hook]]:
                if hook.on_failure is OnFailure.LEAVE:
                    slots = [one.slot for one in active.sequences if one.slot >= 0]
                    hooks.leave(active.hooked, failure.hook, slots)
                else:
                    self._requests.fail(active, FailureReason.HOOK, hook.name)
                    del touched[active]

    def lose_states(self, plan: StepPlan, spoilt: NDArray[np.bool_]) -> None:
        """Deals with rows of the oldest step in flight that have found a wrong state, [R], before
        anything of them is sent or keyed."""
        alive = self._batch.alive(plan)
        chunks = self._batch.chunks.get(plan.number, ())
        for row in np.flatnonzero(spoilt).tolist():
            self._drop_states(plan, row)
            if row < plan.num_decodes:
                owner = self._batch.owners[plan.sample_slots[row]]
                if alive[row] and owner is not None:
                    self._requests.fail(owner.active, FailureReason.NUMERICAL)
                continue
            chunk = chunks[row - plan.num_decodes]
            if not self._batch.runs(chunk.task):
                continue
            if chunk.start == chunk.task.cached_tokens > 0:
                self._requests.compute_again(chunk.task)
            else:
                self._requests.fail(chunk.task.leader.active, FailureReason.NUMERICAL)

    def _drop_states(self, plan: StepPlan, row: int) -> None:
        """Takes the states that a row has read out of all caches."""
        groups = self._batch.others.groups
        for number, (group, table) in enumerate(zip(groups, plan.others, strict=True), 1):
            if not isinstance(group, StatePages):
                continue
            if (key := group.blocks.key_of(int(table.pages[row, 0]))) is not None:
                log.error("a cached state is not that of its tokens: it is dropped")
                group.blocks.drop(key)
                self._tiers.drop(key, number)

    def _shrink(self, plan: StepPlan, touched: list[Sequence]) -> None:
        for sequence in touched:
            if sequence.slot < 0:
                continue  # it was preempted with its leader
            if sequence.active.request.mode is Mode.PREFILL:
                self._requests.fail(sequence.active, FailureReason.INTERNAL)
            elif self._batch.slots.state[sequence.slot] == SlotState.PREFILLING:
                self._requests.preempt(sequence)
            else:
                self._requests.finish_preemption(sequence, computed=False)
        self._budget.shrink(plan.num_tokens)

    def _touched(self, plan: StepPlan, more: Iterable[int] = ()) -> list[Sequence]:
        """Sequences that computed, drew or copied in the step, and those in `more` slots, oldest
        first. Those that run from a prompt computed in it are included, since they may have forked
        off since."""
        alive = self._batch.alive(plan)
        running = set(self._batch.slots.running().tolist())
        # Another sequence may have got the slot since, and wait for its KV there.
        written = running.intersection(plan.write_slots.tolist())
        slots = {*plan.sample_slots[alive].tolist(), *written, *more}
        for chunk in self._batch.live_chunks(plan.number):
            slots.update(one.slot for one in chunk.task.sequences if one.slot >= 0)
        for slot in running:
            # A stalled choice may have a copy of its partial page in this step, but no row.
            if np.isin(plan.copy_target, self._batch.slots.pages(slot)).any():
                slots.add(slot)
        owners = [self._batch.owners[slot] for slot in slots]
        found = [owner for owner in owners if owner is not None]
        return sorted(found, key=lambda sequence: (sequence.active.seniority, sequence.choice))
