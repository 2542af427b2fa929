"""The engine's load: workers report it, and routers choose workers by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.loop.rates import StepRates
from engine.schedule.admission import grantable_pages
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequences import RequestState
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
    granted, quarantined = _transferred_pages(scheduler)
    return EngineLoad(
        progress=progress,
        queued_prefill_tokens=_queued_prefill_tokens(scheduler, in_flight),
        requests=frozenset(scheduler.requests),
        waiting_requests=len(scheduler.waiting) + len(scheduler.preempted),
        wanted_pages=_wanted_pages(scheduler) + blocks.available - grantable_pages(scheduler),
        wanted_sequences=_wanted_sequences(scheduler),
        running_sequences=scheduler.slots.num_used,
        max_sequences=scheduler.config.max_sequences,
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
        piece_delay_ms=rates.piece.seconds * 1e3,
        piece_tokens=rates.piece.tokens,
        long_step_ms=long_step_ms,
        steps=scheduler.next_step,
        preemptions=scheduler.preemptions,
        prompt_tokens_computed=rates.prompt_tokens,
        prompt_tokens_cached=scheduler.cached_tokens,
        prompt_tokens_loaded=dict(scheduler.loaded_tokens),
        tokens_sampled=rates.tokens_sampled,
        tiers=scheduler.tiers.load(),
        hook_failures=dict(scheduler.hooks.failures) if scheduler.hooks else None,
    )


def _queued_prefill_tokens(scheduler: Scheduler, in_flight: Iterable[StepPlan]) -> int:
    """Prompt tokens accepted, not computed yet and not cached, as far as it was looked up."""
    waiting = sum(
        max(1, len(active.request.prompt_ids) - active.cached_tokens)
        for active in scheduler.waiting
        if active.request.mode is not Mode.RECEIVE
    )
    admitted = sum(task.remaining for task in scheduler.prefills)
    return waiting + admitted + sum(plan.prompt_tokens for plan in in_flight)


def _wanted_pages(scheduler: Scheduler) -> int:
    """Pages that waiting prompts need, without those that they hold while others of theirs are
    loaded."""
    size = scheduler.config.page_size
    needed = sum(-(-len(active.request.prompt_ids) // size) for active in scheduler.waiting)
    waits = [active.wait for active in scheduler.waiting if active.wait]
    held = sum(len(wait.pinned) + wait.coming_pages for wait in waits if not wait.is_over)
    return max(0, needed - held)


def _wanted_sequences(scheduler: Scheduler) -> int:
    """Slots that waiting requests need to decode here."""
    decoding = [one for one in scheduler.waiting if one.request.mode is not Mode.PREFILL]
    return sum(active.request.choices for active in decoding)


def _transferred_pages(scheduler: Scheduler) -> tuple[int, int]:
    """Pages of RECEIVE requests: those granted, and those in quarantine. One pass, since most
    requests run and are asked for no more than their state."""
    granted = quarantined = 0
    for active in scheduler.requests.values():
        state = active.state
        if state is _ACTIVE or active.request.mode is not _RECEIVE:
            continue
        if state is _HELD:
            quarantined += len(active.held_pages)
        elif state is _RESERVED:
            granted += int(scheduler.slots.page_count[active.sequences[0].slot])
    return granted, quarantined
