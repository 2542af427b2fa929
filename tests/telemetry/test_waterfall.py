"""The waterfall: what is drawn, where, and what is said to be missing."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from http_server import Asked, Reply, http_server
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from rich.console import Console
from sample_traces import (
    MODEL,
    START_NS,
    TRACE_ID,
    disaggregated,
    one_token,
    refused,
    retried,
    whole,
)

from console.tracing.traces import (
    JAEGER_URL,
    Span,
    Trace,
    TraceError,
    fetch,
    from_jaeger,
    from_store,
    missing_spans,
)
from console.tracing.waterfall import draw
from router.trace_store import TraceStore
from telemetry.names import Attr, SpanName

EXPECTED = """\
SmolLM2-135M-Instruct                                               0af7651916cd43dd8448eb211c80319c
37 prompt tokens (16 cached) → 24 tokens · first token 83.5 ms · 14.3 ms a token · 411 ms in all

                                          0 ms          100 ms        200 ms        300 ms
                                          ┬─────────────┬─────────────┬─────────────┬───────────────
StreamGenerate         router     412 ms  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
  chat                 router     411 ms  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
    router.admit       router     300 µs  ▏
    router.tokenize    router     1.6 ms  ▎
    router.queue       router     300 µs  ▏ 3 ahead
    router.route       router     100 µs  ▏
    prefill            prefill-0 85.5 ms  ━━━━━━━━━━━━━
      prefill.queue    prefill-0  3.7 ms  ▌
      prefill.compute  prefill-0 75.8 ms  ▐██████████▌ 21 tokens · 16 cached · 1 chunk
      kv.send          prefill-0  6.3 ms             █▏
                                          3 pages · 2.11 MiB · nixl/shm · 0.56 GB/s · 4.3 ms exposed
    decode             decode-0   408 ms  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
      kv.grant         decode-0   300 µs  ▏ 3 pages
      kv.receive       decode-0  83.8 ms  ████████████▎ 3 pages · 2.11 MiB · 1 notification
      decode.generate  decode-0   322 ms              █████████████████████████████████████████████▌
                                                 23 tokens · 23 steps · 13.9 ms between tokens (p50)
"""


def rendered(trace: Trace, width: int = 100, *, terminal: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=width, highlight=False, soft_wrap=True, force_terminal=terminal
    )
    console.print(draw(trace))
    return file.getvalue()


def test_the_picture_of_a_request() -> None:
    assert rendered(disaggregated()) == EXPECTED


@pytest.mark.parametrize("width", [80, 100, 140, 200])
@pytest.mark.parametrize("make", [disaggregated, retried, whole, one_token, refused])
def test_no_line_is_wider_than_the_terminal(make: Callable[[], Trace], width: int) -> None:
    for line in rendered(make(), width).splitlines():
        assert len(line) <= width, line
        assert line == line.rstrip()


def test_processes_have_colours_on_a_terminal() -> None:
    shown = rendered(retried(), terminal=True)
    for colour in ("\x1b[36m", "\x1b[35m", "\x1b[32m", "\x1b[31m"):  # Three services, a failure.
        assert colour in shown
    assert "\x1b" not in rendered(retried())


def test_a_retry_stands_beside_what_failed() -> None:
    lines = rendered(retried()).splitlines()
    legs = [line for line in lines if line.startswith(("    prefill  ", "    decode  "))]
    assert len(legs) == 4
    assert "✗ worker_lost" in legs[0]
    assert "✗ worker_lost" in legs[1]
    assert "✗" not in legs[2] + legs[3]
    begins = [re.search("[█▐━]", leg).start() for leg in legs]
    assert begins[0] == begins[1] < begins[2] == begins[3]
    assert any(line.endswith(" attempt 2") for line in lines)


def test_a_terminal_that_knows_ascii_only() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=100).print(draw(retried()))
    file.flush()
    shown = file.buffer.getvalue().decode("ascii")
    assert "x worker_lost" in shown
    assert "prompt tokens (16 cached) > 24 tokens" in shown


def test_what_is_missing_is_said() -> None:
    trace = disaggregated()
    lost = (SpanName.KV_SEND, SpanName.DECODE_GENERATE)
    rest = tuple(span for span in trace.spans if span.name not in lost)
    shown = rendered(dataclasses.replace(trace, spans=rest, dropped_spans=2))
    assert "not seen: kv.send · decode.generate" in shown
    assert "2 more spans" in shown


@pytest.mark.parametrize("make", [disaggregated, retried, whole, one_token, refused])
def test_a_complete_trace_is_complete(make: Callable[[], Trace]) -> None:
    assert missing_spans(make()) == []


@pytest.mark.parametrize("make", [disaggregated, whole, one_token])
def test_every_span_of_a_complete_trace_is_missed(make: Callable[[], Trace]) -> None:
    trace = make()
    for span in trace.spans:
        without = tuple(other for other in trace.spans if other is not span)
        assert missing_spans(Trace(TRACE_ID, without)) != [], span.name


def test_a_span_below_the_wrong_parent_is_missed() -> None:
    trace = disaggregated()
    (decode,) = trace.named(SpanName.DECODE)
    spans = tuple(
        dataclasses.replace(span, parent_id=decode.id) if span.name == SpanName.KV_SEND else span
        for span in trace.spans
    )
    assert missing_spans(Trace(TRACE_ID, spans)) == [SpanName.KV_SEND]


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 10**9), st.integers(0, 10**9), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(60, 160),
)
def test_any_spans_can_be_drawn(rows: list[tuple[int, int, int, bool]], width: int) -> None:
    """Parents that are not there, that are themselves, times the wrong way round."""
    spans = tuple(
        Span(
            id=f"{number:x}",
            parent_id=f"{parent:x}",
            name=SpanName.DECODE_GENERATE,
            kind="internal",
            service="other",
            instance="",
            start_ns=START_NS + start,
            end_ns=START_NS + end,
            attributes={Attr.DECODE_TOKENS: end},
            failed=failed,
        )
        for number, (parent, start, end, failed) in enumerate(rows)
    )
    for line in rendered(Trace(TRACE_ID, spans), width).splitlines():
        assert len(line) <= max(width, 80)


# Where traces come from.


def as_otlp(trace: Trace) -> otlp.ExportTraceServiceRequest:
    request = otlp.ExportTraceServiceRequest()
    for span in trace.spans:
        resource = request.resource_spans.add()
        for key, value in (("service.name", span.service), ("service.instance.id", span.instance)):
            resource.resource.attributes.add(key=key, value=AnyValue(string_value=value))
        made = resource.scope_spans.add().spans.add(
            trace_id=bytes.fromhex(trace.id),
            span_id=bytes.fromhex(span.id),
            parent_span_id=bytes.fromhex(span.parent_id),
            name=span.name,
            kind=ProtoSpan.SpanKind.Value(f"SPAN_KIND_{span.kind.upper()}"),
            start_time_unix_nano=span.start_ns,
            end_time_unix_nano=span.end_ns,
            attributes=[_pair(key, value) for key, value in span.attributes.items()],
        )
        if span.failed:
            made.status.code, made.status.message = 2, span.error
        for link in span.links:
            made.links.add(trace_id=bytes.fromhex(trace.id), span_id=bytes.fromhex(link))
    return request


def _pair(key: str, value: float | str) -> KeyValue:
    match value:
        case int():
            return KeyValue(key=key, value=AnyValue(int_value=value))
        case float():
            return KeyValue(key=key, value=AnyValue(double_value=value))
        case _:
            return KeyValue(key=key, value=AnyValue(string_value=value))


def as_jaeger(trace: Trace) -> dict[str, Any]:
    def tags(span: Span) -> list[dict[str, Any]]:
        found = dict(span.attributes) | {"span.kind": span.kind}
        if span.failed:
            found |= {"otel.status_code": "ERROR", Attr.ERROR_TYPE: span.error}
        return [{"key": key, "type": "x", "value": value} for key, value in found.items()]

    def references(span: Span) -> list[dict[str, str]]:
        found = [("FOLLOWS_FROM", link) for link in span.links]
        if span.parent_id:
            found.append(("CHILD_OF", span.parent_id))
        return [
            {"refType": kind, "traceID": trace.id, "spanID": span_id} for kind, span_id in found
        ]

    return {
        "traceID": trace.id.lstrip("0"),
        "spans": [
            {
                "spanID": span.id,
                "operationName": span.name,
                "references": references(span),
                "startTime": span.start_ns // 1_000,
                "duration": span.duration_ns // 1_000,
                "tags": tags(span),
                "processID": span.process,
            }
            for span in trace.spans
        ],
        "processes": {
            span.process: {
                "serviceName": span.service,
                "tags": [{"key": Attr.SERVICE_INSTANCE_ID, "value": span.instance}],
            }
            for span in trace.spans
        },
    }


@pytest.mark.parametrize("make", [disaggregated, retried, whole])
def test_the_store_and_jaeger_show_the_same_picture(make: Callable[[], Trace]) -> None:
    trace = make()
    store = TraceStore()
    store.add(as_otlp(trace))
    stored = from_store(json.loads(json.dumps(store.trace(TRACE_ID))))
    from_query = from_jaeger(json.loads(json.dumps(as_jaeger(trace))))
    assert rendered(trace) == rendered(stored) == rendered(from_query)
    (received,) = stored.named(SpanName.KV_RECEIVE) or [None]
    if received is not None:
        (sent,) = stored.named(SpanName.KV_SEND)
        assert received.links == (sent.id,) == from_query.named(SpanName.KV_RECEIVE)[0].links


def serving(pages: Callable[[str], Any]) -> AbstractContextManager[str]:
    """An HTTP server of JSON; None is 404."""

    def answer(asked: Asked) -> Reply:
        found = pages(asked.path)
        return Reply(json.dumps(found).encode(), 404 if found is None else 200)

    return http_server(answer)


def store_pages(store: TraceStore) -> Callable[[str], Any]:
    def page(path: str) -> Any:
        return {"traces": store.summaries()} if path == "/traces" else store.trace(path[8:])

    return page


def test_the_latest_generation_is_fetched_when_its_last_spans_have_come() -> None:
    trace = disaggregated()
    early, late = trace.spans[:9], trace.spans[9:]
    store = TraceStore()
    store.add(as_otlp(dataclasses.replace(trace, spans=early)))
    asked = threading.Event()

    def page(path: str) -> Any:
        found = store_pages(store)(path)
        if path != "/traces" and not asked.is_set():
            asked.set()
            store.add(as_otlp(dataclasses.replace(trace, spans=late)))
        return found

    with serving(page) as address:
        found = fetch(address)
    assert missing_spans(found) == []
    assert found.request is not None
    assert found.request.attributes[Attr.REQUEST_MODEL] == MODEL


def test_what_there_is_of_a_trace_is_shown_when_no_more_comes() -> None:
    trace = disaggregated()
    store = TraceStore()
    store.add(as_otlp(dataclasses.replace(trace, spans=trace.spans[:9])))
    with serving(store_pages(store)) as address:
        assert missing_spans(fetch(address, TRACE_ID, patience_s=0)) != []


def test_why_a_trace_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(store_pages(TraceStore())) as address:
        with pytest.raises(TraceError, match="no trace of a generation yet"):
            fetch(address, patience_s=0)
        with pytest.raises(TraceError, match=f"no trace {TRACE_ID}"):
            fetch(address, TRACE_ID, patience_s=0)
    with serving(lambda path: None) as address:
        for trace_id in (None, TRACE_ID):
            with pytest.raises(TraceError, match="--trace-store"):
                fetch(address, trace_id, patience_s=0)
    with pytest.raises(TraceError, match="does not answer"):
        fetch("127.0.0.1:1", patience_s=0)


def test_jaeger_is_asked_where_its_address_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = retried()

    def page(path: str) -> Any:
        known = path.startswith(f"/api/traces/{TRACE_ID}") or "service=baton-router" in path
        return {"data": [as_jaeger(trace)]} if known else None

    with serving(page) as address:
        monkeypatch.setenv(JAEGER_URL, f"http://{address}/")
        for trace_id in (TRACE_ID, None):
            assert rendered(fetch("127.0.0.1:1", trace_id)) == rendered(trace)
        with pytest.raises(TraceError):
            fetch("127.0.0.1:1", "ff" * 16, patience_s=0)
