"""Reads traces from the router's store or from Jaeger, for the command line.

A trace is complete when it has every span that its request should have. `missing_spans` names the
missing ones.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from console.top.scrape import base_url
from telemetry.names import Attr, Service, SpanName

JAEGER_URL: Final = "JAEGER_URL"
"""Environment variable with the URL of a Jaeger query API. If it is set, traces are read there."""
DEFAULT_PATIENCE_S: Final = 3.0
"""Spans are sent 200 ms after their end; on a busy machine that takes longer."""
_LEGS: Final = (SpanName.PREFILL, SpanName.DECODE)
_SERVER_SPAN: Final = "the call's SERVER span"
_POLL_S: Final = 0.1
"""So often the trace is asked for meanwhile."""
_REQUEST_TIMEOUT_S: Final = 5.0
"""Longest time of one question to the trace store, which answers from memory."""


class TraceError(Exception):
    """A trace cannot be read. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span."""

    id: str
    parent_id: str
    """Id of the parent; "" for a root."""
    name: str
    kind: str
    """Kind: "internal", "server" or "client"."""
    service: str
    instance: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[str, ...] = ()
    """Ids of linked spans of the same trace."""
    failed: bool = False
    error: str = ""
    """Reason of the failure, a short word."""

    @property
    def duration_ns(self) -> int:
        """Time from start to end; never below 0, even if the clock was set back."""
        return max(0, self.end_ns - self.start_ns)

    @property
    def process(self) -> str:
        """Name of the process that wrote it: its instance, else its service."""
        return self.instance or self.service.removeprefix("baton-")


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans of one trace, in order of their start."""

    id: str
    spans: tuple[Span, ...]
    dropped_spans: int = 0
    """Number of spans that the store had no room for."""

    @property
    def start_ns(self) -> int:
        """Start of the earliest span."""
        return min((span.start_ns for span in self.spans), default=0)

    @property
    def end_ns(self) -> int:
        """End of the latest span."""
        return max((span.end_ns for span in self.spans), default=0)

    @property
    def request(self) -> Span | None:
        """The router's span around the generation."""
        return next((span for span in self.spans if _is_request(span)), None)

    def named(self, name: str) -> list[Span]:
        """Spans with a name."""
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Span) -> list[Span]:
        """Spans directly below one, by start. Legs of an attempt are neighbours, prefill first."""
        found = [span for span in self.spans if span.parent_id == parent.id]
        begun: dict[str, int] = {}
        for span in found:
            begun.setdefault(_attempt(span), span.start_ns)
        return sorted(found, key=lambda span: (begun[_attempt(span)], span.name == SpanName.DECODE))

    def roots(self) -> list[Span]:
        """Spans whose parent is not in this trace."""
        ids = {span.id for span in self.spans}
        return [span for span in self.spans if span.parent_id not in ids]

    def walk(self) -> Iterator[tuple[int, Span]]:
        """Yields every span with its depth, parents before children."""

        def below(span: Span, depth: int) -> Iterator[tuple[int, Span]]:
            yield depth, span
            for child in self.children(span):
                yield from below(child, depth + 1)

        for root in self.roots():
            yield from below(root, 0)


def fetch(
    admin_address: str, trace_id: str | None = None, patience_s: float = DEFAULT_PATIENCE_S
) -> Trace:
    """Reads one trace from the router's admin port or from Jaeger.

    Args:
        admin_address: HOST:PORT of the router's admin port.
        trace_id: 32 hex digits, or an answer's id in OpenAI's API, `chatcmpl-ID`. None: the latest
            generation's trace.
        patience_s: longest wait for missing spans, which arrive a moment after their end.

    Raises:
        TraceError: the trace is not found.
    """
    trace_id = trace_id and trace_id.rpartition("-")[2]
    jaeger = os.environ.get(JAEGER_URL)
    source = _Jaeger(jaeger) if jaeger else _Store(base_url(admin_address))
    give_up_s = time.monotonic() + patience_s
    while True:
        found = source.trace(trace_id)
        waited_enough = time.monotonic() > give_up_s
        if found is not None and (waited_enough or not missing_spans(found)):
            return found
        if waited_enough:
            raise TraceError(
                f"{source.base_url} has no trace {trace_id}"
                if trace_id
                else f"{source.base_url} has no trace of a generation yet"
            )
        time.sleep(_POLL_S)


def missing_spans(trace: Trace) -> list[str]:
    """Names of the spans that a generation's trace should have and this one lacks.

    - A failed request needs only its own span and the call's. A failed leg needs no children.
    - If the first token ended the request, there was no hand-off, and none of its spans is needed.
    - If the decode worker took the prompt over, its leg has the prompt's spans. The prefill
      worker's leg needs no children.
    """
    request = trace.request
    if request is None:
        return [Attr.TEXT_COMPLETION]
    parts = trace.children(request)
    legs = [span for span in parts if span.name in _LEGS]
    names = {span.name for span in parts}
    missing = [name for name in _expected(request, legs) if name not in names]
    for leg in legs:
        if not leg.failed:
            below = {span.name for span in trace.children(leg)}
            expected = _expected_below(leg, request, _is_taken_over(leg, legs))
            missing += [name for name in expected if name not in below]
    if request.parent_id not in {span.id for span in trace.spans}:
        missing.insert(0, _SERVER_SPAN)
    return missing


def _expected(request: Span, legs: list[Span]) -> tuple[str, ...]:
    """Names of the spans expected directly below the request."""
    steps = SpanName.ADMIT, SpanName.TOKENIZE, SpanName.QUEUE, SpanName.ROUTE
    if request.failed:
        return ()  # It may have ended at any point.
    if any(leg.attributes.get(Attr.WORK_MODE) == "whole" for leg in legs):
        return (*steps, SpanName.DECODE)
    return (*steps, *_LEGS) if _goes_on(request) else (*steps, SpanName.PREFILL)


def _is_taken_over(leg: Span, legs: list[Span]) -> bool:
    """Whether the decode worker of this leg's attempt computed the prompt itself."""
    return any(
        Attr.ROUTE_LOCAL_REASON in other.attributes
        and other.attributes.get(Attr.ATTEMPT_ID) == leg.attributes.get(Attr.ATTEMPT_ID)
        for other in legs
    )


def _expected_below(leg: Span, request: Span, is_taken_over: bool) -> tuple[str, ...]:
    goes_on = _goes_on(request)
    match leg.attributes.get(Attr.WORK_MODE):
        case "prefill" if is_taken_over:
            return ()
        case "whole" | "decode" as mode if is_taken_over or mode == "whole":
            whole = SpanName.PREFILL_QUEUE, SpanName.PREFILL_COMPUTE, SpanName.DECODE_GENERATE
            return whole if goes_on or mode == "whole" else ()
        case "decode":
            handed_over = SpanName.KV_GRANT, SpanName.KV_RECEIVE, SpanName.DECODE_GENERATE
            return handed_over if goes_on else ()
        case _:
            computed = SpanName.PREFILL_QUEUE, SpanName.PREFILL_COMPUTE
            return (*computed, SpanName.KV_SEND) if goes_on else computed


def _goes_on(request: Span) -> bool:
    """Whether tokens followed the first token of each choice."""
    tokens = int(request.attributes.get(Attr.OUTPUT_TOKENS, 0))
    return not request.failed and tokens > int(request.attributes.get(Attr.REQUEST_CHOICES, 1))


def _attempt(span: Span) -> str:
    return str(span.attributes.get(Attr.ATTEMPT_ID, span.id))


def _is_request(span: Span) -> bool:
    return SpanName.is_request(span.name) and span.kind == "internal"


def from_store(found: Mapping[str, Any]) -> Trace:
    """Converts a trace from the form of the router's store."""
    spans = (
        Span(
            id=span["span_id"],
            parent_id=span["parent_id"],
            name=span["name"],
            kind=span["kind"],
            service=span["service"],
            instance=span["instance"],
            start_ns=span["start_ns"],
            end_ns=span["end_ns"],
            attributes=span["attributes"],
            links=tuple(link["span_id"] for link in span["links"]),
            failed=span["status"] == "error",
            error=span["error"] or span["attributes"].get(Attr.ERROR_TYPE, ""),
        )
        for span in found["spans"]
    )
    return Trace(found["trace_id"], _by_start(spans), found.get("dropped_spans", 0))


def from_jaeger(found: Mapping[str, Any]) -> Trace:
    """Converts a trace from the form of Jaeger's query API: one entry of `data`."""
    processes = found["processes"]
    spans = (_jaeger_span(span, processes[span["processID"]]) for span in found["spans"])
    return Trace(found["traceID"].zfill(32), _by_start(spans))


def _jaeger_span(span: Mapping[str, Any], process: Mapping[str, Any]) -> Span:
    attributes = {tag["key"]: tag["value"] for tag in span.get("tags", ())}
    of_process = {tag["key"]: tag["value"] for tag in process.get("tags", ())}
    references = span.get("references", ())
    parents = [ref["spanID"] for ref in references if ref["refType"] == "CHILD_OF"]
    return Span(
        id=span["spanID"],
        parent_id=parents[0] if parents else "",
        name=span["operationName"],
        kind=attributes.get("span.kind", "internal"),
        service=process["serviceName"],
        instance=of_process.get(Attr.SERVICE_INSTANCE_ID, ""),
        start_ns=span["startTime"] * 1_000,
        end_ns=(span["startTime"] + span["duration"]) * 1_000,
        attributes=attributes,
        links=tuple(ref["spanID"] for ref in references if ref["refType"] == "FOLLOWS_FROM"),
        failed=attributes.get("otel.status_code") == "ERROR",
        error=attributes.get(Attr.ERROR_TYPE, ""),
    )


def _by_start(spans: Iterator[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)))


class _Store:
    """Reads traces from the router's admin port."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def trace(self, trace_id: str | None) -> Trace | None:
        """Returns the spans so far of a trace, or of the latest generation's."""
        trace_id = trace_id or self._latest()
        found = _get(f"{self.base_url}/traces/{_in_path(trace_id)}") if trace_id else None
        if found is None:
            self._latest()  # It raises if the router keeps no traces at all.
            return None
        return from_store(found)

    def _latest(self) -> str | None:
        """Returns the trace id of the latest generation.

        Raises:
            TraceError: the router keeps no traces.
        """
        found = _get(f"{self.base_url}/traces")
        if found is None:
            raise TraceError(
                f"the router at {self.base_url} keeps no traces: start it with --trace-store, and "
                "every process with --otlp-endpoint http://ROUTER:50050, its internal address"
            )
        named = (trace for trace in found["traces"] if SpanName.is_request(trace["name"]))
        return next((trace["trace_id"] for trace in named), None)


class _Jaeger:
    """Reads traces from Jaeger's query API."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")

    def trace(self, trace_id: str | None) -> Trace | None:
        """Returns the spans so far of a trace, or of the router's latest generation's."""
        if trace_id:
            found = _get(f"{self.base_url}/api/traces/{_in_path(trace_id)}")
        else:
            query = urllib.parse.urlencode({"service": Service.ROUTER, "limit": 20})
            found = _get(f"{self.base_url}/api/traces?{query}")
        traces = [from_jaeger(trace) for trace in (found or {}).get("data") or ()]
        if not trace_id:
            traces = [trace for trace in traces if trace.request]
        return max(traces, key=lambda trace: trace.start_ns, default=None)


def _in_path(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def _get(url: str) -> dict[str, Any] | None:
    """Reads JSON from a URL; None for status 404."""
    try:
        with urllib.request.urlopen(url, timeout=_REQUEST_TIMEOUT_S) as response:
            found: dict[str, Any] = json.load(response)
            return found
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            raise TraceError(f"{url} answered {error.code}") from None
    except (OSError, ValueError, http.client.HTTPException):
        raise TraceError(f"{url} does not answer: does the router run there?") from None
