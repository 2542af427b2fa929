"""The figures of conversations by turn: time to the first token, and where the prompt came from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from console.loadgen.outcome import Outcome
from console.loadgen.report.summary import Percentiles, percentiles
from console.tracing import traces
from telemetry.names import Attr

POOL: Final = "pool"
"""Pages that were in the pool of the worker that computed the rest."""
_PATIENCE_S: Final = 1.0
"""For spans that are still on their way: they are sent 200 ms after their end."""


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
    """Share of the prompts' tokens by source, as the servers said: the pool, a tier, peers."""
    on_decode: float | None
    """Share of the requests whose prompt a decode worker computed; None without traces."""


def turn_figures(
    outcomes: Iterable[Outcome], on_decode: Mapping[str, bool]
) -> tuple[TurnFigures, ...]:
    """The figures of each turn.

    Args:
        outcomes: those of a run of conversations.
        on_decode: by trace id, whether a decode worker computed the prompt. Those whose trace is
            gone are missing.
    """
    by_turn: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.ok and outcome.turn >= 0:
            by_turn[outcome.turn].append(outcome)
    return tuple(_figures(turn, by_turn[turn], on_decode) for turn in sorted(by_turn))


def _figures(turn: int, outcomes: Sequence[Outcome], on_decode: Mapping[str, bool]) -> TurnFigures:
    prompts = sum(outcome.prompt_tokens for outcome in outcomes)
    tokens: Counter[str] = Counter()
    for outcome in outcomes:
        tokens.update(outcome.loaded_tokens)
        tokens[POOL] += outcome.cached_tokens - sum(outcome.loaded_tokens.values())
    ttft_ms = percentiles([1e3 * outcome.ttft_s for outcome in outcomes])
    assert ttft_ms is not None
    known = [on_decode[one.trace_id] for one in outcomes if one.trace_id in on_decode]
    return TurnFigures(
        turn=turn + 1,
        requests=len(outcomes),
        ttft_ms=ttft_ms,
        prompt_tokens=prompts / len(outcomes),
        cached_share=sum(outcome.cached_tokens for outcome in outcomes) / prompts,
        sources={name: count / prompts for name, count in tokens.most_common() if count},
        on_decode=sum(known) / len(known) if known else None,
    )


def read_places(admin: str, trace_ids: Iterable[str]) -> dict[str, bool]:
    """Reads from traces whether a decode worker computed the prompt. Traces that the router no
    longer has are missing.

    Args:
        admin: HOST:PORT of the router's admin port.
        trace_ids: of the requests.
    """
    found = {}
    for trace_id in trace_ids:
        try:
            trace = traces.fetch(admin, trace_id, patience_s=_PATIENCE_S)
        except traces.TraceError:
            continue
        found[trace_id] = any(Attr.ROUTE_LOCAL_REASON in span.attributes for span in trace.spans)
    return found
