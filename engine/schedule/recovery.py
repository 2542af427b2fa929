"""What becomes of a step that the device could not run, and of those who needed it.

- Out of memory: its sequences are preempted, to be computed again from what the host knows of
  them, and steps carry half as many tokens; every step that succeeds gives one token back. A
  request that only prefills is given up instead: its pages may be on their way already.
- Anything else, and memory that runs out again and again: the requests in the step are given up,
  and their router tries them elsewhere.
- The device itself is lost where it says so (an accelerator's error sticks to its context), or
  where step after step failed: nothing that runs here can succeed any more, and the owner is told.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from engine.schedule.scheduler import Scheduler
from engine.schedule.sequences import Sequence
from engine.schedule.slots import SlotState
from engine.schedule.step import StepPlan
from engine.types import FailureReason, Mode

MAX_SHRINKS: Final = 3
"""Steps in a row that may lack memory: the batch is an eighth by then, and not at fault."""
MAX_FAILED_STEPS: Final = 8
"""Steps in a row: so many failures in different requests are no coincidence."""


def is_lost(scheduler: Scheduler, error: Exception) -> bool:
    """Whether the device will run no further step."""
    return isinstance(error, torch.AcceleratorError) or scheduler.failed_steps >= MAX_FAILED_STEPS


def recover(scheduler: Scheduler, plan: StepPlan, error: Exception) -> None:
    """Takes back what was planned with the oldest step in flight, which failed."""
    scheduler.blocks.settle(plan.number)
    touched = _touched(scheduler, plan)
    # A step in flight behind a failed one, whose requests are gone by now, says nothing new.
    scheduler.failed_steps += bool(touched)
    lacks_memory = isinstance(error, torch.OutOfMemoryError)
    if lacks_memory and scheduler.failed_steps <= MAX_SHRINKS:
        _shrink(scheduler, plan, touched)
    else:
        for active in {owner.active for owner in touched}:
            scheduler.fail(active, FailureReason.INTERNAL)


def _shrink(scheduler: Scheduler, plan: StepPlan, touched: list[Sequence]) -> None:
    for sequence in touched:
        if sequence.slot < 0:
            continue  # it went with its leader
        if sequence.active.request.mode is Mode.PREFILL:
            scheduler.fail(sequence.active, FailureReason.INTERNAL)
        elif scheduler.slots.state[sequence.slot] == SlotState.PREFILLING:
            scheduler.preempt(sequence)
        else:
            scheduler.finish_preemption(sequence)
    config = scheduler.config
    least = config.max_sequences + config.page_size
    scheduler.step_tokens = max(least, min(scheduler.step_tokens, plan.num_tokens) // 2)


def _touched(scheduler: Scheduler, plan: StepPlan) -> list[Sequence]:
    """Sequences that computed, drew or copied something in the step, oldest first, and those that
    run from a prompt computed in it: they may have forked off since."""
    current = scheduler.slots.generation
    alive = current[plan.sample_slots] == plan.sample_generations
    slots = {*plan.sample_slots[alive].tolist(), *plan.write_slots.tolist()}
    for chunk in plan.chunks:
        if scheduler.runs(chunk.task):
            slots.update(one.slot for one in chunk.task.sequences if one.slot >= 0)
    for slot in scheduler.slots.running().tolist():
        # A stalled choice may have had its partial page copied in this step, and no row.
        if np.isin(plan.copy_target, scheduler.slots.pages(slot)).any():
            slots.add(slot)
    owners = [scheduler.owners[slot] for slot in slots]
    found = [owner for owner in owners if owner is not None]
    return sorted(found, key=lambda sequence: (sequence.active.seniority, sequence.choice))
