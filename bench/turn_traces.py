"""What the traces of conversations say: KV that moved, and the longest gaps between tokens.

A fetch is divided at its holder's span `kv.give`:

    asked    from the wish to the holder: two event loops, two streams and the router
    held     until the pages were held in the holder's pool: its step loop, and its loads
    posted   until the first push was posted: the holder's transfer thread, behind hand-offs
    push     until the last push was done
    seen     until the worker that fetches had reported it to its engine

A gap has with it all that overlaps it: where it is the second token's, the parts of its hand-off.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from console.tracing import traces
from console.tracing.traces import Span, Trace
from telemetry.names import Attr, SpanName

Found = dict[str, Any]
PARTS = ("asked", "held", "posted", "push", "seen")


def read(admin: str, began_ns: int) -> list[Trace]:
    """The generations that began since then, as the router's store has them."""
    with urllib.request.urlopen(f"http://{admin}/traces", timeout=30) as page:
        listed = json.load(page)["traces"]
    found = []
    for one in listed:
        if one["start_ns"] >= began_ns and SpanName.is_request(one["name"]):
            with contextlib.suppress(traces.TraceError):
                found.append(traces.fetch(admin, one["trace_id"], patience_s=0.0))
    return found


# -- KV that moved ------------------------------------------------------------------------------


def moved(found: Sequence[Trace], least_mib: float) -> Found:
    """Transfers of so many MiB and more: GB/s, and how many transfers that is of."""
    local = sum(
        any(Attr.ROUTE_LOCAL_REASON in span.attributes for span in trace.spans) for trace in found
    )
    big = [
        span for trace in found for span in trace.spans
        if float(span.attributes.get(Attr.KV_BYTES, 0)) >= least_mib * (1 << 20) and not span.failed
    ]  # fmt: skip
    sends = [
        (float(span.attributes[Attr.KV_BYTES]), float(span.attributes[Attr.KV_WIRE_MS]))
        for span in big
        if span.name == SpanName.KV_SEND and span.attributes.get(Attr.KV_PUSHES) == 1
    ]
    gives = {
        span.attributes[Attr.TRANSFER_ID]: span for span in big if span.name == SpanName.KV_GIVE
    }
    fetches = [span for span in big if span.name == SpanName.KV_FETCH]
    of_place: dict[str, list[tuple[Span, Span]]] = defaultdict(list)
    for span in fetches:
        if give := gives.get(span.attributes[Attr.TRANSFER_ID]):
            place = "host" if give.attributes[Attr.GIVE_LOADED_PAGES] else "pool"
            of_place[place].append((span, give))
    return {
        "traces": len(found),
        "on_decode": round(local / len(found), 3) if found else None,
        "fetch": _rate([(float(span.attributes[Attr.KV_BYTES]), _ms(span)) for span in fetches]),
        "hand_off": _rate(sends),
        **{f"fetch_from_{place}": _parts(pairs) for place, pairs in of_place.items()},
    }


def _parts(pairs: Sequence[tuple[Span, Span]]) -> Found:
    """Lines of fetches and their gives: GB/s of the pushes alone, and the parts in ms."""
    pushes = [
        (float(give.attributes[Attr.KV_BYTES]), float(give.attributes[Attr.KV_WIRE_MS]))
        for _, give in pairs
    ]
    columns = np.array([_divided(fetch, give) for fetch, give in pairs])
    return {
        "push": _rate(pushes),
        "p50_ms": dict(zip(PARTS, np.median(columns, axis=0).round(2).tolist(), strict=True)),
        "longest_ms": dict(zip(PARTS, columns.max(axis=0).round(2).tolist(), strict=True)),
        "longest_posting_ms": round(max(_of(give, Attr.KV_POSTING_MS) for _, give in pairs), 2),
    }


def _divided(fetch: Span, give: Span) -> list[float]:
    asked = (give.start_ns - fetch.start_ns) / 1e6
    held, push = _of(give, Attr.GIVE_HELD_MS), _of(give, Attr.KV_WIRE_MS)
    return [asked, held, _ms(give) - held - push, push, (fetch.end_ns - give.end_ns) / 1e6]


def _rate(transfers: Sequence[tuple[float, float]]) -> Found:
    """Rate of (bytes, ms) pairs."""
    if not transfers:
        return {"count": 0}
    size, took_ms = (sum(column) for column in zip(*transfers, strict=True))
    return {
        "count": len(transfers),
        "gb_per_s": round(size / max(took_ms, 1e-6) / 1e6, 2),
        "median_ms": round(statistics.median(each for _, each in transfers), 2),
        "mean_mib": round(size / len(transfers) / (1 << 20), 1),
    }


# -- gaps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """A time without a token of one stream."""

    kind: str
    trace: Trace
    generate: Span
    start_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        """Its length."""
        return (self.end_ns - self.start_ns) / 1e6


def gaps_of(found: Sequence[Trace]) -> Iterator[Gap]:
    """For each stream the gap before its second token, and the longest of the others."""
    for trace in found:
        for span in trace.named(SpanName.DECODE_GENERATE):
            computed = [one.end_ns for one in trace.named(SpanName.PREFILL_COMPUTE)]
            if computed and (second_ms := _of(span, Attr.DECODE_SECOND_TOKEN_GAP_MS)):
                start_ns = max(computed)
                yield Gap("second", trace, span, start_ns, start_ns + int(second_ms * 1e6))
            if longest_ms := _of(span, Attr.DECODE_LONGEST_GAP_MS):
                end_ns = span.start_ns + int(_of(span, Attr.DECODE_LONGEST_GAP_AT_MS) * 1e6)
                yield Gap("later", trace, span, end_ns - int(longest_ms * 1e6), end_ns)


def gaps(found: Sequence[Trace], count: int = 5) -> Found:
    """Percentiles of either kind, and the longest with what happened meanwhile."""
    all_gaps = sorted(gaps_of(found), key=lambda gap: -gap.ms)
    figures: Found = {}
    for kind in ("second", "later"):
        values = [gap.ms for gap in all_gaps if gap.kind == kind]
        if values:
            p50, p90, p99 = np.percentile(values, (50, 90, 99)).round(1).tolist()
            figures[f"gap_{kind}_ms"] = {
                "p50": p50,
                "p90": p90,
                "p99": p99,
                "max": round(values[0], 1),
            }
    figures["longest_gaps"] = [_described(gap, found, all_gaps) for gap in all_gaps[:count]]
    return figures


def _described(gap: Gap, found: Sequence[Trace], all_gaps: Sequence[Gap]) -> Found:
    """One gap, what its own request did, and what others did meanwhile."""
    shared = [
        other for other in all_gaps
        if other.kind == "later" and other.generate.process == gap.generate.process
        and other is not gap and _overlap_ms(gap, other.start_ns, other.end_ns) > gap.ms / 2
    ]  # fmt: skip
    return {
        "ms": round(gap.ms, 1),
        "kind": gap.kind,
        "on": gap.generate.process,
        "trace": gap.trace.id,
        "preemptions": gap.generate.attributes.get(Attr.DECODE_PREEMPTIONS, 0),
        "joined_after_ms": round(_of(gap.generate, Attr.DECODE_JOIN_WAIT_MS), 1),
        "streams_that_waited_too": len(shared),
        "own": _overlapping(gap, [gap.trace]),
        "others": _overlapping(gap, [trace for trace in found if trace is not gap.trace]),
    }


def _overlapping(gap: Gap, found: Sequence[Trace]) -> dict[str, str]:
    """By process and name the spans that overlap a gap: how many, and most ms of overlap."""
    of_name: dict[str, list[float]] = defaultdict(list)
    for trace in found:
        for span in trace.spans:
            overlap_ms = _overlap_ms(gap, span.start_ns, span.end_ns)
            if span.name in _TELLING and overlap_ms > 0:
                of_name[f"{span.process} {span.name}"].append(overlap_ms)
    return {name: f"{len(all_ms)}, {max(all_ms):.0f} ms" for name, all_ms in of_name.items()}


_TELLING = (
    SpanName.PREFILL_QUEUE, SpanName.PREFILL_COMPUTE, SpanName.KV_FETCH, SpanName.KV_GIVE,
    SpanName.KV_GRANT, SpanName.KV_SEND, SpanName.KV_RECEIVE, SpanName.DECODE_GENERATE,
)  # fmt: skip


def _overlap_ms(gap: Gap, start_ns: int, end_ns: int) -> float:
    return max(0, min(gap.end_ns, end_ns) - max(gap.start_ns, start_ns)) / 1e6


def _of(span: Span, key: str) -> float:
    return float(span.attributes.get(key, 0.0))


def _ms(span: Span) -> float:
    return span.duration_ns / 1e6
