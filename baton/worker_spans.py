"""The two spans of a prompt's computation, which prefill attempts and whole ones share.

Spans are written afterwards, from timestamps: a cancelled or failed attempt has those of what did
happen, the last one with the word that says why.
"""

from __future__ import annotations

import time
from typing import Final

from telemetry.names import Attr, SpanName
from telemetry.tracing import write_span

CANCELLED: Final = "cancelled"
EXPIRED: Final = "expired"
KV_TRANSFER: Final = "kv_transfer"


def write_prompt_spans(
    traceparent: str,
    received_ns: int,
    started_ns: int,
    computed_ns: int,
    *,
    tokens: int,
    cached_tokens: int,
    chunks: int,
    error: str = "",
) -> None:
    """Writes prefill.queue and, where the prompt was begun, prefill.compute.

    Args:
        traceparent: of the span they belong under.
        received_ns: the attempt came.
        started_ns: its first chunk was launched; 0 where that never happened.
        computed_ns: its first token was sampled; 0 where that never happened.
        tokens: prompt tokens computed here.
        cached_tokens: prompt tokens found in the prefix cache.
        chunks: steps that computed a part of it; 0 where nobody counted them.
        error: why it went no further, where it did not.
    """
    now_ns = time.time_ns()
    queue_error = "" if started_ns else error
    write_span(
        SpanName.PREFILL_QUEUE, traceparent, received_ns, started_ns or now_ns, error=queue_error
    )
    if not started_ns:
        return
    attributes = {Attr.PREFILL_TOKENS: tokens, Attr.PREFILL_CACHED_TOKENS: cached_tokens}
    if chunks:
        attributes[Attr.PREFILL_CHUNKS] = chunks
    end_ns = computed_ns or now_ns
    write_span(SpanName.PREFILL_COMPUTE, traceparent, started_ns, end_ns, attributes, error=error)


def milliseconds(start_ns: int, end_ns: int) -> float:
    """From one time to another; 0 where either is unknown or clocks disagree."""
    return max(0, end_ns - start_ns) / 1e6 if start_ns and end_ns else 0.0
