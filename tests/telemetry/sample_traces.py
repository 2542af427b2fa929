"""Traces of made-up requests, with times in milliseconds."""

from __future__ import annotations

from typing import Any

from console.tracing.traces import Span, Trace
from telemetry.names import Attr, Service, SpanName

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
START_NS = 1_700_000_000_000_000_000
MODEL = "SmolLM2-135M-Instruct"
_INSTANCES = {
    Service.ROUTER: "router",
    Service.PREFILL: "prefill-0",
    Service.DECODE: "decode-0",
    Service.BOTH: "both-0",
}


class Builder:
    """Collects spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def span(
        self,
        name: str,
        parent: Span | None,
        start_ms: float,
        end_ms: float,
        attributes: dict[str, Any] | None = None,
        *,
        service: str = Service.ROUTER,
        kind: str = "internal",
        error: str = "",
        links: tuple[str, ...] = (),
    ) -> Span:
        made = Span(
            id=f"{len(self.spans) + 1:016x}",
            parent_id=parent.id if parent else "",
            name=name,
            kind=kind,
            service=service,
            instance=_INSTANCES[service],
            start_ns=START_NS + round(start_ms * 1e6),
            end_ns=START_NS + round(end_ms * 1e6),
            attributes=attributes or {},
            links=links,
            failed=bool(error),
            error=error,
        )
        self.spans.append(made)
        return made

    def request(self, end_ms: float, output_tokens: int = 24, error: str = "") -> Span:
        """The router's part up to the first dispatch, at 2.5 ms."""
        server = self.span(
            "baton.inference.v1.InferenceService/StreamGenerate", None, 0, end_ms, kind="server"
        )
        request = self.span(
            SpanName.request(Attr.CHAT, MODEL),
            server,
            0.2,
            end_ms - 0.4,
            {
                Attr.REQUEST_MODEL: MODEL,
                Attr.REQUEST_CHOICES: 1,
                Attr.INPUT_TOKENS: 37,
                Attr.CACHED_INPUT_TOKENS: 16,
                Attr.OUTPUT_TOKENS: output_tokens,
                Attr.RESPONSE_FIRST_TOKEN_S: 0.0835,
            },
            error=error,
        )
        self.span(SpanName.ADMIT, request, 0.2, 0.5)
        self.span(SpanName.TOKENIZE, request, 0.5, 2.1)
        self.span(SpanName.QUEUE, request, 2.1, 2.4, {Attr.QUEUE_DEPTH: 3})
        self.route(request, 2.3, attempt=1)
        return request

    def route(self, request: Span, at_ms: float, attempt: int) -> None:
        attributes = {Attr.ROUTE_ATTEMPT: attempt}
        self.span(SpanName.ROUTE, request, at_ms, at_ms + 0.1, attributes)

    def leg(
        self, request: Span, name: str, start_ms: float, end_ms: float, mode: str, error: str = ""
    ) -> Span:
        worker = "prefill-0" if name == SpanName.PREFILL else "decode-0"
        attributes = {
            Attr.WORKER_ID: worker,
            Attr.WORK_MODE: mode,
            Attr.ATTEMPT_ID: f"{start_ms:.0f}",
        }
        return self.span(name, request, start_ms, end_ms, attributes, kind="client", error=error)

    def computed(self, leg: Span, start_ms: float, service: str = Service.PREFILL) -> None:
        self.span(SpanName.PREFILL_QUEUE, leg, start_ms, start_ms + 3.7, service=service)
        attributes = {
            Attr.PREFILL_TOKENS: 21,
            Attr.PREFILL_CACHED_TOKENS: 16,
            Attr.PREFILL_CHUNKS: 1,
        }
        self.span(
            SpanName.PREFILL_COMPUTE,
            leg,
            start_ms + 3.7,
            start_ms + 79.5,
            attributes,
            service=service,
        )

    def sent(self, leg: Span, start_ms: float) -> Span:
        attributes = {
            Attr.KV_PAGES: 3,
            Attr.KV_BYTES: 2_211_840,
            Attr.KV_TRANSPORT: "nixl/shm",
            Attr.KV_GIGABYTES_PER_S: 0.5634,
            Attr.KV_EXPOSED_MS: 4.3,
        }
        return self.span(
            SpanName.KV_SEND, leg, start_ms, start_ms + 6.3, attributes, service=Service.PREFILL
        )

    def decoded(self, leg: Span, start_ms: float, end_ms: float, sent: Span | None) -> None:
        if sent is not None:
            pages = {Attr.KV_PAGES: 3, Attr.KV_HELD_PAGES: 0}
            at_ms = (leg.start_ns - START_NS) / 1e6
            self.span(
                SpanName.KV_GRANT, leg, at_ms + 0.6, at_ms + 0.9, pages, service=Service.DECODE
            )
            self.span(
                SpanName.KV_RECEIVE,
                leg,
                at_ms + 0.9,
                start_ms,
                pages | {Attr.KV_BYTES: 2_211_840, Attr.KV_NOTIFICATIONS: 1},
                service=Service.DECODE,
                links=(sent.id,),
            )
        self.span(
            SpanName.DECODE_GENERATE,
            leg,
            start_ms,
            end_ms,
            {
                Attr.DECODE_TOKENS: 23,
                Attr.DECODE_STEPS: 23,
                Attr.DECODE_ITL_P50_MS: 13.9,
                Attr.DECODE_PREEMPTIONS: 0,
            },
            service=Service.DECODE if sent else Service.BOTH,
        )

    def trace(self) -> Trace:
        ordered = sorted(self.spans, key=lambda span: (span.start_ns, -span.end_ns))
        return Trace(TRACE_ID, tuple(ordered))


def disaggregated() -> Trace:
    """Prefill, hand-off, decode; nothing went wrong."""
    made = Builder()
    request = made.request(412)
    _hand_over(made, request, 2.5)
    return made.trace()


def retried() -> Trace:
    """The first attempt's prefill worker died."""
    made = Builder()
    request = made.request(456)
    made.leg(request, SpanName.PREFILL, 2.5, 45, "prefill", "worker_lost")
    lost = made.leg(request, SpanName.DECODE, 2.5, 46, "decode", "worker_lost")
    made.span(SpanName.KV_GRANT, lost, 3.1, 3.4, {Attr.KV_PAGES: 3}, service=Service.DECODE)
    made.route(request, 46, attempt=2)
    _hand_over(made, request, 46.5)
    return made.trace()


def whole() -> Trace:
    """One worker did both."""
    made = Builder()
    request = made.request(412)
    leg = made.leg(request, SpanName.DECODE, 2.5, 411, "whole")
    made.computed(leg, 3, Service.BOTH)
    made.decoded(leg, 83, 409, None)
    return made.trace()


def one_token() -> Trace:
    """The first token ended the request: no decode worker heard of it."""
    made = Builder()
    request = made.request(90, output_tokens=1)
    leg = made.leg(request, SpanName.PREFILL, 2.5, 88, "prefill")
    made.computed(leg, 3)
    return made.trace()


def refused() -> Trace:
    """Nothing was done."""
    made = Builder()
    made.request(5, output_tokens=0, error="QUEUE_FULL")
    return made.trace()


def _hand_over(made: Builder, request: Span, start_ms: float) -> None:
    prefill = made.leg(request, SpanName.PREFILL, start_ms, start_ms + 85.5, "prefill")
    made.computed(prefill, start_ms + 0.5)
    sent = made.sent(prefill, start_ms + 77.5)
    decode = made.leg(request, SpanName.DECODE, start_ms, start_ms + 408.5, "decode")
    made.decoded(decode, start_ms + 84.7, start_ms + 406.5, sent)
