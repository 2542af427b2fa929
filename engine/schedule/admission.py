"""Admission of requests to slots and pages.

Pages under a transfer cannot be preempted. So a request is admitted only if the remaining pages
cover every earlier promise:

    pages(prompt) + growth <= free + evictable - max(reserve, largest single need)

The largest single need is the most pages that one sequence in a slot may still need. All others are
preempted in its favour, so one sequence always reaches its end. The reserve is for the growth of
all of them (`growth_reserve`).

Preempted sequences come first, oldest first, and no new request is admitted while one waits. Then
come requests that were begun on another worker, whose client has tokens already. Then come new ones
in the order of the policy. Smaller requests may pass one that does not fit, a bounded number of
times.

A prompt to be computed here is admitted when the next step may begin it, and not before. Earlier
pages would be empty, and a waiting prompt may still find more of its pages in the prefix cache.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.pages.prefix import prompt_keys
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequences import ActiveRequest, PrefillTask, RequestState, Sequence
from engine.schedule.slots import SlotState
from engine.tiers.protocol import Wait
from engine.types import Mode, Request, Reserved, TakenOver

EARLY_LOADS = 8
"""So many of the next requests may load pages from lower tiers before it is their turn."""
IN_SLOTS = (RequestState.ACTIVE, RequestState.RESERVED)


def admit(scheduler: Scheduler) -> None:
    """Gives slots and pages to the requests that may have them, preempted sequences first."""
    scheduler.tiers.turn()
    scheduler.fetches.turn()
    while scheduler.preempted and _readmit(scheduler, min(scheduler.preempted, key=_age)):
        pass
    if scheduler.preempted or not scheduler.waiting or scheduler.slots.num_free == 0:
        return
    in_slots = [active for active in scheduler.requests.values() if active.state in IN_SLOTS]
    prepared = [active for active in scheduler.waiting if _is_prepared(scheduler, active)]
    ordered = scheduler.policy.order(prepared, in_slots)
    ordered = sorted(ordered, key=lambda active: not active.request.generated)
    if scheduler.tiers.on or scheduler.fetches.on:
        ordered = _without_loading(scheduler, ordered)
    for active in ordered[:EARLY_LOADS]:
        _look_up(scheduler, active)
    for active in ordered:
        if _try_admit(scheduler, active):
            scheduler.waiting.remove(active)
            scheduler.policy.admitted(active)
            for older in prepared:
                older.passed_over += older.seniority < active.seniority
        elif (
            active.passed_over >= scheduler.config.max_passed_over or scheduler.slots.num_free == 0
        ):
            break


def _is_prepared(scheduler: Scheduler, active: ActiveRequest) -> bool:
    """Whether a waiting request may be admitted. A request whose pages have come waits again, and
    counts as cached what has come, which may be less than it waited for."""
    if active.state is RequestState.LOADING and active.wait and active.wait.is_over:
        active.state = RequestState.WAITING
        cached = scheduler.blocks.count_cached(active.keys)
        active.cached_tokens = cached * scheduler.config.page_size
    return active.state is RequestState.WAITING and active.is_prepared


def _look_up(scheduler: Scheduler, active: ActiveRequest) -> None:
    """Notes once how much of a prompt need not be computed, so that the load report counts only
    the rest, even while there is no room for it."""
    if active.keys or active.request.mode is Mode.RECEIVE:
        return
    tokens = np.concatenate([active.request.prompt_ids, active.initial_outputs[0]])
    active.keys = prompt_keys(scheduler.config, active.request, tokens)
    cached = scheduler.blocks.count_cached(active.keys)
    active.cached_tokens = cached * scheduler.config.page_size


def growth_reserve(scheduler: Scheduler, wanted: int) -> int:
    """Pages to keep back for the growth of sequences in slots, if `wanted` more pages are given
    out.

        max(pages each * used slots, share * all they may ask for)
        share = (use - watermark) / (1 - watermark), at least 0; use counts the wanted pages

    Up to the watermark one page for each is enough. Most sequences end before `max_tokens`. Empty
    pages for the rare long ones would make the batch smaller. In a fuller pool the next sequence is
    more likely to cause a preemption, which loses computed KV. So the reserve grows from the
    watermark on, and in a full pool it is all that running sequences may still ask for. An empty
    batch has no reserve, so a request that fits the pool is admitted in the end.
    """
    config, blocks = scheduler.config, scheduler.blocks
    least = config.reserve_pages * scheduler.slots.num_used
    use = 1 - (blocks.available - wanted) / blocks.total
    if use <= config.page_watermark or config.page_watermark >= 1:
        return least
    share = (use - config.page_watermark) / (1 - config.page_watermark)
    return max(least, math.ceil(share * int(scheduler.slots.growth().sum())))


def grantable_pages(scheduler: Scheduler) -> int:
    """The most pages that a new request could have now, beside what is kept back for others. It
    solves the rule of this module for the pages wanted: above the watermark the reserve grows with
    each of them."""
    if scheduler.preempted:
        return 0
    config, available = scheduler.config, scheduler.blocks.available
    growth = scheduler.slots.growth()
    least = max(config.reserve_pages * scheduler.slots.num_used, int(growth.max(initial=0)))
    room = available - least
    above = scheduler.blocks.total * (1 - config.page_watermark)
    if above > 0:
        slope = int(growth.sum()) / above
        room = min(room, int((available + slope * (available - above)) / (1 + slope)))
    return max(0, room)


def room_for_peers(scheduler: Scheduler, wanted: int) -> int:
    """Pages that no request of this worker waits for, if `wanted` pages are to be taken."""
    if scheduler.preempted:
        return 0
    return scheduler.blocks.available - _kept_back(scheduler, wanted)


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
    active = sequence.active
    keys = prompt_keys(scheduler.config, active.request, tokens, active.keys)
    if sequence.wait is None:
        sequence.wait = _begin_load(scheduler, keys, reserve)
    if sequence.wait is None or not sequence.wait.is_over:
        return False
    scheduler.preempted.remove(sequence)
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
    active.cached_tokens = cached * scheduler.config.page_size
    wanted = pages - cached + scheduler.blocks.count_evictable(active.keys)
    wanted += spare + growth * num_sequences
    kept_back = _kept_back(scheduler, wanted)
    if num_sequences > scheduler.slots.num_free or wanted > scheduler.blocks.available - kept_back:
        return False
    if active.wait is None and not _is_loaded(scheduler, active, kept_back):
        return False
    active.sequences = [
        Sequence(active, i, outputs[i], active.matcher_of(i)) for i in range(num_sequences)
    ]
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


def _without_loading(scheduler: Scheduler, ordered: list[ActiveRequest]) -> list[ActiveRequest]:
    """The requests that wait for no page. The next few begin to load before it is their turn."""
    for active in ordered[:EARLY_LOADS]:
        if active.wait is None:
            _load_early(scheduler, active)
    return [active for active in ordered if active.state is not RequestState.LOADING]


def _load_early(scheduler: Scheduler, active: ActiveRequest) -> None:
    tokens = np.concatenate([active.request.prompt_ids, active.initial_outputs[0]])
    pages = -(-len(tokens) // scheduler.config.page_size)
    kept_back = _kept_back(scheduler, pages)
    if pages > scheduler.blocks.available - kept_back:
        return
    active.keys = prompt_keys(scheduler.config, active.request, tokens, active.keys)
    _is_loaded(scheduler, active, kept_back)


def _is_loaded(scheduler: Scheduler, active: ActiveRequest, kept_back: int) -> bool:
    """Whether no page of a prompt comes from a lower tier or a peer. Asks for that once."""
    active.wait = _begin_load(scheduler, active.keys, kept_back)
    if active.wait is None:
        return False
    if active.request.mode is not Mode.RECEIVE:
        room = scheduler.blocks.available - kept_back
        scheduler.fetches.begin(active.wait, active.request, active.keys, room)
    if not active.wait.is_over:
        active.state = RequestState.LOADING
        pages = len(active.wait.pinned) + active.wait.coming_pages
        pages = max(pages, min(len(active.keys), scheduler.fetches.expected_pages(active.wait)))
        active.cached_tokens = pages * scheduler.config.page_size
    return active.wait.is_over


def _begin_load(scheduler: Scheduler, keys: list[bytes], kept_back: int) -> Wait | None:
    room = scheduler.blocks.available - kept_back
    queued = sum(task.remaining for task in scheduler.prefills)
    return scheduler.tiers.begin(keys, room, queued)


def _kept_back(scheduler: Scheduler, wanted: int) -> int:
    """Pages that a new request must leave, if it takes `wanted` pages."""
    largest = int(scheduler.slots.growth().max(initial=0))
    return max(growth_reserve(scheduler, wanted), largest)


def _take_over(
    scheduler: Scheduler, active: ActiveRequest, num_tokens: int, cached_pages: int
) -> bool:
    """Whether the prompt of a RECEIVE request is computed here. This needs three things: the cache
    holds most of it, the rest is short, and the next step may begin the rest."""
    held = cached_pages * scheduler.config.page_size
    if num_tokens - held > min(active.request.takeover_tokens, held):
        return False
    if not _has_prefill_room(scheduler):
        return False
    scheduler.emit(active.sink, TakenOver(active.request.id, held))
    return True


def _growth(scheduler: Scheduler, request: Request, pages: int) -> int:
    """Pages that a sequence with `pages` pages will need soon: one, unless it is complete."""
    longest = len(request.prompt_ids) + request.stop.max_tokens
    return min(1, -(-longest // scheduler.config.page_size) - pages)


def _admit_resumed(scheduler: Scheduler, active: ActiveRequest) -> None:
    """Admits choices that differ already. They are computed one by one, like preempted ones, and
    share only the prompt's keys."""
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
    loaded = _loaded_tokens(scheduler, leader, cached)
    scheduler.cached_tokens += cached
    scheduler.loaded_tokens.update(loaded)
    scheduler.slots.kv_len[leader.slot] = cached
    scheduler.prefills.append(
        PrefillTask(
            leader=leader,
            followers=sequences[1:],
            num_tokens=len(tokens),
            keys=keys,
            cursor=cached,
            cached_tokens=cached,
            loaded_tokens=loaded,
            published_pages=held,
            slot=leader.slot,
            generation=int(scheduler.slots.generation[leader.slot]),
        )
    )


def _loaded_tokens(scheduler: Scheduler, leader: Sequence, cached: int) -> dict[str, int]:
    """Those of the cached tokens that came from lower tiers, by tier."""
    wait, size = leader.wait or leader.active.wait, scheduler.config.page_size
    pages = wait.loaded_pages if wait else {}
    return {tier: min(count * size, cached) for tier, count in pages.items()}


def _allocate_prompt(scheduler: Scheduler, slot: int, num_tokens: int, keys: list[bytes]) -> int:
    """Gives a slot the cached pages, then fresh ones. Returns the number of cached pages."""
    cached = scheduler.blocks.acquire(keys)
    count = -(-num_tokens // scheduler.config.page_size) - len(cached)
    scheduler.slots.set_pages(slot, np.concatenate([cached, scheduler.blocks.allocate(count)]))
    return len(cached)


def _age(sequence: Sequence) -> tuple[int, int]:
    return (sequence.active.seniority, sequence.choice)
