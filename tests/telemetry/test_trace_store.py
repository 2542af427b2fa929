"""The router's trace store: what it keeps, what it forgets, what it shows."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client import CollectorRegistry

from router import trace_store
from router.trace_store import TraceStore, add_trace_receiver, trace_routes
from serving.admin import AdminServer
from telemetry.names import Attr, Service, SpanName
from telemetry.tracing import (
    SpanKind,
    end_span,
    link_from,
    setup_tracing,
    span_id_bytes,
    start_span,
    trace_id_of,
    traceparent_of,
    write_span,
)


def request(*spans: Span, service: str = "") -> otlp.ExportTraceServiceRequest:
    made = otlp.ExportTraceServiceRequest()
    resource = made.resource_spans.add()
    resource.resource.attributes.add(key=Attr.SERVICE_NAME).value.string_value = service
    resource.scope_spans.add().spans.extend(spans)
    return made


def span(trace: int, number: int = 1, name: str = "x", start_ns: int = 1) -> Span:
    return Span(
        trace_id=trace.to_bytes(16, "big"),
        span_id=number.to_bytes(8, "big"),
        name=name,
        start_time_unix_nano=start_ns,
        end_time_unix_nano=start_ns + 1_000_000,
    )


def trace_id(number: int) -> str:
    return f"{number:032x}"


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[TraceStore, str]]:
    store = TraceStore()
    server = grpc.aio.server()
    add_trace_receiver(server, store)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield store, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_what_a_process_sends_is_shown(receiver: tuple[TraceStore, str]) -> None:
    store, address = receiver
    tracing = setup_tracing(Service.DECODE, "decode-0", address, schedule_delay_ms=5)
    assert tracing is not None
    leg = start_span(SpanName.DECODE, None, kind=SpanKind.CLIENT, start_ns=1_000)
    send = write_span(SpanName.KV_SEND, leg, 1_500, 4_000)
    write_span(
        SpanName.KV_RECEIVE,
        leg,
        2_000,
        5_000,
        {Attr.KV_PAGES: 17, Attr.RESPONSE_FINISH_REASONS: ["stop", "length"]},
        links=link_from(traceparent_of(leg), span_id_bytes(send)),
    )
    end_span(leg, 9_000, error="worker_lost")
    await asyncio.to_thread(tracing.shutdown)
    found = store.trace(trace_id_of(leg))
    assert found is not None
    json.dumps(found)
    by_name = {span["name"]: span for span in found["spans"]}
    assert [span["name"] for span in found["spans"]] == ["decode", "kv.send", "kv.receive"]
    assert by_name["kv.receive"] == {
        "span_id": by_name["kv.receive"]["span_id"],
        "parent_id": span_id_bytes(leg).hex(),
        "name": "kv.receive",
        "kind": "internal",
        "service": Service.DECODE,
        "instance": "decode-0",
        "start_ns": 2_000,
        "end_ns": 5_000,
        "attributes": {Attr.KV_PAGES: 17, Attr.RESPONSE_FINISH_REASONS: ["stop", "length"]},
        "links": [{"trace_id": trace_id_of(leg), "span_id": span_id_bytes(send).hex()}],
        "status": "unset",
        "error": "",
    }
    assert by_name["decode"]["kind"] == "client"
    assert (by_name["decode"]["status"], by_name["decode"]["error"]) == ("error", "worker_lost")
    assert by_name["decode"]["parent_id"] == ""


def test_spans_come_in_any_order_and_however_late() -> None:
    store = TraceStore()
    store.add(request(span(1, 3, "child", 30), span(2, 1)))
    store.add(request(span(1, 1, "root", 10)))
    store.add(request(span(1, 2, "child", 20), span(1, 3, "child", 30)))
    found = store.trace(trace_id(1))
    assert found is not None
    assert [span["start_ns"] for span in found["spans"]] == [10, 20, 30]
    assert len(store) == 2


def test_the_trace_heard_of_least_lately_goes_first() -> None:
    store = TraceStore(max_traces=3)
    for number in (1, 2, 3, 1, 4):
        store.add(request(span(number)))
    assert {summary["trace_id"] for summary in store.summaries()} == set(map(trace_id, (1, 3, 4)))
    assert store.trace(trace_id(2)) is None


def test_a_trace_has_no_more_spans_or_bytes_than_allowed() -> None:
    store = TraceStore(max_spans=5, max_bytes=2_000)
    store.add(request(*(span(1, number) for number in range(1, 9))))
    store.add(request(span(1, 2, "again")))  # Known: no room needed.
    found = store.trace(trace_id(1))
    assert found is not None
    assert (len(found["spans"]), found["dropped_spans"]) == (5, 3)
    assert sum(span["name"] == "again" for span in found["spans"]) == 1
    store.add(request(span(2, 1, "n" * 1_500), span(2, 2, "n" * 1_500), span(2, 3)))
    found = store.trace(trace_id(2))
    assert found is not None
    assert (len(found["spans"]), found["dropped_spans"]) == (2, 1)


def test_what_the_list_shows_is_that_of_all_spans_whatever_their_order() -> None:
    store = TraceStore()
    failed = span(1, 3, "kv.send", 20_000_000)
    failed.status.code = Status.STATUS_CODE_ERROR
    store.add(request(span(1, 2, "child", 30_000_000), service="baton-decode"))
    (summary,) = store.summaries()
    assert (summary["name"], summary["duration_ms"], summary["failed"]) == ("child", 1.0, False)
    store.add(request(span(1, 1, "root", 10_000_000), failed, service="baton-prefill"))
    store.add(request(span(1, 2, "child", 30_000_000), service="baton-decode"))
    (summary,) = store.summaries()
    assert summary == {
        "trace_id": trace_id(1),
        "name": "root",
        "start_ns": 10_000_000,
        "duration_ms": 21.0,
        "spans": 3,
        "services": ["baton-decode", "baton-prefill"],
        "failed": True,
    }


def test_a_span_without_a_trace_is_ignored() -> None:
    store = TraceStore()
    store.add(request(Span(name="lost")))
    assert len(store) == 0


@asynccontextmanager
async def open_pages(store: TraceStore) -> AsyncIterator[Callable[[str], Awaitable[Any]]]:
    """What fetches a page of the store: the status and what it says."""
    admin = AdminServer("127.0.0.1:0", CollectorRegistry(), routes=trace_routes(store))
    await admin.start()

    def fetch(path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(f"http://{admin.address}{path}") as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    async def get(path: str) -> tuple[int, Any]:
        return await asyncio.to_thread(fetch, path)

    yield get
    await admin.stop()


async def test_the_pages() -> None:
    store = TraceStore()
    async with open_pages(store) as get:
        assert await get("/traces") == (200, {"traces": []})
        store.add(request(span(1, start_ns=5_000_000)))
        store.add(request(span(2, 1, "router.admit", 6_000_000)))
        store.add(request(span(2, 2, "text_completion m", 6_000_001)))
        _, page = await get("/traces")
        first, second = page["traces"]
        assert (first["trace_id"], first["name"]) == (trace_id(2), "text_completion m")
        assert (first["spans"], first["failed"]) == (2, False)
        assert second["duration_ms"] == 1.0
        assert (await get(f"/traces/{trace_id(1)}"))[0] == 200
        for unknown in (trace_id(9), "nonsense"):
            assert (await get(f"/traces/{unknown}"))[0] == 404


async def test_no_page_parses_spans_on_the_loop_of_the_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed_by: list[threading.Thread] = []
    parse: Callable[[object], Span] = vars(trace_store._Stored)["span"].fget

    def noted(stored: object) -> Span:
        parsed_by.append(threading.current_thread())
        return parse(stored)

    monkeypatch.setattr(trace_store._Stored, "span", property(noted))
    store = TraceStore()
    store.add(request(*(span(1, number) for number in range(1, 4))))
    async with open_pages(store) as get:
        assert len((await get("/traces"))[1]["traces"]) == 1
        assert parsed_by == []
        assert len((await get(f"/traces/{trace_id(1)}"))[1]["spans"]) == 3
    assert len(parsed_by) == 3
    assert threading.current_thread() not in parsed_by
