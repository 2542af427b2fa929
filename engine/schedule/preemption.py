"""Takes sequences out of the batch when pages run out, to be continued when there is room.

With tiers below the pool, the pages of what is computed are keyed and saved before others get them
(swap). They are found again by their keys. Without, all is computed again.
"""

from __future__ import annotations

from engine.schedule.scheduler import NO_IDS, Scheduler
from engine.schedule.sequences import Sequence
from engine.schedule.slots import SlotState


def preempt(scheduler: Scheduler, sequence: Sequence) -> None:
    """Takes a sequence out of the batch, now or when the steps in flight have told its tokens."""
    slots = scheduler.slots
    if slots.state[sequence.slot] == SlotState.PREFILLING:
        task = next(t for t in scheduler.prefills if t.leader is sequence)
        scheduler.blocks.release(sequence.active.spare_pages)
        sequence.active.spare_pages = NO_IDS
        for member in task.sequences:
            finish_preemption(scheduler, member)
    elif slots.in_flight[sequence.slot] == 0:
        finish_preemption(scheduler, sequence)
    else:
        slots.state[sequence.slot] = SlotState.PREEMPTING


def finish_preemption(scheduler: Scheduler, sequence: Sequence, *, computed: bool = True) -> None:
    """Frees the pages of a preempted sequence, since the host knows all its tokens now.

    Args:
        scheduler: has the sequence in a slot.
        sequence: the sequence.
        computed: whether the KV of all its tokens but the last is known to be there, if its prompt
            is computed at all.
    """
    slots, slot = scheduler.slots, sequence.slot
    sequence.outputs, sequence.wait = slots.output_ids(slot), None
    pages = slots.pages(slot)
    if scheduler.tiers.on:
        if computed and slots.state[slot] != SlotState.PREFILLING:
            computed_tokens = sequence.tokens()[:-1][: sequence.active.hooked.exact_tokens]
            scheduler.publish(sequence.active, computed_tokens, pages)
        scheduler.tiers.preempted(pages)
    scheduler.blocks.release(pages)
    scheduler.leave_slot(sequence)
    sequence.preemptions += 1
    scheduler.preemptions += 1
    scheduler.preempted.append(sequence)
