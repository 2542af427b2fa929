"""The spans of a decode leg.

With a hand-off they are kv.grant, kv.receive and decode.generate. If the prompt is computed here,
they are prefill.queue, prefill.compute and decode.generate. A leg that failed has them up to the
one that failed, which carries the reason.
"""

from __future__ import annotations

import numpy as np
from opentelemetry.util.types import AttributeValue

from decode_service.leg import DecodeLeg
from telemetry.names import Attr, SpanName
from telemetry.tracing import link_from, write_span
from worker_base.messages import kv_tokens
from worker_base.page_layout import PageLayout
from worker_base.spans import Skew, milliseconds, skew_of, write_prompt_spans


def write_spans(leg: DecodeLeg, layout: PageLayout, skew: Skew) -> None:
    """Writes all spans of a leg whose outcome is known."""
    if leg.is_whole:
        computed = kv_tokens(leg.request) - leg.cached_tokens if leg.computed_ns else 0
        write_prompt_spans(leg, computed, skew)
    else:
        _write_grant(leg)
        if leg.granted_ns:
            _write_receive(leg, layout)
    if leg.ready_ns:
        _write_generate(leg, skew)


def _write_grant(leg: DecodeLeg) -> None:
    """Pages were granted after a wait, or the wait ended without a grant."""
    end_ns = leg.granted_ns or leg.over_ns
    attributes: dict[str, AttributeValue] = {
        Attr.KV_WAITED_MS: milliseconds(leg.received_ns, end_ns)
    }
    if leg.granted_ns:
        attributes |= _transfer(leg)
    write_span(
        SpanName.KV_GRANT,
        leg.traceparent,
        leg.received_ns,
        end_ns,
        attributes,
        error="" if leg.granted_ns else leg.error,
    )


def _write_receive(leg: DecodeLeg, layout: PageLayout) -> None:
    """The KV was delivered, or was given up on its way."""
    event, attributes = leg.delivered, _transfer(leg)
    if event is None:
        write_span(
            SpanName.KV_RECEIVE,
            leg.traceparent,
            leg.granted_ns,
            leg.over_ns,
            attributes,
            error=leg.error,
        )
        return
    attributes[Attr.KV_BYTES] = layout.bytes_of(leg.ranges)
    attributes[Attr.KV_NOTIFICATIONS] = event.notifications
    write_span(
        SpanName.KV_RECEIVE,
        leg.traceparent,
        event.granted_ns,
        event.delivered_ns,
        attributes,
        links=link_from(leg.traceparent, event.send_span_id),
    )


def _write_generate(leg: DecodeLeg, skew: Skew) -> None:
    """The last choice ended, or all of them were made to."""
    attributes: dict[str, AttributeValue] = {
        Attr.DECODE_TOKENS: leg.tokens,
        Attr.DECODE_STEPS: leg.steps,
        Attr.DECODE_PREEMPTIONS: leg.preemptions,
        Attr.DECODE_JOIN_WAIT_MS: milliseconds(leg.ready_ns, leg.joined_ns),
    }
    if leg.drafted_tokens:
        attributes[Attr.DECODE_DRAFTED] = leg.drafted_tokens
        attributes[Attr.DECODE_ACCEPTED] = leg.accepted_tokens
    if leg.second_token_gap_ms is not None:
        attributes[Attr.DECODE_SECOND_TOKEN_GAP_MS] = leg.second_token_gap_ms
    if parts_ms := leg.gap_parts_ms:
        attributes[Attr.DECODE_GAP_PARTS_MS] = [*parts_ms.values()]
    if leg.gaps_ms:
        p50, p99 = np.percentile(np.frombuffer(leg.gaps_ms, np.float32), (50, 99))
        attributes |= {Attr.DECODE_ITL_P50_MS: float(p50), Attr.DECODE_ITL_P99_MS: float(p99)}
    began_ns = max(leg.joined_ns, leg.ready_ns)
    if leg.longest_gap_end_ns:
        attributes[Attr.DECODE_LONGEST_GAP_MS] = leg.longest_gap_ms
        attributes[Attr.DECODE_LONGEST_GAP_AT_MS] = milliseconds(began_ns, leg.longest_gap_end_ns)
    ended_ns = leg.over_ns if leg.error else max(leg.last_token_ns, began_ns)
    attributes |= skew_of(skew, began_ns, ended_ns)
    write_span(
        SpanName.DECODE_GENERATE,
        leg.traceparent,
        began_ns,
        ended_ns,
        attributes,
        error=leg.error,
    )


def _transfer(leg: DecodeLeg) -> dict[str, AttributeValue]:
    return {
        Attr.TRANSFER_ID: leg.transfer_id.hex(),
        Attr.KV_PAGES: sum(end - first for first, end in leg.ranges),
        Attr.KV_HELD_PAGES: leg.held_pages,
    }
