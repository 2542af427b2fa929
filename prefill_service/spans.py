"""Spans of a prefill attempt: prefill.queue, prefill.compute, kv.send."""

from __future__ import annotations

from opentelemetry.util.types import AttributeValue

from baton.worker_spans import milliseconds, write_prompt_spans
from kv_transfer.events import SendStats
from prefill_service.attempt import PrefillAttempt
from prefill_service.outgoing import OutgoingPrompt
from telemetry.names import Attr
from telemetry.tracing import end_span


def write_compute(attempt: PrefillAttempt, error: str = "") -> None:
    """The prompt has been computed, or was given up."""
    write_prompt_spans(
        attempt.traceparent,
        attempt.received_ns,
        attempt.started_ns,
        attempt.computed_ns,
        tokens=attempt.computed_tokens - attempt.cached_tokens,
        cached_tokens=attempt.cached_tokens,
        chunks=attempt.chunks,
        error=error,
    )


def end_send(
    attempt: PrefillAttempt, outgoing: OutgoingPrompt, stats: SendStats | None, transport: str
) -> None:
    """The transfer is over; `stats` is None where it did not complete."""
    if outgoing.span is None or outgoing.destination is None:
        return
    destination = outgoing.destination
    attributes: dict[str, AttributeValue] = {
        Attr.TRANSFER_ID: destination.transfer_id.hex(),
        Attr.KV_HELD_PAGES: destination.held_pages,
        Attr.KV_TRANSPORT: transport,
    }
    if stats is None:
        end_span(outgoing.span, None, attributes, error=attempt.error)
        return
    wire_ms = milliseconds(stats.started_ns, stats.done_ns)
    attributes |= {
        Attr.KV_PAGES: stats.pages,
        Attr.KV_BYTES: stats.bytes,
        Attr.KV_PUSHES: stats.pushes,
        Attr.KV_DESCRIPTORS: stats.descriptors,
        Attr.KV_POSTING_MS: stats.posting_s * 1e3,
        Attr.KV_WIRE_MS: wire_ms,
        Attr.KV_EXPOSED_MS: milliseconds(attempt.computed_ns, stats.done_ns),
        Attr.KV_GIGABYTES_PER_S: stats.bytes / wire_ms / 1e6 if wire_ms else 0.0,
    }
    end_span(outgoing.span, stats.done_ns, attributes)
