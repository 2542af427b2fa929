"""Puts the details of a span into words: counts, sizes, times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from console.tracing.traces import Span
from telemetry.names import Attr, SpanName


def details(span: Span) -> list[str]:
    """Returns a span's details in words, its failure first."""
    found = [f"✗ {span.error or 'failed'}"] if span.failed else []
    for key, describe in _DETAILS.get(span.name, ()):
        value = span.attributes.get(key)
        if value is not None and (text := describe(value)):
            found.append(text)
    return found


def count(one: str, many: str = "") -> Callable[[Any], str]:
    """Makes a function that writes a number with its noun, such as "2 pages"."""

    def describe(value: int) -> str:
        return f"{value:,} {one if value == 1 else many or one + 's'}"

    return describe


def _unless_zero(describe: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: describe(value) if value else ""


def _milliseconds(words: str) -> Callable[[Any], str]:
    return lambda value: words.format(duration(float(value) * 1e6))


def _bytes(value: int) -> str:
    size = float(value)
    for unit in ("B", "KiB", "MiB"):
        if size < 1_000:
            return f"{size:.3g} {unit}"
        size /= 1_024
    return f"{size:.3g} GiB"


def _gigabytes_per_s(value: float) -> str:
    return f"{value:.2g} GB/s" if value < 10 else f"{value:.0f} GB/s"


def duration(ns: float) -> str:
    """Writes a duration with three digits, in the unit that fits."""
    if ns < 999.5e3:
        return f"{ns / 1e3:.0f} µs"
    if ns < 999.5e6:
        return f"{ns / 1e6:.3g} ms"
    return f"{ns / 1e9:.3g} s" if ns < 999.5e9 else f"{ns / 60e9:.0f} min"


_SKEW: Final = "{} of waits for the slowest rank"
_DETAILS: Final[dict[str, tuple[tuple[str, Callable[[Any], str]], ...]]] = {
    SpanName.QUEUE: (
        (Attr.QUEUE_DEPTH, _unless_zero(lambda depth: f"{depth} ahead")),
        (Attr.QUEUE_TOKENS, _unless_zero(count("prompt token"))),
    ),
    SpanName.ROUTE: (
        (Attr.ROUTE_ATTEMPT, lambda attempt: f"attempt {attempt}" if attempt > 1 else ""),
    ),
    SpanName.PREFILL_COMPUTE: (
        (Attr.PREFILL_TOKENS, count("token")),
        (Attr.PREFILL_CACHED_TOKENS, _unless_zero(lambda tokens: f"{tokens:,} cached")),
        (Attr.PREFILL_CHUNKS, count("chunk")),
        (Attr.RANK_SKEW_MS, _milliseconds(_SKEW)),
    ),
    SpanName.KV_FETCH: (
        (Attr.KV_PAGES, count("page")),
        (Attr.FETCH_HOLDER, lambda holder: f"from {holder}"),
        (Attr.KV_BYTES, _unless_zero(_bytes)),
        (Attr.KV_GIGABYTES_PER_S, _unless_zero(_gigabytes_per_s)),
    ),
    SpanName.KV_GIVE: (
        (Attr.KV_PAGES, count("page")),
        (Attr.GIVE_LOADED_PAGES, _unless_zero(lambda pages: f"{pages:,} loaded for it")),
        (Attr.KV_BYTES, _bytes),
        (Attr.KV_GIGABYTES_PER_S, _unless_zero(_gigabytes_per_s)),
    ),
    SpanName.KV_GRANT: (
        (Attr.KV_PAGES, count("page")),
        (Attr.KV_HELD_PAGES, _unless_zero(lambda pages: f"{pages:,} held already")),
    ),
    SpanName.KV_SEND: (
        (Attr.KV_PAGES, count("page")),
        (Attr.KV_BYTES, _bytes),
        (Attr.KV_TRANSPORT, str),
        (Attr.KV_GIGABYTES_PER_S, _unless_zero(_gigabytes_per_s)),
        (Attr.KV_EXPOSED_MS, _milliseconds("{} exposed")),
    ),
    SpanName.KV_RECEIVE: (
        (Attr.KV_PAGES, count("page")),
        (Attr.KV_BYTES, _bytes),
        (Attr.KV_NOTIFICATIONS, count("notification")),
    ),
    SpanName.DECODE_GENERATE: (
        (Attr.DECODE_TOKENS, count("token")),
        (Attr.DECODE_STEPS, count("step")),
        (Attr.DECODE_ACCEPTED, count("accepted draft")),
        (Attr.DECODE_ITL_P50_MS, _milliseconds("{} between tokens (p50)")),
        (Attr.RANK_SKEW_MS, _milliseconds(_SKEW)),
        (Attr.DECODE_PREEMPTIONS, _unless_zero(lambda times: f"preempted {times} times")),
    ),
}
