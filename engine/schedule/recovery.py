"""Recovers from a step that the device could not run.

- Out of memory: the step's sequences are preempted and computed again from the host's tokens. Steps
  carry half as many tokens, and every step that succeeds gives one token back. A request that only
  prefills is given up instead, because a transfer may already read its pages.
- Any other error, or repeated lack of memory: the requests in the step are given up, and their
  router tries them elsewhere.
- A hook failed, and the step did not: the requests that it has to do with are given up, or go on
  without it, as the hook declares.
- The device is lost if its error says so (an accelerator's error stays in its context), or if many
  steps in a row failed. Nothing can succeed here any more, and the owner is told.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
import torch

from engine.schedule.preemption import finish_preemption, preempt
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequences import Sequence
from engine.schedule.slots import SlotState
from engine.step.hooks import HookFailure, OnFailure
from engine.step.plan import StepPlan
from engine.types import FailureReason, Mode

MAX_SHRINKS: Final = 3
"""Most steps in a row that may lack memory. The batch is an eighth by then and not the cause."""
MAX_FAILED_STEPS: Final = 8
"""Failed steps in a row after which the device counts as lost. So many failures in different
requests are no coincidence."""


def is_lost(scheduler: Scheduler, error: Exception) -> bool:
    """Whether the device will run no further step."""
    return isinstance(error, torch.AcceleratorError) or scheduler.failed_steps >= MAX_FAILED_STEPS


def step_is_over(scheduler: Scheduler, plan: StepPlan) -> None:
    """This step and all before it, whether they failed or not, write no pages any more, and no hook
    has rows of theirs."""
    scheduler.blocks.settle(plan.number)
    if scheduler.hooks is not None:
        scheduler.hooks.settled(plan.number)


def recover(scheduler: Scheduler, plan: StepPlan, error: Exception) -> None:
    """Undoes the plan of the oldest step in flight, which failed."""
    step_is_over(scheduler, plan)
    scheduler.blocks.arrivals.note(plan.arrived)  # Hooks have not seen these yet.
    touched = _touched(scheduler, plan)
    scheduler.chunks.pop(plan.number, None)
    # A step in flight behind a failed one has lost its requests by now and shows nothing new.
    scheduler.failed_steps += bool(touched)
    lacks_memory = isinstance(error, torch.OutOfMemoryError)
    if lacks_memory and scheduler.failed_steps <= MAX_SHRINKS:
        _shrink(scheduler, plan, touched)
    else:
        for active in {owner.active for owner in touched}:
            scheduler.fail(active, FailureReason.INTERNAL)


def lose_hooks(scheduler: Scheduler, plan: StepPlan, failures: Seq[HookFailure]) -> None:
    """Deals with hooks that failed in the oldest step in flight."""
    hooks = scheduler.hooks
    assert hooks is not None, "hooks have failed"
    touched = {owner.active: None for owner in _touched(scheduler, plan)}
    for failure in failures:
        hooks.count(failure)
        hook = hooks.hook(failure)
        for active in [one for one in touched if one.hooked.terms[failure.hook]]:
            if hook.on_failure is OnFailure.LEAVE:
                slots = [one.slot for one in active.sequences if one.slot >= 0]
                hooks.leave(active.hooked, failure.hook, slots)
            else:
                scheduler.fail(active, FailureReason.HOOK, hook.name)
                del touched[active]


def _shrink(scheduler: Scheduler, plan: StepPlan, touched: list[Sequence]) -> None:
    for sequence in touched:
        if sequence.slot < 0:
            continue  # it was preempted with its leader
        if sequence.active.request.mode is Mode.PREFILL:
            scheduler.fail(sequence.active, FailureReason.INTERNAL)
        elif scheduler.slots.state[sequence.slot] == SlotState.PREFILLING:
            preempt(scheduler, sequence)
        else:
            finish_preemption(scheduler, sequence, computed=False)
    config = scheduler.config
    least = config.max_sequences + config.page_size
    scheduler.step_tokens = max(least, min(scheduler.step_tokens, plan.num_tokens) // 2)


def _touched(scheduler: Scheduler, plan: StepPlan) -> list[Sequence]:
    """Sequences that computed, drew or copied in the step, oldest first. Those that run from a
    prompt computed in it are included, since they may have forked off since."""
    current = scheduler.slots.generation
    alive = current[plan.sample_slots] == plan.sample_generations
    slots = {*plan.sample_slots[alive].tolist(), *plan.write_slots.tolist()}
    for chunk in scheduler.chunks.get(plan.number, ()):
        if scheduler.runs(chunk.task):
            slots.update(one.slot for one in chunk.task.sequences if one.slot >= 0)
    for slot in scheduler.slots.running().tolist():
        # A stalled choice may have a copy of its partial page in this step, but no row.
        if np.isin(plan.copy_target, scheduler.slots.pages(slot)).any():
            slots.add(slot)
    owners = [scheduler.owners[slot] for slot in slots]
    found = [owner for owner in owners if owner is not None]
    return sorted(found, key=lambda sequence: (sequence.active.seniority, sequence.choice))
