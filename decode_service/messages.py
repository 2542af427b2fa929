"""What a decode worker tells the router of an attempt, apart from its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from baton.worker.v1 import worker_pb2
from baton.worker_wire import end_reason_message, pack_ids, record_message
from decode_service.attempt import DecodeAttempt
from engine.types import PageIds, SequenceEnded, TokenRecord


def granted_message(
    attempt: DecodeAttempt, pages: PageIds, epoch: int, agent_name: str
) -> worker_pb2.Grant:
    """The prefill worker may write these pages of this worker's pool."""
    return worker_pb2.Grant(
        attempt_id=attempt.id,
        transfer_id=attempt.transfer_id,
        decode_epoch=epoch,
        decode_agent_name=agent_name,
        page_ids=pack_ids(pages),
        held_pages=attempt.held_pages,
    )


def first_token_message(
    attempt: DecodeAttempt, records: Sequence[TokenRecord]
) -> worker_pb2.FirstToken:
    """The first token of every choice, where the prompt is computed here."""
    return worker_pb2.FirstToken(
        attempt_id=attempt.id,
        records=[record_message(record) for record in records],
        cached_prompt_tokens=attempt.cached_tokens,
    )


def finished_message(attempt: DecodeAttempt, event: SequenceEnded) -> worker_pb2.Finished:
    """A choice ended; the last one's carries the timings."""
    finished = worker_pb2.Finished(
        attempt_id=attempt.id,
        choice_index=event.choice,
        reason=end_reason_message(event.reason),
        output_tokens=event.output_tokens,
    )
    if event.last:
        finished.timings.CopyFrom(attempt.timings(event))
    return finished
