"""The engine's load: workers report it, and routers choose workers by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.loads import AdapterLoad
from engine.loop.rates import StepRates
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequences import ActiveRequest, RequestState
from engine.schedule.slots import SlotTable
from engine.step.plan import StepPlan
from engine.types import EngineLoad, Mode

_ACTIVE, _RESERVED, _HELD = RequestState.ACTIVE, RequestState.RESERVED, RequestState.HELD
_RECEIVE = Mode.RECEIVE
"""Names of this module: Python 3.11 looks a member of an enumeration up at each use."""


def load_of(
    scheduler: Scheduler,
    rates: StepRates,
    in_flight: Sequence[StepPlan],
    *,
    progress: int,
    long_step_ms: float,
) -> EngineLoad:
    """The load now. Call it on the step loop's thread, since it reads the scheduler.

    Args:
        scheduler: holds the requests.
        rates: the rates of its steps.
        in_flight: steps launched and not settled.
        progress: progress counter of the step loop.
        long_step_ms: expected duration of the step in flight, if it is long; else 0.
    """
    blocks, cost, fetches = scheduler.blocks, rates.token_cost, scheduler.fetches
    requests, admission, batch = scheduler.requests, scheduler.admission, scheduler.batch
    waiting, size = requests.waiting, scheduler.config.page_size
    granted, quarantined = _transferred_pages(requests.by_id.values(), batch.slots)
    return EngineLoad(
        progress=progress,
        queued_prefill_tokens=_queued_tokens(waiting)
        + batch.queued_tokens
        + sum(plan.prompt_tokens for plan in in_flight),
        requests=frozenset(requests.by_id),
        waiting_requests=len(waiting) + len(requests.preempted),
        wanted_pages=_wanted_pages(waiting, size) + blocks.available - admission.grantable_pages(),
        wanted_sequences=_wanted_sequences(waiting),
        running_sequences=batch.slots.num_used,
        max_sequences=most_sequences(scheduler),
        total_pages=blocks.total,
        free_pages=blocks.free,
        evictable_pages=blocks.evictable,
        granted_pages=granted + fetches.coming_pages,
        quarantined_pages=quarantined + fetches.quarantined_pages,
        damaged_pages=blocks.damaged,
        step_ms=rates.step_s * 1e3,
        prefill_tokens_per_s=rates.prefill.tokens_per_s,
        prefill_rate_age_s=rates.prefill.age_s,
        prefill_token_s=cost.token_s,
        prefill_context_s=cost.context_s,
        piece_delay_ms=rates.chunk.seconds * 1e3,
        piece_tokens=rates.chunk.tokens,
        long_step_ms=long_step_ms,
        steps=batch.next_step,
        preemptions=requests.preemptions,
        beam_searches=requests.choosing.searches,
        beam_forks=requests.choosing.forks,
        prompt_tokens_computed=rates.prompt_tokens,
        prompt_tokens_cached=admission.cached_tokens,
        prompt_tokens_loaded=dict(admission.loaded_tokens),
        tokens_sampled=rates.tokens_sampled,
        tiers=scheduler.tiers.load(),
        groups=scheduler.others.load(blocks),
        prompt_tokens_unresumable=admission.unresumable_tokens,
        hook_failures=dict(scheduler.hooks.failures) if scheduler.hooks else None,
        speculation=scheduler.drafts.load() if scheduler.drafts else None,
        adapters=_adapters(scheduler) if scheduler.config.max_adapters else None,
    )


def _adapters(scheduler: Scheduler) -> AdapterLoad:
    in_host = scheduler.requests.adapters.in_host
    return replace(scheduler.batch.adapters.load(), in_host=in_host)


def most_sequences(scheduler: Scheduler) -> int:
    """Sequences that may run together: one a slot, if their windows have room."""
    slots = scheduler.batch.slots
    free = scheduler.others.free_sequences(slots.num_free, slots.final_pages)
    return max(1, slots.num_used + free)  # A short one always finds room.


def _queued_tokens(waiting: Iterable[ActiveRequest]) -> int:
    """Prompt tokens of waiting requests that are not cached, as far as it was looked up."""
    return sum(
        max(1, len(active.request.prompt_ids) - active.cached_tokens)
        for active in waiting
        if active.request.mode is not Mode.RECEIVE
    )


def _wanted_pages(waiting: Sequence[ActiveRequest], page_size: int) -> int:
    """Pages that waiting prompts need, without those that they hold while others of theirs are
    loaded."""
    needed = sum(-(-len(active.request.prompt_ids) // page_size) for active in waiting)
    waits = [active.wait for active in waiting if active.wait]
    held = sum(len(wait.pinned) + wait.coming_pages for wait in waits if not wait.is_over)
    return max(0, needed - held)


def _wanted_sequences(waiting: Iterable[ActiveRequest]) -> int:
    """Slots that waiting requests need to decode here."""
    decoding = [one for one in waiting if one.request.mode is not Mode.PREFILL]
    return sum(active.request.choices for active in decoding)


def _transferred_pages(requests: Iterable[ActiveRequest], slots: SlotTable) -> tuple[int, int]:
    """Pages of RECEIVE requests: those granted, and those in quarantine. One pass, since most
    requests run and are asked for no more than their state."""
    granted = quarantined = 0
    for active in requests:
        state = active.state
        if state is _ACTIVE or active.request.mode is not _RECEIVE:
            continue
        if state is _HELD:
            quarantined += len(active.held_pages)
        elif state is _RESERVED:
            granted += int(slots.page_count[active.sequences[0].slot])
    return granted, quarantined
