"""What leaves a process over OTLP, and what a receiver that is away costs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_receiver import attributes, otlp_receiver

from telemetry.names import SCHEMA_URL, SCOPE, Attr, Service, SpanName, undeclared
from telemetry.tracing import (
    SpanKind,
    Tracing,
    context_of,
    end_span,
    link_from,
    setup_tracing,
    span_id_bytes,
    start_span,
    trace_id_of,
    traceparent_of,
    write_span,
)

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "the prompt that must not leave"

Setup = Callable[..., Tracing]


@pytest.fixture
def setup() -> Iterator[Setup]:
    made: list[Tracing] = []

    def make(*args: object, **options: object) -> Tracing:
        tracing = setup_tracing(Service.PREFILL, "prefill-0", *args, **options)
        assert tracing is not None
        made.append(tracing)
        return tracing

    yield make
    for tracing in made:
        tracing.shutdown(0.5)


@pytest.fixture
def memory(setup: Setup) -> tuple[InMemorySpanExporter, Tracing]:
    exporter = InMemorySpanExporter()
    return exporter, setup(exporter=exporter)


def finished(memory: tuple[InMemorySpanExporter, Tracing]) -> dict[str, ReadableSpan]:
    exporter, tracing = memory
    tracing.flush()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_spans_written_afterwards_reach_a_receiver_as_they_were_meant(setup: Setup) -> None:
    with otlp_receiver() as (receiver, address):
        tracing = setup(address, schedule_delay_ms=20)
        leg = start_span(SpanName.PREFILL, CALLER, kind=SpanKind.CLIENT, start_ns=1_000)
        send = start_span(SpanName.KV_SEND, traceparent_of(leg), start_ns=3_000)
        write_span(
            SpanName.KV_RECEIVE,
            traceparent_of(leg),
            4_000,
            9_000,
            {Attr.KV_PAGES: 17, Attr.KV_GIGABYTES_PER_S: 1.5, Attr.KV_TRANSPORT: "nixl/shm"},
            links=link_from(traceparent_of(leg), span_id_bytes(send)),
        )
        end_span(send, 8_000, {Attr.KV_BYTES: 1 << 33}, error="peer_lost")
        end_span(leg, 9_500)
        tracing.flush()
        spans, resources = receiver.spans, receiver.resources

    leg_span, sent, received = (spans[name] for name in ("prefill", "kv.send", "kv.receive"))
    assert {span.trace_id.hex() for span in spans.values()} == {CALLER.split("-")[1]}
    assert leg_span.parent_span_id.hex() == CALLER.split("-")[2]
    assert leg_span.kind == ProtoSpan.SPAN_KIND_CLIENT
    assert sent.parent_span_id == received.parent_span_id == leg_span.span_id
    assert not undeclared(key for span in spans.values() for key in attributes(span))
    assert (received.start_time_unix_nano, received.end_time_unix_nano) == (4_000, 9_000)
    assert [link.span_id for link in received.links] == [sent.span_id]
    assert attributes(received)[Attr.KV_PAGES] == 17
    assert attributes(sent) == {Attr.KV_BYTES: 1 << 33, Attr.ERROR_TYPE: "peer_lost"}
    assert (sent.status.code, sent.status.message) == (Status.STATUS_CODE_ERROR, "peer_lost")
    resource = attributes(resources[0].resource)
    assert resource[Attr.SERVICE_NAME] == Service.PREFILL
    assert resource[Attr.SERVICE_INSTANCE_ID] == "prefill-0"
    assert resources[0].scope_spans[0].scope.name == SCOPE
    assert resources[0].scope_spans[0].schema_url == SCHEMA_URL
    assert tracing.counts == (3, 0, 0, 0)


def test_a_process_that_exports_nothing_passes_the_callers_trace_on() -> None:
    assert setup_tracing(Service.ROUTER, "r") is None
    span = start_span("router.queue", CALLER)
    assert traceparent_of(span) == CALLER
    unsampled = CALLER[:-2] + "00"
    assert traceparent_of(start_span("router.queue", unsampled)) == unsampled
    assert trace_id_of(CALLER) == CALLER.split("-")[1]
    assert not write_span("router.route", CALLER, 1, 2).get_span_context().is_valid
    assert traceparent_of(start_span("x", None)) == "" == trace_id_of(None)
    assert span_id_bytes(trace.INVALID_SPAN) == b""


@pytest.mark.parametrize(("value", "is_on"), [("true", False), ("True", False), ("1", True)])
def test_opentelemetrys_own_switch_turns_tracing_off(
    value: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", value)
    tracing = setup_tracing(Service.ROUTER, "r", exporter=InMemorySpanExporter())
    is_recording = start_span("router.queue", None).is_recording()
    if tracing is not None:
        tracing.shutdown(0.5)
    assert (tracing is not None, is_recording) == (is_on, is_on)


def test_the_text_of_an_exception_is_recorded_nowhere(
    memory: tuple[InMemorySpanExporter, Tracing],
) -> None:
    tracer = trace.get_tracer("any library")
    with pytest.raises(KeyError), tracer.start_as_current_span("router.tokenize"):
        raise KeyError(SECRET)
    with pytest.raises(OSError, match=SECRET), tracer.start_span("router.queue"):
        raise OSError(SECRET)
    start_span("router.route", None).record_exception(ValueError(SECRET))
    held = start_span("prefill", None)
    held.record_exception(ValueError(SECRET))
    held.end()
    spans = finished(memory)
    assert len(spans) == 3
    assert all(SECRET not in span.to_json() for span in spans.values())
    assert spans["router.tokenize"].attributes == {Attr.ERROR_TYPE: "KeyError"}
    assert spans["router.tokenize"].status.status_code is trace.StatusCode.ERROR


def test_a_clock_set_back_under_a_span_ends_it_where_it_began(
    memory: tuple[InMemorySpanExporter, Tracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    span = start_span(SpanName.KV_SEND, CALLER)
    hour_ago_ns = time.time_ns() - 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: hour_ago_ns)
    end_span(span)
    found = finished(memory)[SpanName.KV_SEND]
    assert found.end_time == found.start_time


def test_an_end_before_the_start_becomes_the_start(
    memory: tuple[InMemorySpanExporter, Tracing],
) -> None:
    write_span("kv.grant", CALLER, 10, 4)
    span = finished(memory)["kv.grant"]
    assert (span.start_time, span.end_time) == (10, 10)


@pytest.mark.parametrize("bad", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_traceparent_that_is_none_begins_a_trace(
    bad: str, memory: tuple[InMemorySpanExporter, Tracing]
) -> None:
    write_span("router.queue", bad, 1, 2)
    assert finished(memory)["router.queue"].parent is None
    assert link_from(bad, b"12345678") == ()
    assert link_from(CALLER, b"") == link_from(CALLER, bytes(8)) == ()


def test_parents_may_be_a_span_a_context_or_a_traceparent(
    memory: tuple[InMemorySpanExporter, Tracing],
) -> None:
    parent = start_span("prefill", CALLER)
    for number, form in enumerate((parent, context_of(parent), traceparent_of(parent))):
        write_span(f"child-{number}", form, 1, 2)
    spans = finished(memory)
    ids = {spans[f"child-{number}"].parent.span_id for number in range(3)}
    assert ids == {parent.get_span_context().span_id}


def test_the_callers_decision_not_to_record_stands(
    memory: tuple[InMemorySpanExporter, Tracing],
) -> None:
    write_span("router.queue", CALLER[:-1] + "0", 1, 2)
    assert finished(memory) == {}
    assert memory[1].counts == (0, 0, 0, 0)


def test_setting_up_twice_is_an_error_and_again_after_a_shutdown_is_not(setup: Setup) -> None:
    tracer = trace.get_tracer("kept by a module")
    first = InMemorySpanExporter()
    tracing = setup(exporter=first)
    with pytest.raises(RuntimeError, match="already"):
        setup(exporter=InMemorySpanExporter())
    tracer.start_span("one").end()
    tracing.shutdown()
    tracer.start_span("between").end()
    second = InMemorySpanExporter()
    again = setup(exporter=second)
    tracer.start_span("two").end()
    again.flush()
    assert [span.name for span in first.get_finished_spans()] == ["one"]
    assert [span.name for span in second.get_finished_spans()] == ["two"]


def test_only_declared_keys_count_as_declared() -> None:
    assert undeclared([Attr.KV_BYTES, Attr.REQUEST_MODEL]) == set()
    assert undeclared(["gen_ai.prompt", "exception.message"]) != set()


class _Broken(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        raise OSError(SECRET)


def test_an_exporter_that_raises_is_counted_and_told_of_once(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    tracing = setup(exporter=_Broken())
    for _ in range(3):
        write_span("kv.grant", CALLER, 1, 2)
        tracing.flush()
    assert tracing.counts == (0, 0, 3, 0)
    assert len(caplog.records) == 1
    assert SECRET not in caplog.text


def test_a_receiver_that_is_slow_slows_nothing_and_drops_are_counted(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    with otlp_receiver() as (receiver, address):
        receiver.free.clear()
        tracing = setup(address, schedule_delay_ms=10, max_queued_spans=600, export_timeout_s=30)
        began = time.perf_counter()
        for _ in range(3_000):
            write_span("decode.generate", CALLER, 1, 2, {Attr.DECODE_TOKENS: 128})
        took_s = time.perf_counter() - began
        dropped = tracing.counts.dropped
        assert dropped >= 3_000 - 600 - 512
        receiver.free.set()
        tracing.flush()
        exported, dropped_in_all, failed, waiting = tracing.counts
    assert (failed, waiting, dropped_in_all) == (0, 0, dropped)
    assert exported == 3_000 - dropped
    assert took_s < 15, "the receiver takes nothing for 30 s: one span that waits for it takes so"
    assert not caplog.records


def test_a_receiver_that_is_down_costs_spans_and_one_line(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    with otlp_receiver() as (_, address):
        pass
    tracing = setup(address, schedule_delay_ms=10, export_timeout_s=0.5)
    write_span("kv.grant", CALLER, 1, 2)
    began = time.perf_counter()
    tracing.flush()
    assert time.perf_counter() - began < 5
    assert tracing.counts.failed == 1
    assert [record.name for record in caplog.records] == ["telemetry.export"]
    with otlp_receiver(address) as (receiver, _):
        for _ in range(20):
            write_span("kv.send", CALLER, 1, 2)
            tracing.flush()
            if "kv.send" in receiver.spans:
                break
        assert "kv.send" in receiver.spans


def test_a_receiver_whose_host_does_not_exist_stops_nothing_and_is_named_once(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = "http://no-such-host.invalid:4317"
    tracing = setup(nobody, schedule_delay_ms=10, export_timeout_s=0.5)
    for _ in range(2):
        write_span("kv.grant", CALLER, 1, 2)
        tracing.flush()
    assert tracing.counts == (0, 0, 2, 0)
    (said,) = caplog.records
    assert (said.levelname, said.__dict__["receiver"]) == ("WARNING", nobody)


def test_shutting_down_waits_for_a_slow_receiver_no_longer_than_told(setup: Setup) -> None:
    with otlp_receiver() as (receiver, address):
        receiver.free.clear()
        tracing = setup(address, export_timeout_s=30)
        write_span("kv.grant", CALLER, 1, 2)
        began = time.perf_counter()
        tracing.shutdown(0.3)
        assert time.perf_counter() - began < 10, "the receiver takes 30 s"
