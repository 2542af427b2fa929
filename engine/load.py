"""What an engine holds and has done, as others see it: workers report it, routers choose by it."""

from __future__ import annotations

from engine.rates import StepRates
from engine.scheduler import Scheduler
from engine.sequences import RequestState
from engine.types import EngineLoad, Mode


def load_of(
    scheduler: Scheduler, rates: StepRates, *, progress: int, long_step_ms: float
) -> EngineLoad:
    """The load now. To be called on the step loop's thread, like all that looks at the scheduler.

    Args:
        scheduler: what it holds.
        rates: what its steps took.
        progress: of the step loop.
        long_step_ms: how long the step in flight may take, if that is long.
    """
    blocks = scheduler.blocks
    return EngineLoad(
        progress=progress,
        queued_prefill_tokens=_queued_prefill_tokens(scheduler),
        begun_prefill_tokens=begun_prefill_tokens(scheduler),
        waiting_requests=len(scheduler.waiting) + len(scheduler.preempted),
        running_sequences=scheduler.slots.num_used,
        max_sequences=scheduler.config.max_sequences,
        total_pages=blocks.total,
        free_pages=blocks.free,
        evictable_pages=blocks.evictable,
        granted_pages=_pages_in(scheduler, RequestState.RESERVED),
        quarantined_pages=_pages_in(scheduler, RequestState.HELD),
        damaged_pages=blocks.damaged,
        step_ms=rates.step_s * 1e3,
        prefill_tokens_per_s=rates.prefill.tokens_per_s,
        prefill_rate_age_s=rates.prefill.age_s,
        long_step_ms=long_step_ms,
        steps=scheduler.next_step,
        preemptions=scheduler.preemptions,
        prompt_tokens_computed=rates.prompt_tokens,
        prompt_tokens_cached=scheduler.cached_tokens,
        tokens_sampled=rates.tokens_sampled,
    )


def _queued_prefill_tokens(scheduler: Scheduler) -> int:
    """Prompt tokens accepted and not launched yet."""
    waiting = sum(
        len(active.request.prompt_ids)
        for active in scheduler.waiting
        if active.request.mode is not Mode.RECEIVE
    )
    return waiting + sum(task.remaining for task in scheduler.prefills)


def begun_prefill_tokens(scheduler: Scheduler) -> int:
    """Launched of prompts that are begun and not through, for requests that will decode here. One
    that was in the batch already, and is computed again, is not of those queued."""
    return sum(
        task.cursor - task.cached_tokens
        for task in scheduler.prefills
        if not task.leader.active.joined and task.leader.active.request.mode is not Mode.PREFILL
    )


def _pages_in(scheduler: Scheduler, state: RequestState) -> int:
    """Pages of RECEIVE requests in this state: RESERVED are granted, HELD quarantined."""
    count = 0
    for active in scheduler.requests.values():
        if active.request.mode is Mode.RECEIVE and active.state is state:
            held = len(active.held_pages)
            count += held or int(scheduler.slots.page_count[active.sequences[0].slot])
    return count
