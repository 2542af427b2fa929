"""Spans of a decode attempt: kv.grant, kv.receive, decode.generate; where the prompt is computed
here: its two and decode.generate."""

from __future__ import annotations

import time

import numpy as np
from opentelemetry.util.types import AttributeValue

from baton.worker_spans import milliseconds, write_prompt_spans
from baton.worker_wire import kv_tokens
from decode_service.attempt import DecodeAttempt
from kv_transfer.events import Delivered
from telemetry.names import Attr, SpanName
from telemetry.tracing import link_from, write_span


def write_grant(attempt: DecodeAttempt, error: str = "") -> None:
    """Pages were granted after a wait, or the wait ended without a grant."""
    end_ns = attempt.granted_ns or time.time_ns()
    attributes: dict[str, AttributeValue] = {
        Attr.KV_WAITED_MS: milliseconds(attempt.received_ns, end_ns)
    }
    if attempt.granted_ns:
        attributes |= _transfer(attempt)
    write_span(
        SpanName.KV_GRANT,
        attempt.traceparent,
        attempt.received_ns,
        end_ns,
        attributes,
        error=error,
    )


def write_receive(attempt: DecodeAttempt, event: Delivered, page_bytes: int) -> None:
    """The KV is here."""
    attributes = _transfer(attempt) | {
        Attr.KV_BYTES: (attempt.num_pages - attempt.held_pages) * page_bytes,
        Attr.KV_NOTIFICATIONS: event.notifications,
    }
    write_span(
        SpanName.KV_RECEIVE,
        attempt.traceparent,
        event.granted_ns,
        event.delivered_ns,
        attributes,
        links=link_from(attempt.traceparent, event.send_span_id),
    )


def write_receive_failed(attempt: DecodeAttempt, error: str) -> None:
    """The KV was given up while it was on its way."""
    write_span(
        SpanName.KV_RECEIVE,
        attempt.traceparent,
        attempt.granted_ns,
        time.time_ns(),
        _transfer(attempt),
        error=error,
    )


def write_prompt(attempt: DecodeAttempt, error: str = "") -> None:
    """The prompt of an attempt was computed here, or was given up."""
    tokens = kv_tokens(attempt.request) - attempt.cached_tokens if attempt.computed_ns else 0
    write_prompt_spans(
        attempt.traceparent,
        attempt.received_ns,
        attempt.started_ns,
        attempt.computed_ns,
        tokens=tokens,
        cached_tokens=attempt.cached_tokens,
        chunks=0,
        error=error,
    )


def write_generate(attempt: DecodeAttempt, error: str = "") -> None:
    """The last choice ended, or all of them were made to."""
    attributes: dict[str, AttributeValue] = {
        Attr.DECODE_TOKENS: attempt.tokens,
        Attr.DECODE_STEPS: attempt.steps,
        Attr.DECODE_PREEMPTIONS: attempt.preemptions,
        Attr.DECODE_JOIN_WAIT_MS: milliseconds(attempt.ready_ns, attempt.joined_ns),
    }
    if attempt.second_token_gap_ms is not None:
        attributes[Attr.DECODE_SECOND_TOKEN_GAP_MS] = attempt.second_token_gap_ms
    if attempt.gaps_ms:
        p50, p99 = np.percentile(np.frombuffer(attempt.gaps_ms, np.float32), (50, 99))
        attributes |= {Attr.DECODE_ITL_P50_MS: float(p50), Attr.DECODE_ITL_P99_MS: float(p99)}
    began_ns = max(attempt.joined_ns, attempt.ready_ns)
    ended_ns = time.time_ns() if error else max(attempt.last_token_ns, began_ns)
    write_span(
        SpanName.DECODE_GENERATE,
        attempt.traceparent,
        began_ns,
        ended_ns,
        attributes,
        error=error,
    )


def _transfer(attempt: DecodeAttempt) -> dict[str, AttributeValue]:
    return {
        Attr.TRANSFER_ID: attempt.transfer_id.hex(),
        Attr.KV_PAGES: attempt.num_pages - attempt.held_pages,
        Attr.KV_HELD_PAGES: attempt.held_pages,
    }
