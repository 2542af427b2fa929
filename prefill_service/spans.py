"""The spans of a prefill leg: prefill.queue, prefill.compute, kv.send.

The id of kv.send travels with the last notification. So `prefill_service.outgoing` starts that
span, and this module ends it.
"""

from __future__ import annotations

from opentelemetry.util.types import AttributeValue

from kv_transfer.events import SendStats
from prefill_service.leg import PrefillLeg
from telemetry.names import Attr
from telemetry.tracing import end_span
from worker_base.spans import Skew, milliseconds, write_prompt_spans


def write_spans(leg: PrefillLeg, transport: str, skew: Skew) -> None:
    """Writes all spans of a leg whose outcome is known; `transport` is the one to its peer."""
    computed_tokens = leg.computed_tokens - leg.cached_tokens
    write_prompt_spans(leg, computed_tokens, skew, leg.chunks)
    span, destination = leg.outgoing.span, leg.outgoing.destination
    if span is None or destination is None:
        return
    attributes: dict[str, AttributeValue] = {
        Attr.TRANSFER_ID: destination.transfer_id.hex(),
        Attr.KV_HELD_PAGES: destination.held_pages,
        Attr.KV_TRANSPORT: transport,
    }
    if leg.sent is None:
        end_span(span, leg.over_ns, attributes, error=leg.error)
    else:
        attributes |= _sent(leg.sent, leg.computed_ns)
        end_span(span, leg.sent.done_ns, attributes)


def _sent(stats: SendStats, computed_ns: int) -> dict[str, AttributeValue]:
    wire_ms = milliseconds(stats.started_ns, stats.done_ns)
    return {
        Attr.KV_PAGES: stats.pages,
        Attr.KV_BYTES: stats.bytes,
        Attr.KV_PUSHES: stats.pushes,
        Attr.KV_DESCRIPTORS: stats.descriptors,
        Attr.KV_POSTING_MS: stats.posting_s * 1e3,
        Attr.KV_WIRE_MS: wire_ms,
        Attr.KV_EXPOSED_MS: milliseconds(computed_ns, stats.done_ns),
        Attr.KV_GIGABYTES_PER_S: stats.bytes / wire_ms / 1e6 if wire_ms else 0.0,
    }
