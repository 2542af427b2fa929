"""Writes and sends the spans of a process.

Life of a process's tracing:

1. Before `setup_tracing`, and in a process without an exporter, every call here is a cheap no-op.
   It still passes the caller's trace context on.
2. After `setup_tracing`, ended spans wait in a bounded queue, and one background thread sends them.
   If the queue is full, a span is dropped and counted: requests never wait for it.
3. `Tracing.shutdown` sends the waiting spans, for a bounded time, and returns to 1.

Invariant: the text of an exception is never recorded. Spans have no events. A failed span has one
short stable word as its reason; the code that ends the span chooses it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_SDK_DISABLED
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from telemetry.export import ExportCounts, QueueingProcessor, otlp_exporter
from telemetry.names import SCHEMA_URL, SCOPE, Attr
from telemetry.recording import Recorder

Attributes = Mapping[str, AttributeValue]
Parent = Context | Span | str | None
"""Parent of a span: a context with a span, a span, a W3C traceparent, or None for a root."""

SHUTDOWN_TIMEOUT_S: Final = 3.0
"""For the last spans. A process that ends must not wait for a receiver that is away."""
_propagator: Final = TraceContextTextMapPropagator()


class Tracing:
    """A process's tracing, from `setup_tracing` to `shutdown`."""

    def __init__(self, recorder: Recorder, processor: QueueingProcessor) -> None:
        self._recorder = recorder
        self._processor = processor

    @property
    def counts(self) -> ExportCounts:
        """Number of ended spans, by outcome."""
        return self._processor.counts

    def flush(self) -> None:
        """Sends the waiting spans. Blocks until the exporter took them or gave up."""
        self._processor.force_flush()

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Sends the waiting spans and ends the exporter. Blocks no longer than the timeout.

        Spans that are unsent by then are lost.
        """
        _switch.leave(self._recorder)
        flusher = threading.Thread(target=self._processor.shutdown, name="spans-last", daemon=True)
        flusher.start()
        flusher.join(timeout_s)
        self._processor.give_up()


def setup_tracing(
    service_name: str,
    instance_id: str = "",
    otlp_endpoint: str = "",
    *,
    schedule_delay_ms: int = 200,
    max_queued_spans: int = 4096,
    export_timeout_s: float = 5.0,
    exporter: SpanExporter | None = None,
) -> Tracing | None:
    """Starts sending this process's spans over OTLP/gRPC, or to the exporter given. With
    OTEL_SDK_DISABLED=true it does nothing and returns None, as OpenTelemetry has it.

    Args:
        service_name: one of `names.Service`.
        instance_id: the process's own name, such as "prefill-0".
        otlp_endpoint: host:port or URL of the receiver; "" sends nothing and returns None.
        schedule_delay_ms: longest time between a span's end and its sending, if the receiver works.
        max_queued_spans: number of waiting spans above which further ones are dropped.
        export_timeout_s: time after which an unaccepted batch is dropped.
        exporter: replaces OTLP; for tests.

    Raises:
        RuntimeError: tracing is set up already.
    """
    if _is_disabled() or (exporter is None and not otlp_endpoint):
        return None
    processor = QueueingProcessor(
        exporter or otlp_exporter(otlp_endpoint, export_timeout_s),
        max_queued_spans,
        schedule_delay_ms,
        otlp_endpoint,
    )
    scope = InstrumentationScope(SCOPE, schema_url=SCHEMA_URL)
    recorder = Recorder(processor, _resource(service_name, instance_id), scope)
    _switch.enter(recorder)
    return Tracing(recorder, processor)


def start_span(
    name: str,
    parent: Parent,
    attributes: Attributes | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    start_ns: int | None = None,
    links: Sequence[Link] = (),
) -> Span:
    """Starts a span. Use it where the id is needed before the end; end it with `end_span`."""
    above = _span_of(parent)
    if (recorder := _switch.recorder) is None:
        is_empty = isinstance(above, trace.NonRecordingSpan)
        return above if is_empty else trace.NonRecordingSpan(above.get_span_context())
    return recorder.start(name, above.get_span_context(), kind, attributes, links, start_ns)


def end_span(
    span: Span,
    end_ns: int | None = None,
    attributes: Attributes | None = None,
    *,
    error: str = "",
) -> None:
    """Ends a span. `error` is a short stable word, never a message; "" for success.

    If the clock was set back meanwhile, the span ends at its start.
    """
    if attributes:
        span.set_attributes(attributes)
    if error:
        span.set_attribute(Attr.ERROR_TYPE, error)
        span.set_status(trace.StatusCode.ERROR, error)
    began_ns = getattr(span, "start_time", None) or 0
    span.end(max(began_ns, end_ns or time.time_ns()))


def write_span(
    name: str,
    parent: Parent,
    start_ns: int,
    end_ns: int,
    attributes: Attributes | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[Link] = (),
    error: str = "",
) -> Span:
    """Writes a span afterwards, from stored Unix nanoseconds. For `error` see `end_span`."""
    if _switch.recorder is None:
        return trace.INVALID_SPAN
    span = start_span(name, parent, attributes, kind=kind, start_ns=start_ns, links=links)
    end_span(span, end_ns, error=error)
    return span


def context_of(parent: Parent) -> Context:
    """Returns the context in which a child of `parent` starts; an empty one for a root.

    A malformed traceparent counts as a root.
    """
    match parent:
        case None | "":
            return Context()
        case str():
            return _propagator.extract({"traceparent": parent}, Context())
        case Span():
            return trace.set_span_in_context(parent, Context())
        case _:
            return parent


def traceparent_of(parent: Parent) -> str:
    """Returns the W3C traceparent of a span or of the span in a context; "" without a span."""
    span = _span_context(parent)
    if not span.is_valid:
        return ""
    flags = span.trace_flags & TraceFlags.SAMPLED
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{flags:02x}"


def trace_id_of(parent: Parent) -> str:
    """Returns the trace id, 32 hex digits; "" without a span."""
    span = _span_context(parent)
    return trace.format_trace_id(span.trace_id) if span.is_valid else ""


def span_id_bytes(span: Span) -> bytes:
    """Returns a span's id as 8 bytes, for messages between workers; b"" for an invalid span."""
    context = span.get_span_context()
    return context.span_id.to_bytes(8, "big") if context.is_valid else b""


def link_from(parent: Parent, span_id: bytes) -> tuple[Link, ...]:
    """Makes a link to a span of `parent`'s trace, by its id; empty without a valid id.

    Use: `write_span(..., links=link_from(traceparent, send_span_id))`.
    """
    here = _span_context(parent)
    if not here.is_valid or len(span_id) != 8 or not any(span_id):
        return ()
    number = int.from_bytes(span_id, "big")
    return (Link(SpanContext(here.trace_id, number, is_remote=True, trace_flags=here.trace_flags)),)


def _span_context(parent: Parent) -> SpanContext:
    return _span_of(parent).get_span_context()


def _span_of(parent: Parent) -> Span:
    if isinstance(parent, Context):  # The usual case, and far sooner found out than a span.
        return trace.get_current_span(parent)
    return parent if isinstance(parent, Span) else trace.get_current_span(context_of(parent))


def _is_disabled() -> bool:
    return os.environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true"


def _resource(service_name: str, instance_id: str) -> Resource:
    attributes = {Attr.SERVICE_NAMESPACE: "baton", Attr.SERVICE_NAME: service_name}
    if instance_id:
        attributes[Attr.SERVICE_INSTANCE_ID] = instance_id
    return Resource.create(attributes, SCHEMA_URL)


class _SwitchedTracer(trace.Tracer):
    """Starts spans for libraries. It never records the text of an exception."""

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        links: Sequence[Link] | None = (),
        start_time: int | None = None,
        record_exception: bool = False,
        set_status_on_exception: bool = False,
    ) -> Span:
        parent = trace.get_current_span(context)
        return start_span(
            name, parent, attributes, kind=kind, start_ns=start_time, links=links or ()
        )

    @contextmanager
    def start_as_current_span(  # type: ignore[override]  # The base class's serves coroutines, too.
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        links: Sequence[Link] | None = (),
        start_time: int | None = None,
        record_exception: bool = False,
        set_status_on_exception: bool = False,
        end_on_exit: bool = True,
    ) -> Iterator[Span]:
        span = self.start_span(name, context, kind, attributes, links, start_time)
        error = ""
        try:
            with trace.use_span(span, False, False, False):
                yield span
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            if end_on_exit:
                end_span(span, error=error)


class _Switch(trace.TracerProvider):
    """The global provider. The API lets it be set once; it records only while tracing is on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.recorder: Recorder | None = None
        """What spans are recorded with; None: none are."""

    def enter(self, recorder: Recorder) -> None:
        """Records spans with `recorder` from now on."""
        with self._lock:
            if self.recorder is not None:
                raise RuntimeError("tracing is set up already")
            if trace.get_tracer_provider() is not self:
                trace.set_tracer_provider(self)
            self.recorder = recorder

    def leave(self, recorder: Recorder) -> None:
        """Stops recording with `recorder`, if it is still the present one."""
        with self._lock:
            if self.recorder is recorder:
                self.recorder = None

    def get_tracer(self, *args: object, **kwargs: object) -> trace.Tracer:
        """Returns a tracer. All code of a process shares one scope."""
        return _SwitchedTracer()


_switch: Final = _Switch()

__all__ = [
    "Parent",
    "Span",
    "SpanKind",
    "Tracing",
    "context_of",
    "end_span",
    "link_from",
    "setup_tracing",
    "span_id_bytes",
    "start_span",
    "trace_id_of",
    "traceparent_of",
    "write_span",
]
