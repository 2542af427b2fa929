"""Settles a step: reads its tokens, finds ends, keys computed pages and emits events.

A row counts only if its slot still has its planned generation. A sequence that ended or was
cancelled meanwhile has left one more row in flight, whose token is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.pages.prefix import request_keys
from engine.schedule.masking import consume
from engine.schedule.preemption import finish_preemption
from engine.schedule.recovery import lose_hooks, step_is_over
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequences import ChunkPlan, RequestState, Sequence
from engine.schedule.slots import SlotState
from engine.step.plan import ScoreResult, StepPlan, StepResult
from engine.stopping import end_reason
from engine.types import (
    ChunkComputed,
    EndReason,
    FailureReason,
    Mode,
    NewTokens,
    Prefilled,
    PromptScored,
    TokenRecord,
)

Bools = NDArray[np.bool_]
Rows = NDArray[np.intp]


def settle_step(
    scheduler: Scheduler,
    plan: StepPlan,
    result: StepResult,
    hand_out: Callable[[], None] = lambda: None,
) -> None:
    """Applies the result of the oldest step in flight.

    Args:
        scheduler: the scheduler that planned it.
        plan: the plan of the step.
        result: the result of the step.
        hand_out: called as soon as the chunks' events are queued, and again when all others are. So
            neither the sending of KV nor tokens wait for the rest of the work.
    """
    now_ns = time.time_ns()
    scheduler.step_succeeded()
    step_is_over(scheduler, plan)
    alive = _alive(scheduler, plan)
    scheduler.slots.count_in_flight(plan.sample_slots[alive], -1)
    _fail_rows(scheduler, plan, alive & ~result.finite)
    if result.hook_failures:
        lose_hooks(scheduler, plan, result.hook_failures)
    planned = scheduler.chunks.pop(plan.number, ())
    chunks = [chunk for chunk in planned if scheduler.runs(chunk.task)]
    for chunk in chunks:
        _tell_chunk(scheduler, chunk, result, now_ns)
    hand_out()
    for chunk in chunks:
        _keep_chunk(scheduler, chunk)
    _settle_tokens(scheduler, plan, result, _alive(scheduler, plan), now_ns)
    hand_out()
    scheduler.let_go()


def _alive(scheduler: Scheduler, plan: StepPlan) -> Bools:
    """[S]: rows whose sequence is still in its slot."""
    current = scheduler.slots.generation[plan.sample_slots]
    return np.asarray(current == plan.sample_generations, np.bool_)


def _fail_rows(scheduler: Scheduler, plan: StepPlan, bad: Bools) -> None:
    for slot in set(plan.sample_slots[bad].tolist()):
        owner = scheduler.owners[slot]
        if owner is not None:
            scheduler.fail(owner.active, FailureReason.NUMERICAL)


# -- tokens -------------------------------------------------------------------------------------


def _settle_tokens(
    scheduler: Scheduler, plan: StepPlan, result: StepResult, alive: Bools, now_ns: int
) -> None:
    """Settles the tokens of sequences in the batch. PREFILL requests have none there, because their
    chunks carry all events."""
    slots = scheduler.slots
    rows = np.flatnonzero(alive)
    if rows.size == 0:
        return
    where = plan.sample_slots[rows].astype(np.intp)
    indices, tokens = plan.sample_indices[rows], result.tokens[rows]
    slots.outputs[where, indices] = tokens
    slots.output_len[where] = indices + 1
    stopped = (slots.stop_ids[where] == tokens[:, None]).any(1)
    stopped &= indices >= slots.min_tokens[where]
    at_limit = slots.prompt_len[where] + indices + 1 >= slots.limit_len[where]
    ended = stopped | at_limit
    _tell_tokens(scheduler, plan, result, rows, now_ns)
    for i in np.flatnonzero(ended).tolist():
        owner = _owner(scheduler, int(where[i]))
        scheduler.end(owner, _reason(scheduler, owner, int(tokens[i]), bool(stopped[i])))
    consume(scheduler, where[~ended], tokens[~ended])
    leaving = where[(slots.state[where] == SlotState.PREEMPTING) & (slots.in_flight[where] == 0)]
    for slot in leaving.tolist():
        finish_preemption(scheduler, _owner(scheduler, slot))


def _tell_tokens(
    scheduler: Scheduler, plan: StepPlan, result: StepResult, rows: Rows, now_ns: int
) -> None:
    """Emits one event for each sink that has sequences among `rows`."""
    slots = scheduler.slots
    while rows.size:
        sinks = slots.sink[plan.sample_slots[rows]]
        mine = np.asarray(sinks == sinks[0], np.bool_)
        told, rows = _youngest_first(plan, rows[mine]), rows[~mine]
        where = plan.sample_slots[told]
        event = NewTokens(
            request_ids=slots.request_id[where].tolist(),
            choices=slots.choice[where],
            indices=plan.sample_indices[told],
            token_ids=result.tokens[told],
            scored=_scored(scheduler, plan, result, told),
            at_ns=now_ns,
        )
        scheduler.emit(sinks[0], event)


def _youngest_first(plan: StepPlan, rows: Rows) -> Rows:
    """The rows with sequences that just joined first, because they have waited longest for a token
    and it takes some milliseconds to pass on a step's tokens. The others keep their order."""
    return rows[np.argsort(plan.sample_indices[rows], kind="stable")]


def _scored(
    scheduler: Scheduler, plan: StepPlan, result: StepResult, rows: Rows
) -> dict[int, TokenRecord]:
    """Records by place in `rows`. They cost nothing in a batch without log probabilities."""
    if result.logprobs is None:
        return {}
    records = (
        token_record(_owner(scheduler, int(plan.sample_slots[row])), result, row)
        for row in rows.tolist()
    )
    return {i: record for i, record in enumerate(records) if record.logprob is not None}


def _owner(scheduler: Scheduler, slot: int) -> Sequence:
    owner = scheduler.owners[slot]
    assert owner is not None, "a live row has an owner"
    return owner


def _reason(scheduler: Scheduler, owner: Sequence, token: int, stopped: bool) -> EndReason:
    if not stopped:
        return EndReason.LENGTH
    is_eos = token in scheduler.config.eos_token_ids and not owner.active.request.stop.ignore_eos
    return EndReason.END_OF_SEQUENCE if is_eos else EndReason.STOP_TOKEN


def token_record(owner: Sequence, result: StepResult, row: int) -> TokenRecord:
    """The token of a row, with its log probabilities if the request wants them."""
    token, top_n = int(result.tokens[row]), owner.active.request.sampling.top_logprobs
    if top_n is None or result.logprobs is None:
        return TokenRecord(token)
    logprob = float(result.logprobs[row])
    if top_n == 0 or result.top_ids is None or result.top_logprobs is None:
        return TokenRecord(token, logprob)
    best = tuple(result.top_ids[row, :top_n].tolist())
    return TokenRecord(token, logprob, best, tuple(result.top_logprobs[row, :top_n].tolist()))


# -- chunks -------------------------------------------------------------------------------------


def _tell_chunk(scheduler: Scheduler, chunk: ChunkPlan, result: StepResult, now_ns: int) -> None:
    task, active = chunk.task, chunk.task.leader.active
    if chunk.score >= 0:
        task.scores.extend(_score_records(result.scores[chunk.score]))
    if chunk.is_last and task.scores:
        scheduler.emit(active.sink, PromptScored(active.request.id, tuple(task.scores)))
    if active.request.mode is not Mode.PREFILL or active.state is not RequestState.ACTIVE:
        return
    pages = scheduler.slots.pages(task.leader.slot)
    scheduler.emit(active.sink, ChunkComputed(active.request.id, chunk.end, pages, now_ns))
    if chunk.is_last:
        _tell_prefilled(scheduler, chunk, result, now_ns)


def _keep_chunk(scheduler: Scheduler, chunk: ChunkPlan) -> None:
    """Keys the pages of a chunk. The pages of a whole PREFILL prompt are held for the transfer."""
    _publish(scheduler, chunk)
    active = chunk.task.leader.active
    if (
        chunk.is_last
        and active.request.mode is Mode.PREFILL
        and active.state is RequestState.ACTIVE
    ):
        scheduler.hold(active)


def _publish(scheduler: Scheduler, chunk: ChunkPlan) -> None:
    """Keys the pages that are complete with this chunk."""
    config, task = scheduler.config, chunk.task
    complete = chunk.end // config.page_size
    if not config.prefix_cache or complete <= task.published_pages:
        return
    active = task.leader.active
    task.keys = (
        request_keys(
            config,
            active.request,
            task.leader.tokens()[: complete * config.page_size],
            task.keys[:complete],
        )
        + task.keys[complete:]
    )
    first = task.published_pages
    pages = scheduler.slots.page_table[task.leader.slot, first:complete]
    scheduler.blocks.publish(pages, task.keys[first:complete], first)
    scheduler.tiers.published(task.keys[:complete], first)
    task.published_pages = complete


def _tell_prefilled(
    scheduler: Scheduler, chunk: ChunkPlan, result: StepResult, now_ns: int
) -> None:
    """PREFILL: emits the first tokens."""
    leader = chunk.task.leader
    active = leader.active
    stop, index = active.request.stop, len(leader.outputs)
    records, ends = [], []
    for row in range(chunk.first_sample, chunk.first_sample + active.request.choices):
        record = token_record(leader, result, row)
        records.append(record)
        ends.append(
            end_reason(record.token_id, index, stop, scheduler.config.eos_token_ids, context_room=1)
        )
    scheduler.emit(active.sink, Prefilled(active.request.id, tuple(records), tuple(ends), now_ns))


def _score_records(score: ScoreResult) -> list[TokenRecord]:
    columns = (score.token_ids, score.logprobs, score.top_ids, score.top_logprobs)
    return [
        TokenRecord(token, logprob, tuple(best), tuple(best_logprobs))
        for token, logprob, best, best_logprobs in zip(*(c.tolist() for c in columns), strict=True)
    ]
