"""What a prefill worker tells the router of an attempt."""

from __future__ import annotations

from baton.worker.v1 import worker_pb2
from baton.worker_wire import end_reason_message, record_message, resumed_tokens
from engine.types import EndReason, Prefilled
from kv_transfer.events import SendStats
from prefill_service.attempt import PrefillAttempt


def first_token_message(attempt: PrefillAttempt, event: Prefilled) -> worker_pb2.FirstToken:
    """The first new token of every choice."""
    return worker_pb2.FirstToken(
        attempt_id=attempt.id,
        records=[record_message(record) for record in event.records],
        cached_prompt_tokens=attempt.cached_tokens,
    )


def finished_message(
    attempt: PrefillAttempt, choice: int, reason: EndReason, at_ns: int
) -> worker_pb2.Finished:
    """A choice ended with its first new token; the last one's carries the timings."""
    finished = worker_pb2.Finished(
        attempt_id=attempt.id,
        choice_index=choice,
        reason=end_reason_message(reason),
        output_tokens=resumed_tokens(attempt.request, choice) + 1,
    )
    if attempt.choices_left == 0:
        finished.timings.received_unix_ns = attempt.received_ns
        finished.timings.prefill_started_unix_ns = attempt.started_ns
        finished.timings.ready_unix_ns = at_ns
        finished.timings.last_token_unix_ns = at_ns
        finished.timings.cached_prompt_tokens = attempt.cached_tokens
    return finished


def done_message(attempt: PrefillAttempt, stats: SendStats | None) -> worker_pb2.PrefillDone:
    """Nothing more comes of the attempt; `stats` where its KV was delivered."""
    return worker_pb2.PrefillDone(
        attempt_id=attempt.id,
        received_unix_ns=attempt.received_ns,
        started_unix_ns=attempt.started_ns,
        computed_unix_ns=attempt.computed_ns,
        sent_unix_ns=stats.done_ns if stats else 0,
        cached_prompt_tokens=attempt.cached_tokens,
        bytes_sent=stats.bytes if stats else 0,
    )
