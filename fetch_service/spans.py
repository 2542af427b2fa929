"""The span of a fetch: kv.fetch, below the leg whose prompt it is for."""

from __future__ import annotations

import time
from typing import Final

from opentelemetry.util.types import AttributeValue

from engine.tiers.peers import FetchWanted
from fetch_service.outcomes import FETCHED, SHORT
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
        Attr.FETCH_WANTED_PAGES: len(wanted.keys),
        Attr.FETCH_HOLDER: wanted.peer.rpartition("-")[0] or wanted.peer,
        Attr.KV_PAGES: landed,
        Attr.KV_BYTES: size,
        Attr.KV_TRANSPORT: transport,
        Attr.KV_GIGABYTES_PER_S: size / took_ms / 1e6 if took_ms else 0.0,
    }
    error = "" if outcome in GOOD else outcome
    write_span(SpanName.KV_FETCH, traceparent, began_ns, ended_ns, attributes, error=error)
