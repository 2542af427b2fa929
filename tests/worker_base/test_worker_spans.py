"""The spans that workers write: all of them, under the caller's, on every way to an end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from worker_kit import STEP_TOKENS, WHOLE, Attempted, a_pair, until

from decode_service.leg import GAP_PARTS
from telemetry.names import Attr, Metric, undeclared
from telemetry.tracing import Tracing, setup_tracing

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
PARENT_ID = 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"
LONG = 3 * STEP_TOKENS


class Recorded:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        tracing = setup_tracing("baton-worker", exporter=self._exporter)
        assert tracing is not None
        self._tracing: Tracing = tracing

    def spans(self) -> dict[str, ReadableSpan]:
        """By name, all that ended; every one under the caller's span, with declared attributes."""
        self._tracing.flush()
        spans = self._exporter.get_finished_spans()
        for span in spans:
            assert span.context is not None
            assert span.context.trace_id == TRACE_ID
            assert span.parent is not None
            assert span.parent.span_id == PARENT_ID
            assert not undeclared(span.attributes or {})
            assert span.start_time <= span.end_time
        names = [span.name for span in spans]
        assert len(names) == len(set(names)), "a span was written twice"
        return {span.name: span for span in spans}

    def close(self) -> None:
        self._tracing.shutdown()


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = Recorded()
    yield recorded
    recorded.close()


def errors(spans: dict[str, ReadableSpan]) -> dict[str, object]:
    return {
        name: (span.attributes or {}).get(Attr.ERROR_TYPE)
        for name, span in spans.items()
        if span.status.status_code is StatusCode.ERROR
    }


async def test_a_hand_off_has_all_six(recorded: Recorded) -> None:
    async with a_pair() as pair:
        attempt = Attempted(LONG, max_tokens=9, traceparent=TRACEPARENT)
        await pair.run(attempt)
        await pair.quiet()
    spans = recorded.spans()
    assert set(spans) == {
        "prefill.queue",
        "prefill.compute",
        "kv.send",
        "kv.grant",
        "kv.receive",
        "decode.generate",
    }
    assert not errors(spans)
    (link,) = spans["kv.receive"].links
    assert link.context.span_id == spans["kv.send"].context.span_id
    compute = spans["prefill.compute"].attributes or {}
    assert compute[Attr.PREFILL_TOKENS] == LONG
    assert compute[Attr.PREFILL_CHUNKS] == 3
    for name in ("kv.send", "kv.receive", "kv.grant"):
        assert (spans[name].attributes or {})[Attr.KV_PAGES] == attempt.num_pages
    sent, received = spans["kv.send"].attributes or {}, spans["kv.receive"].attributes or {}
    assert sent[Attr.KV_BYTES] == received[Attr.KV_BYTES] > 0
    assert sent[Attr.KV_TRANSPORT] == "loopback"
    assert (spans["decode.generate"].attributes or {})[Attr.DECODE_TOKENS] == 8
    generate = spans["decode.generate"].attributes or {}
    assert Attr.DECODE_ITL_P99_MS in generate
    span = spans["decode.generate"]
    took_ms = (span.end_time - span.start_time) / 1e6
    assert generate[Attr.DECODE_ITL_P99_MS] <= generate[Attr.DECODE_LONGEST_GAP_MS] <= took_ms
    assert 0 < generate[Attr.DECODE_LONGEST_GAP_AT_MS] <= took_ms
    check_second_token(spans)
    check_parts(generate)
    assert gaps_counted(pair.d) == 1


def check_parts(generate: Mapping[str, Any]) -> None:
    """They add up to the gap."""
    parts = generate[Attr.DECODE_GAP_PARTS_MS]
    assert len(parts) == len(GAP_PARTS)
    assert sum(parts) == pytest.approx(generate[Attr.DECODE_SECOND_TOKEN_GAP_MS], abs=0.5)
    assert all(part >= 0 for part in parts)


def check_second_token(spans: dict[str, ReadableSpan]) -> None:
    """It came so long after the prompt was computed, within the span of decoding."""
    computed_ns, generate = spans["prefill.compute"].end_time, spans["decode.generate"]
    gap_ms = (generate.attributes or {})[Attr.DECODE_SECOND_TOKEN_GAP_MS]
    assert isinstance(gap_ms, float)
    assert computed_ns is not None
    assert generate.start_time is not None
    assert generate.end_time is not None
    second_ns = computed_ns + gap_ms * 1e6
    assert max(computed_ns, generate.start_time) < second_ns <= generate.end_time


def gaps_counted(worker: Any) -> float:
    name = Metric.SECOND_TOKEN_GAP + "_count"
    return worker.metrics.registry.get_sample_value(name) or 0.0


async def test_a_whole_attempt_has_three(recorded: Recorded) -> None:
    async with a_pair() as pair:
        attempt = Attempted(LONG, traceparent=TRACEPARENT)
        pair.d.decode.submit(attempt.message(WHOLE), pair.from_d.outbox)
        await pair.from_d.heard("finished", attempt.id)
        await pair.quiet()
    spans = recorded.spans()
    assert set(spans) == {"prefill.queue", "prefill.compute", "decode.generate"}
    assert not errors(spans)
    check_second_token(spans)
    assert gaps_counted(pair.d) == 1


async def test_a_cancel_while_pages_move_marks_what_it_cut(recorded: Recorded) -> None:
    async with a_pair() as pair:
        pair.p.transport.holds = True
        attempt = await pair.begin(Attempted(LONG, traceparent=TRACEPARENT))
        await pair.from_p.heard("first_token", attempt.id)
        await until(lambda: pair.p.transport.held_pushes)
        pair.p.prefill.cancel(attempt.id, pair.from_p.outbox)
        pair.d.decode.cancel(attempt.id, pair.from_d.outbox)
        pair.p.transport.holds = False
        await pair.quiet()
    spans = recorded.spans()
    assert errors(spans) == {"kv.send": "cancelled", "kv.receive": "cancelled"}
    assert set(spans) == {"prefill.queue", "prefill.compute", "kv.send", "kv.grant", "kv.receive"}


async def test_a_leg_that_waits_for_its_push_has_its_spans_already(recorded: Recorded) -> None:
    """A push may never end, and a failure that takes so long is the one to look into."""
    async with a_pair() as pair:
        pair.p.transport.holds = True
        attempt = await pair.begin(Attempted(LONG, traceparent=TRACEPARENT))
        await pair.from_p.heard("first_token", attempt.id)
        await until(lambda: pair.p.transport.held_pushes)
        pair.p.prefill.cancel(attempt.id, pair.from_p.outbox)
        spans = recorded.spans()
        assert {"prefill.queue", "prefill.compute", "kv.send"} <= set(spans)
        assert errors(spans) == {"kv.send": "cancelled"}
        pair.d.decode.cancel(attempt.id, pair.from_d.outbox)
        pair.p.transport.holds = False
        await pair.quiet()
    assert len(recorded.spans()) == 5


async def test_a_cancel_while_computing_marks_the_computation(recorded: Recorded) -> None:
    async with a_pair() as pair:
        pair.p.executor.holds = True
        attempt = Attempted(LONG, traceparent=TRACEPARENT)
        pair.submit_prefill(attempt)
        await until(lambda: pair.p.executor.held)
        pair.p.executor.step()
        await until(lambda: pair.p.executor.held)
        pair.p.prefill.cancel(attempt.id, pair.from_p.outbox)
        pair.p.executor.let_go()
        await pair.quiet()
    assert errors(recorded.spans()) == {"prefill.compute": "cancelled"}


async def test_an_expired_grant_says_so(recorded: Recorded) -> None:
    async with a_pair(d_grant_timeout_s=0.02) as pair:
        attempt = Attempted(LONG, traceparent=TRACEPARENT)
        pair.submit_decode(attempt)
        await pair.from_d.heard("failed", attempt.id)
        await pair.quiet()
    assert errors(recorded.spans()) == {"kv.receive": "expired"}


async def test_a_first_token_that_ends_the_request_is_no_error(recorded: Recorded) -> None:
    async with a_pair() as pair:
        attempt = Attempted(LONG, traceparent=TRACEPARENT).stop_with_first()
        pair.submit_prefill(attempt)
        await pair.from_p.heard("prefill_done", attempt.id)
        await pair.quiet()
    spans = recorded.spans()
    assert set(spans) == {"prefill.queue", "prefill.compute"}
    assert not errors(spans)
