"""The latest traces, kept in memory: a small OTLP receiver and two pages at the admin port.

Life of a trace here:

1. Its first span to arrive begins it. This need be neither the root nor the earliest span.
2. Its other spans come in any order.
3. It is dropped when spans of `max_traces` other traces have come since. A later span begins it
   anew.

The store is meant for `baton trace` and for looking at one machine. It keeps spans up to its bounds
and loses them at a restart. It shares the event loop with the router's streams, which must not
wait. So the entries of the list are kept up to date as spans arrive, and the page of one trace is
made in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from telemetry.names import Attr, SpanName

if TYPE_CHECKING:
    import grpc
    import grpc.aio
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
    from starlette.requests import Request

DEFAULT_MAX_TRACES: Final = 256
DEFAULT_MAX_SPANS: Final = 512
DEFAULT_MAX_BYTES: Final = 512 * 1024
"""Serialized spans of one trace, bytes. The whole store holds at most 128 MiB."""
TRACE_ID_BYTES: Final = 16
"""As the W3C's trace context has them."""

_STATUS_WORDS: Final = {Status.STATUS_CODE_OK: "ok", Status.STATUS_CODE_ERROR: "error"}


class _Stored(NamedTuple):
    """A span and the process that sent it."""

    data: bytes
    """The serialized span. A parsed one would keep all spans of its message in memory."""
    service: str
    instance: str

    @property
    def span(self) -> Span:
        """The span, parsed."""
        return Span.FromString(self.data)


@dataclass(slots=True)
class _Trace:
    """Spans by id, and their entry in the list. A span that is sent again replaces itself."""

    spans: dict[bytes, _Stored] = field(default_factory=dict)
    num_bytes: int = 0
    dropped_spans: int = 0
    """Spans that arrived when the trace was at a bound."""
    start_ns: int = 0
    end_ns: int = 0
    services: set[str] = field(default_factory=set)
    failed: bool = False
    first_name: str = ""
    """Name of the span that started first."""
    request_name: str = ""
    """Name of the first span of a generation that arrived."""

    def keep(self, span: Span, stored: _Stored) -> None:
        """Adds a span, or replaces it by another copy."""
        start_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        if not self.spans or start_ns < self.start_ns:
            self.start_ns, self.first_name = start_ns, span.name
        self.end_ns = max(self.end_ns, end_ns)
        if not self.request_name and SpanName.is_request(span.name):
            self.request_name = span.name
        self.services.add(stored.service)
        self.failed = self.failed or span.status.code == Status.STATUS_CODE_ERROR
        self.spans[span.span_id] = stored

    def summary(self, trace_id: bytes) -> dict[str, Any]:
        """Its entry in the list."""
        return {
            "trace_id": trace_id.hex(),
            "name": self.request_name or self.first_name,
            "start_ns": self.start_ns,
            "duration_ms": (self.end_ns - self.start_ns) / 1e6,
            "spans": len(self.spans),
            "services": sorted(self.services),
            "failed": self.failed,
        }


class TraceStore:
    """The latest traces. Belongs to one event loop.

    Invariant: at most `max_traces` traces, each of at most `max_spans` spans and `max_bytes` bytes.
    """

    def __init__(
        self,
        max_traces: int = DEFAULT_MAX_TRACES,
        max_spans: int = DEFAULT_MAX_SPANS,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._max_traces = max_traces
        self._max_spans = max_spans
        self._max_bytes = max_bytes
        self._traces: dict[bytes, _Trace] = {}
        """Traces by id; the one with the latest arrival is last."""

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, request: otlp.ExportTraceServiceRequest) -> None:
        """Stores the spans that a process sent."""
        for resource in request.resource_spans:
            names = _attributes(resource.resource.attributes)
            service = str(names.get(Attr.SERVICE_NAME, ""))
            instance = str(names.get(Attr.SERVICE_INSTANCE_ID, ""))
            for scope in resource.scope_spans:
                for span in scope.spans:
                    if len(span.trace_id) == TRACE_ID_BYTES:
                        self._keep(span, _Stored(span.SerializeToString(), service, instance))

    def summaries(self) -> list[dict[str, Any]]:
        """The list of traces, the latest start first."""
        found = [trace.summary(trace_id) for trace_id, trace in self._traces.items()]
        return sorted(found, key=lambda summary: -int(summary["start_ns"]))

    def trace(self, trace_id: str) -> dict[str, Any] | None:
        """One trace as JSON, its spans by start. None if the store does not have it.

        Its form is that of `console.tracing.traces.Trace`. May be called on any thread: it parses
        every span.
        """
        try:
            trace = self._traces.get(bytes.fromhex(trace_id))
        except ValueError:
            return None
        if trace is None:
            return None
        spans = [_as_json(stored) for stored in list(trace.spans.values())]
        return {
            "trace_id": trace_id.lower(),
            "spans": sorted(spans, key=lambda span: int(span["start_ns"])),
            "dropped_spans": trace.dropped_spans,
        }

    def _keep(self, span: Span, stored: _Stored) -> None:
        trace = self._traces.pop(span.trace_id, None) or _Trace()
        self._traces[span.trace_id] = trace
        while len(self._traces) > self._max_traces:
            del self._traces[next(iter(self._traces))]
        known = trace.spans.get(span.span_id)
        grown = trace.num_bytes + len(stored.data) - (len(known.data) if known else 0)
        if grown > self._max_bytes or (known is None and len(trace.spans) >= self._max_spans):
            trace.dropped_spans += 1
            return
        trace.keep(span, stored)
        trace.num_bytes = grown


class TraceReceiver(otlp_grpc.TraceServiceServicer):
    """OTLP's TraceService: puts spans into a store."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def Export(  # noqa: N802 - gRPC's name
        self, request: otlp.ExportTraceServiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> otlp.ExportTraceServiceResponse:
        """Accepts every span. The sender does not hear of spans that the bounds drop."""
        self._store.add(request)
        return otlp.ExportTraceServiceResponse()


def add_trace_receiver(server: grpc.aio.Server, store: TraceStore) -> None:
    """Mounts the receiver. Call it before the server starts."""
    add = otlp_grpc.add_TraceServiceServicer_to_server
    add(TraceReceiver(store), server)  # type: ignore[no-untyped-call]  # it has no types


def trace_routes(store: TraceStore) -> Sequence[Route]:
    """`/traces`: the list of traces, the latest first. `/traces/{id}`: one of them."""

    async def traces(request: Request) -> Response:
        return JSONResponse({"traces": store.summaries()})

    def trace(request: Request) -> Response:  # no coroutine: Starlette runs it in a thread
        found = store.trace(request.path_params["trace_id"])
        if found is None:
            return JSONResponse({"error": "no such trace here, or no longer"}, status_code=404)
        return JSONResponse(found)

    return (Route("/traces", traces), Route("/traces/{trace_id}", trace))


def _as_json(stored: _Stored) -> dict[str, Any]:
    span = stored.span
    return {
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex(),
        "name": span.name,
        "kind": Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        "service": stored.service,
        "instance": stored.instance,
        "start_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "attributes": _attributes(span.attributes),
        "links": list(_links(span)),
        "status": _STATUS_WORDS.get(span.status.code, "unset"),
        "error": span.status.message,
    }


def _links(span: Span) -> Iterator[dict[str, str]]:
    for link in span.links:
        yield {"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex()}


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _plain(pair.value) for pair in pairs}


def _plain(value: AnyValue) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [_plain(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case "bytes_value":
            return value.bytes_value.hex()
        case kind:
            return getattr(value, kind)
