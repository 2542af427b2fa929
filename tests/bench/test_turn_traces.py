"""A fetch's parts add up to its time, and a gap is told with what overlaps it."""

from __future__ import annotations

from typing import Any

import pytest

from bench import turn_traces
from console.tracing.traces import Span, Trace
from telemetry.names import Attr, SpanName

MIB = 1 << 20


def span(process: str, name: str, start_ms: float, end_ms: float, **attributes: Any) -> Span:
    named = {getattr(Attr, key): value for key, value in attributes.items()}
    times = int(start_ms * 1e6), int(end_ms * 1e6)
    return Span(f"{name}-{start_ms}", "", name, "internal", "", process, *times, named)


def traces() -> list[Trace]:
    moved = {"TRANSFER_ID": "t", "KV_BYTES": 64 * MIB}
    give = {"GIVE_LOADED_PAGES": 3, "GIVE_HELD_MS": 4.0, "KV_WIRE_MS": 1.0, "KV_POSTING_MS": 0.2}
    stopped = {"DECODE_LONGEST_GAP_MS": 300.0, "DECODE_LONGEST_GAP_AT_MS": 400.0}
    first = (
        span("prefill-0", SpanName.KV_FETCH, 10, 20, **moved),
        span("decode-0", SpanName.KV_GIVE, 12, 19, **moved, **give),
        span("prefill-0", SpanName.PREFILL_COMPUTE, 20, 30),
        span("decode-0", SpanName.KV_GRANT, 10, 530),
        span("decode-0", SpanName.DECODE_GENERATE, 540, 900, DECODE_SECOND_TOKEN_GAP_MS=520.0),
    )
    others = [
        (span("decode-0", SpanName.DECODE_GENERATE, at, 900, DECODE_PREEMPTIONS=0, **stopped),)
        for at in (1000, 1010)
    ]
    return [Trace("a", first), *(Trace(name, one) for name, one in zip("bc", others, strict=True))]


def test_the_parts_of_a_fetch_add_up() -> None:
    found = turn_traces.moved(traces(), least_mib=32)
    parts = found["fetch_from_host"]["p50_ms"]
    assert parts == {"asked": 2.0, "held": 4.0, "posted": 2.0, "push": 1.0, "seen": 1.0}
    assert sum(parts.values()) == found["fetch"]["median_ms"] == 10.0
    assert found["fetch_from_host"]["push"]["gb_per_s"] == pytest.approx(67.1, abs=0.1)
    assert "fetch_from_pool" not in found


def test_the_longest_gaps_are_told_with_their_surroundings() -> None:
    found = turn_traces.gaps(traces(), count=2)
    second, later = found["longest_gaps"]
    assert (second["ms"], second["kind"], second["on"]) == (520.0, "second", "decode-0")
    assert second["own"]["decode-0 kv.grant"] == "1, 500 ms"
    assert (later["ms"], later["kind"], later["streams_that_waited_too"]) == (300.0, "later", 1)
    assert found["gap_second_ms"]["max"] == 520.0
