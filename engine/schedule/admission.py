"""Who gets slots and pages, and when.

Pages under a transfer cannot be preempted, so a request is admitted only while what is left keeps
every promise made before:

    pages(prompt) + growth <= free + evictable - max(reserve, largest single need)

The largest single need is the most pages that one sequence in a slot may still ask for: whatever
else runs is preempted in its favour, so one sequence always gets to its end. The reserve is for
the growth of all of them, `growth_reserve`. Preempted sequences
come first, oldest first, and no new request is admitted while one waits; then requests that were
begun on another worker, whose client has seen tokens already; then new ones as the policy says. A
request that does not fit may be passed by smaller ones a bounded number of times.

A prompt to be computed here is admitted when the next step may begin it, not before: pages handed
out earlier would lie empty, and a prompt that waits may yet find more of its pages in the prefix
cache.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.pages.prefix import prompt_keys
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequences import ActiveRequest, PrefillTask, RequestState, Sequence
from engine.schedule.slots import SlotState
from engine.types import Mode, Request, Reserved, TakenOver

IN_SLOTS = (RequestState.ACTIVE, RequestState.RESERVED)


def admit(scheduler: Scheduler) -> None:
    """Gives slots and pages to whoever may have them: preempted sequences first."""
    while scheduler.preempted and _readmit(scheduler, min(scheduler.preempted, key=_age)):
        pass
    if scheduler.preempted or not scheduler.waiting or scheduler.slots.num_free == 0:
        return
    in_slots = [active for active in scheduler.requests.values() if active.state in IN_SLOTS]
    ordered = scheduler.policy.order(scheduler.waiting, in_slots)
    for active in sorted(ordered, key=lambda active: not active.request.generated):
        if _try_admit(scheduler, active):
            scheduler.waiting.remove(active)
            scheduler.policy.admitted(active)
            for older in scheduler.waiting:
                older.passed_over += older.seniority < active.seniority
        elif (
            active.passed_over >= scheduler.config.max_passed_over or scheduler.slots.num_free == 0
        ):
            break


def growth_reserve(scheduler: Scheduler, wanted: int) -> int:
    """Pages to keep back for the growth of what is in slots, where `wanted` more are handed out.

        max(pages each * used slots, share * all they may ask for)
        share = (use - watermark) / (1 - watermark), at least 0; use counts the wanted pages

    Up to the watermark a page for each will do: most sequences end before `max_tokens`, and pages
    that stay empty for the rare ones that do not would cost a batch its size. The fuller the pool,
    the surer the next sequence costs a preemption, which throws computed KV away: at the watermark
    nothing more is kept back, in a full pool all that running sequences may still ask for. An
    empty batch keeps nothing back, so whoever fits the pool is admitted at last.
    """
    config, blocks = scheduler.config, scheduler.blocks
    least = config.reserve_pages * scheduler.slots.num_used
    use = 1 - (blocks.available - wanted) / blocks.total
    if use <= config.page_watermark or config.page_watermark >= 1:
        return least
    share = (use - config.page_watermark) / (1 - config.page_watermark)
    return max(least, math.ceil(share * int(scheduler.slots.growth().sum())))


def _has_prefill_room(scheduler: Scheduler) -> bool:
    """Whether the next step could take more prompt tokens than are admitted."""
    admitted = sum(task.remaining for task in scheduler.prefills)
    return admitted < scheduler.step_tokens


def _readmit(scheduler: Scheduler, sequence: Sequence) -> bool:
    if not _has_prefill_room(scheduler):
        return False
    tokens = sequence.tokens()
    pages = -(-len(tokens) // scheduler.config.page_size)
    wanted = pages + _growth(scheduler, sequence.active.request, pages)
    reserve = growth_reserve(scheduler, wanted)
    if scheduler.slots.num_free == 0 or wanted > scheduler.blocks.available - reserve:
        return False
    scheduler.preempted.remove(sequence)
    active = sequence.active
    keys = prompt_keys(scheduler.config, active.request, tokens, active.keys)
    _start_prefill(scheduler, [sequence], tokens, keys)
    return True


def _try_admit(scheduler: Scheduler, active: ActiveRequest) -> bool:
    request = active.request
    if request.mode is not Mode.RECEIVE and not _has_prefill_room(scheduler):
        return False
    num_sequences = request.choices if request.mode is not Mode.PREFILL else 1
    outputs = active.initial_outputs
    tokens = np.concatenate([request.prompt_ids, outputs[0]])
    active.keys = prompt_keys(scheduler.config, request, tokens, active.keys)
    pages = -(-len(tokens) // scheduler.config.page_size)
    spare = num_sequences - 1 if len(tokens) % scheduler.config.page_size else 0
    growth = 0 if request.mode is Mode.PREFILL else _growth(scheduler, request, pages)
    cached = scheduler.blocks.count_cached(active.keys)
    wanted = pages - cached + scheduler.blocks.count_evictable(active.keys)
    wanted += spare + growth * num_sequences
    largest = int(scheduler.slots.growth().max(initial=0))
    kept_back = max(growth_reserve(scheduler, wanted), largest)
    if num_sequences > scheduler.slots.num_free or wanted > scheduler.blocks.available - kept_back:
        return False
    active.sequences = [Sequence(active, i, outputs[i]) for i in range(num_sequences)]
    if num_sequences > 1 and request.generated:
        _admit_resumed(scheduler, active)
        return True
    active.spare_pages = scheduler.blocks.allocate_apart(spare)
    if request.mode is Mode.RECEIVE and not _take_over(scheduler, active, len(tokens), cached):
        _reserve(scheduler, active, tokens)
    else:
        active.state = RequestState.ACTIVE
        _start_prefill(scheduler, active.sequences, tokens, active.keys)
    return True


def _take_over(
    scheduler: Scheduler, active: ActiveRequest, num_tokens: int, cached_pages: int
) -> bool:
    """Whether the prompt of a RECEIVE request is computed here: most of it is held, a short rest is
    left, and the next step may begin that."""
    held = cached_pages * scheduler.config.page_size
    if num_tokens - held > min(active.request.takeover_tokens, held):
        return False
    if not _has_prefill_room(scheduler):
        return False
    scheduler.emit(active.sink, TakenOver(active.request.id, held))
    return True


def _growth(scheduler: Scheduler, request: Request, pages: int) -> int:
    """Pages that a sequence with `pages` pages will want soon: one, unless it is complete."""
    longest = len(request.prompt_ids) + request.stop.max_tokens
    return min(1, -(-longest // scheduler.config.page_size) - pages)


def _admit_resumed(scheduler: Scheduler, active: ActiveRequest) -> None:
    """Choices that differ already are computed one by one, as if they had been preempted. They have
    only the prompt's keys in common."""
    del active.keys[len(active.request.prompt_ids) // scheduler.config.page_size :]
    active.state = RequestState.ACTIVE
    scheduler.preempted.extend(active.sequences)


def _reserve(scheduler: Scheduler, active: ActiveRequest, tokens: NDArray[np.int32]) -> None:
    for sequence in active.sequences:
        scheduler.enter_slot(sequence, SlotState.RESERVED)
    held = _allocate_prompt(scheduler, active.sequences[0].slot, len(tokens), active.keys)
    active.state = RequestState.RESERVED
    pages = scheduler.slots.pages(active.sequences[0].slot)
    scheduler.emit(active.sink, Reserved(active.request.id, pages, held))


def _start_prefill(
    scheduler: Scheduler, sequences: list[Sequence], tokens: NDArray[np.int32], keys: list[bytes]
) -> None:
    for sequence in sequences:
        scheduler.enter_slot(sequence, SlotState.PREFILLING)
    leader = sequences[0]
    held = _allocate_prompt(scheduler, leader.slot, len(tokens), keys)
    cached = held * scheduler.config.page_size
    scheduler.cached_tokens += cached
    scheduler.slots.kv_len[leader.slot] = cached
    scheduler.prefills.append(
        PrefillTask(
            leader=leader,
            followers=sequences[1:],
            num_tokens=len(tokens),
            keys=keys,
            cursor=cached,
            cached_tokens=cached,
            published_pages=held,
            slot=leader.slot,
            generation=int(scheduler.slots.generation[leader.slot]),
        )
    )


def _allocate_prompt(scheduler: Scheduler, slot: int, num_tokens: int, keys: list[bytes]) -> int:
    """Cached pages, then fresh ones. Returns how many came from the cache."""
    cached = scheduler.blocks.acquire(keys)
    count = -(-num_tokens // scheduler.config.page_size) - len(cached)
    scheduler.slots.set_pages(slot, np.concatenate([cached, scheduler.blocks.allocate(count)]))
    return len(cached)


def _age(sequence: Sequence) -> tuple[int, int]:
    return (sequence.active.seniority, sequence.choice)
