"""An OTLP receiver in the test's own process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from baton.grpc_options import server_options


class OtlpReceiver(otlp_grpc.TraceServiceServicer):
    """Keeps all it is sent; while `free` is not set, it answers nothing."""

    def __init__(self) -> None:
        self.requests: list[otlp.ExportTraceServiceRequest] = []
        self.free = threading.Event()
        self.free.set()

    def Export(
        self, request: otlp.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> otlp.ExportTraceServiceResponse:
        self.free.wait(30)
        self.requests.append(request)
        return otlp.ExportTraceServiceResponse()

    @property
    def resources(self) -> list[ResourceSpans]:
        return [resource for request in self.requests for resource in request.resource_spans]

    @property
    def spans(self) -> dict[str, Span]:
        return {
            span.name: span
            for resource in self.resources
            for scope in resource.scope_spans
            for span in scope.spans
        }

    def wait_for(
        self, trace_id: str, names: Sequence[str], timeout_s: float = 10.0
    ) -> dict[str, tuple[str, Span]]:
        """Service and span by the span's name, once the trace has all of `names`."""
        deadline = time.monotonic() + timeout_s
        while missing := set(names) - (found := self._trace(trace_id)).keys():
            assert time.monotonic() < deadline, f"missing {missing}, have {sorted(found)}"
            time.sleep(0.05)
        return found

    def _trace(self, trace_id: str) -> dict[str, tuple[str, Span]]:
        return {
            span.name: (str(attributes(resource.resource)["service.name"]), span)
            for resource in self.resources
            for scope in resource.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace_id
        }


@contextmanager
def otlp_receiver(address: str = "127.0.0.1:0") -> Iterator[tuple[OtlpReceiver, str]]:
    """A receiver and its address."""
    receiver = OtlpReceiver()
    server = grpc.server(futures.ThreadPoolExecutor(2), options=server_options())
    otlp_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield receiver, f"127.0.0.1:{port}"
    finally:
        stopped = server.stop(None)
        receiver.free.set()  # after that: whoever it kept waiting gets no answer
        stopped.wait(5)


def attributes(of: Span | Resource) -> dict[str, object]:
    """As plain values."""
    return {pair.key: plain(pair.value) for pair in of.attributes}


def plain(value: object) -> object:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [plain(item) for item in found.values] if kind == "array_value" else found
