"""The figures of conversations by turn: time to the first token, and where the prompt came from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from baton.console import traces
from baton.console.loadgen.outcome import Outcome
from baton.console.loadgen.report.summary import Percentiles, percentiles
from telemetry.names import Attr, SpanName

POOL: Final = "pool"
"""Pages that were in the pool of the worker that computed the rest."""
_PATIENCE_S: Final = 1.0


class TurnFigures(NamedTuple):
    """One turn of all conversations. Only complete requests count."""

    turn: int
    """From 1."""
    requests: int
    ttft_ms: Percentiles
    prompt_tokens: float
    """Mean."""
    cached_share: float
    """Share of the prompts' tokens that were cached, as the servers said."""
    sources: Mapping[str, float]
    """Share of the prompts' tokens by source: the pool, a tier, peers. Empty without traces."""
    on_decode: float | None
    """Share of the requests whose prompt a decode worker computed; None without traces."""


class Source(NamedTuple):
    """Where one prompt came from, as its trace says."""

    tokens: Mapping[str, int]
    on_decode: bool


def turn_figures(
    outcomes: Iterable[Outcome], sources: Mapping[str, Source]
) -> tuple[TurnFigures, ...]:
    """The figures of each turn.

    Args:
        outcomes: those of a run of conversations.
        sources: by trace id; those whose trace is gone are missing.
    """
    by_turn: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.ok and outcome.turn >= 0:
            by_turn[outcome.turn].append(outcome)
    return tuple(_figures(turn, by_turn[turn], sources) for turn in sorted(by_turn))


def _figures(turn: int, outcomes: Sequence[Outcome], sources: Mapping[str, Source]) -> TurnFigures:
    prompts = sum(outcome.prompt_tokens for outcome in outcomes)
    found = [(one, sources[one.trace_id]) for one in outcomes if one.trace_id in sources]
    traced = sum(outcome.prompt_tokens for outcome, _ in found)
    tokens: Counter[str] = Counter()
    for _, source in found:
        tokens.update(source.tokens)
    ttft_ms = percentiles([1e3 * outcome.ttft_s for outcome in outcomes])
    assert ttft_ms is not None
    return TurnFigures(
        turn=turn + 1,
        requests=len(outcomes),
        ttft_ms=ttft_ms,
        prompt_tokens=prompts / len(outcomes),
        cached_share=sum(outcome.cached_tokens for outcome in outcomes) / prompts,
        sources={name: count / traced for name, count in tokens.most_common()},
        on_decode=sum(one.on_decode for _, one in found) / len(found) if found else None,
    )


def read_sources(admin: str, trace_ids: Iterable[str]) -> dict[str, Source]:
    """Reads from traces where prompts came from. Traces that the router no longer has are missing.

    Args:
        admin: HOST:PORT of the router's admin port.
        trace_ids: of the requests.
    """
    found = {}
    for trace_id in trace_ids:
        try:
            found[trace_id] = source_of(traces.fetch(admin, trace_id, patience_s=_PATIENCE_S))
        except traces.TraceError:
            continue
    return found


def source_of(trace: traces.Trace) -> Source:
    """Where a prompt came from: by the last span in which it was computed."""
    spans = [span for span in trace.spans if span.name == SpanName.PREFILL_COMPUTE]
    on_decode = any(Attr.ROUTE_LOCAL_REASON in span.attributes for span in trace.spans)
    if not spans:
        return Source({}, on_decode)
    attributes = max(spans, key=lambda span: span.start_ns).attributes
    cached = int(attributes.get(Attr.PREFILL_CACHED_TOKENS, 0))
    loaded = int(attributes.get(Attr.PREFILL_LOADED_TOKENS, 0))
    tokens = {POOL: cached - loaded}
    if loaded:
        tokens[str(attributes.get(Attr.PREFILL_LOADED_FROM, ""))] = loaded
    return Source({name: count for name, count in tokens.items() if count}, on_decode)
