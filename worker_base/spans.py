"""The two spans of a prompt's computation, which both services write.

A leg keeps times. Its service writes all spans of the leg once, when the outcome is known. A failed
leg has the spans of the phases that it reached, and the last of them carries the reason.
"""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.util.types import AttributeValue

from telemetry.names import Attr, SpanName
from telemetry.tracing import write_span
from worker_base.legs import WorkerLeg

Skew = Callable[[int, int], float]
"""`engine.engine.Engine.rank_skew_s`."""


def write_prompt_spans(leg: WorkerLeg, computed_tokens: int, skew: Skew, chunks: int = 0) -> None:
    """Writes prefill.queue and, if the prompt was begun, prefill.compute.

    Args:
        leg: its outcome is known. Its error belongs here if the prompt was not computed.
        computed_tokens: prompt tokens computed here, without cached ones.
        skew: the wait for the slowest rank.
        chunks: steps that computed a part of the prompt; 0 if nobody counted them.
    """
    error = "" if leg.computed_ns else leg.error
    write_span(
        SpanName.PREFILL_QUEUE,
        leg.traceparent,
        leg.received_ns,
        leg.started_ns or leg.over_ns,
        error="" if leg.started_ns else error,
    )
    if not leg.started_ns:
        return
    end_ns = leg.computed_ns or leg.over_ns
    attributes: dict[str, AttributeValue] = {
        Attr.PREFILL_TOKENS: computed_tokens,
        Attr.PREFILL_CACHED_TOKENS: leg.cached_tokens,
        **skew_of(skew, leg.started_ns, end_ns),
    }
    if leg.loaded_tokens:
        attributes[Attr.PREFILL_LOADED_TOKENS] = sum(leg.loaded_tokens.values())
        attributes[Attr.PREFILL_LOADED_FROM] = ",".join(sorted(leg.loaded_tokens))
    if chunks:
        attributes[Attr.PREFILL_CHUNKS] = chunks
    write_span(
        SpanName.PREFILL_COMPUTE,
        leg.traceparent,
        leg.started_ns,
        end_ns,
        attributes,
        error=error,
    )


def skew_of(skew: Skew, start_ns: int, end_ns: int) -> dict[str, AttributeValue]:
    """The attribute of the wait for the slowest rank; nothing where nobody waited."""
    waited_s = skew(start_ns, end_ns)
    return {Attr.RANK_SKEW_MS: waited_s * 1e3} if waited_s else {}


def milliseconds(start_ns: int, end_ns: int) -> float:
    """The time between two times; 0 if either is unknown or the clocks disagree."""
    return max(0, end_ns - start_ns) / 1e6 if start_ns and end_ns else 0.0
