"""The spans of a fetch, below the leg whose prompt it is for: kv.fetch of the worker that gets the
pages, and kv.give of the one that gives them."""

from __future__ import annotations

import time
from typing import Final

from opentelemetry.util.types import AttributeValue

from baton.worker.v1 import worker_pb2
from engine.tiers.peers import FetchWanted
from fetch_service.outcomes import FETCHED, SHORT
from kv_transfer.events import SendStats
from telemetry.names import Attr, SpanName
from telemetry.tracing import write_span
from worker_base.spans import milliseconds

GOOD: Final = (FETCHED, SHORT)


def write_span_of(
    wanted: FetchWanted,
    traceparent: str,
    began_ns: int,
    landed: int,
    size: int,
    *,
    transport: str,
    outcome: str,
) -> None:
    """Writes the span of a fetch that has ended just now; `size` is in bytes. A fetch for which
    nobody waits has none."""
    if not traceparent:
        return
    ended_ns = time.time_ns()
    took_ms = milliseconds(began_ns, ended_ns)
    attributes: dict[str, AttributeValue] = {
        Attr.TRANSFER_ID: wanted.id.hex(),
        Attr.FETCH_WANTED_PAGES: sum(len(part.keys) for part in wanted.parts),
        Attr.FETCH_HOLDER: wanted.peer.rpartition("-")[0] or wanted.peer,
        Attr.KV_PAGES: landed,
        Attr.KV_BYTES: size,
        Attr.KV_TRANSPORT: transport,
        Attr.KV_GIGABYTES_PER_S: size / took_ms / 1e6 if took_ms else 0.0,
    }
    error = "" if outcome in GOOD else outcome
    write_span(SpanName.KV_FETCH, traceparent, began_ns, ended_ns, attributes, error=error)


def write_give_span(
    fetch: worker_pb2.Fetch,
    stats: SendStats,
    *,
    received_ns: int,
    held_ns: int,
    loaded_pages: int,
    transport: str,
) -> None:
    """Writes the span of pages that were given, from the fetch's arrival to the end of the last
    push. GB/s are those of the pushes alone."""
    if not fetch.traceparent:
        return
    wire_ms = milliseconds(stats.started_ns, stats.done_ns)
    attributes: dict[str, AttributeValue] = {
        Attr.TRANSFER_ID: fetch.transfer_id.hex(),
        Attr.GIVE_LOADED_PAGES: loaded_pages,
        Attr.GIVE_HELD_MS: milliseconds(received_ns, held_ns),
        Attr.KV_PAGES: stats.pages,
        Attr.KV_BYTES: stats.bytes,
        Attr.KV_PUSHES: stats.pushes,
        Attr.KV_DESCRIPTORS: stats.descriptors,
        Attr.KV_TRANSPORT: transport,
        Attr.KV_POSTING_MS: stats.posting_s * 1e3,
        Attr.KV_WIRE_MS: wire_ms,
        Attr.KV_GIGABYTES_PER_S: stats.bytes / wire_ms / 1e6 if wire_ms else 0.0,
    }
    write_span(SpanName.KV_GIVE, fetch.traceparent, received_ns, stats.done_ns, attributes)
