"""Compares what the router foretold of an attempt with what its worker said.

Of each attempt, once, at its first token: the seconds until then, and the tokens of the prompt that
the worker found. Pages that were computed although another worker holds them are counted by reason:

| reason | meaning |
|---|---|
| `sooner` | to compute them was sooner than to fetch them or to wait for their holder |
| `bound` | a fetch would have exceeded its share of the pool |
| `unreachable` | there is no path to their holder, or its rate is unknown |
| `in_flight` | they were on their way to a worker, with a prompt that was just routed |
| `event` | the report that they are there, or no more, was under way |
| `fetch` | a fetch brought less than was asked for |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from router.events import RouterEvents
    from router.jobs import Demand
    from router.placement.cost import Cost
    from router.placement.routing import Route
    from router.workers.link import WorkerLink

EVENT, FETCH, IN_FLIGHT, SOONER = "event", "fetch", "in_flight", "sooner"


class Found(NamedTuple):
    """What is known at the first token of an attempt."""

    worker: WorkerLink
    """It has computed the prompt."""
    took_s: float
    """Seconds since dispatch."""
    cached_tokens: int
    """Tokens of the prompt that the worker found."""
    granted_pages: int
    """Leading pages that the decode worker held when it granted the rest."""


def compare(
    events: RouterEvents,
    policy: Cost,
    demand: Demand,
    route: Route,
    found: Found,
    everyone: Sequence[WorkerLink],
) -> None:
    """Reports how the forecast was met. That of a worker which took the prompt over was not
    foretold. It did so where that was sooner than to wait for the prefill worker.

    Args:
        events: where.
        policy: knows who holds what by now.
        demand: what was placed.
        route: where it was placed, with the way that was foretold.
        found: what came.
        everyone: workers of the model.
    """
    way, took_over = route.way, found.worker is not route.prefill
    # A decode worker that is handed the prompt has got the prompt's own pages by now.
    own = (found.worker, None if took_over else route.decode)
    others = [one for one in everyone if one not in own]
    held = policy.held_elsewhere(demand, others, 0 if took_over else found.granted_pages)
    if took_over:
        again = computed_by_takeover(demand, found.cached_tokens, held)
    else:
        events.predicted(way.seconds, found.took_s, way.cached_tokens, found.cached_tokens)
        again = computed_again(demand, route, found.cached_tokens, held)
    for reason, pages in again.items():
        events.computed_again(reason, pages)


def computed_by_takeover(demand: Demand, cached_tokens: int, held_pages: int) -> Counter[str]:
    """Pages that a decode worker computed of a prompt that it took over, although another worker
    holds them, by reason."""
    cached = cached_tokens // demand.model.page_size_tokens
    return +Counter({SOONER: min(held_pages, len(demand.keys)) - cached})


def computed_again(
    demand: Demand, route: Route, cached_tokens: int, held_pages: int
) -> Counter[str]:
    """Pages that were computed although another worker holds them, by reason; no more than were
    computed at all."""
    way, size = route.way, demand.model.page_size_tokens
    if not len(demand.keys):
        return Counter()
    computed = max(0, len(demand.keys) - cached_tokens // size)
    lacking = max(0, way.cached_tokens - cached_tokens) // size
    again = Counter(way.again)
    if lacking and way.holder is not None:
        again[FETCH] += lacking
    elif lacking:
        again[IN_FLIGHT if way.just_routed else EVENT] += lacking
    again[EVENT] += max(0, held_pages - cached_tokens // size - again.total())
    return _at_most(again, computed)


def _at_most(counts: Counter[str], total: int) -> Counter[str]:
    """The counts in order, cut at a total."""
    found: Counter[str] = Counter()
    for reason, count in counts.items():
        found[reason] = min(count, total - found.total())
    return +found
