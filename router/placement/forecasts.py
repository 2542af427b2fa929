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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.events import RouterEvents
    from router.jobs import Demand
    from router.placement.routing import Route

EVENT, FETCH, IN_FLIGHT, SOONER = "event", "fetch", "in_flight", "sooner"


def compare(
    events: RouterEvents,
    demand: Demand,
    route: Route,
    took_s: float,
    cached_tokens: int,
    held_pages: int,
) -> None:
    """Reports how the forecast was met.

    Args:
        events: where.
        demand: what was placed.
        route: where it was placed, with the way that was foretold.
        took_s: seconds from dispatch to the first token.
        cached_tokens: tokens of the prompt that the worker found.
        held_pages: leading pages of the prompt that another worker holds, as is known now.
    """
    way = route.way
    events.foretold(way.seconds, took_s, way.cached_tokens, cached_tokens)
    for reason, pages in computed_again(demand, route, cached_tokens, held_pages).items():
        events.computed_again(reason, pages)


def compare_takeover(
    events: RouterEvents, demand: Demand, cached_tokens: int, held_pages: int
) -> None:
    """Reports what a decode worker computed of a prompt that it took over. It does so only where
    that is sooner than to wait for the prefill worker.

    Args:
        events: where.
        demand: what was placed.
        cached_tokens: tokens of the prompt that the decode worker held.
        held_pages: leading pages of the prompt that another worker holds, as is known now.
    """
    cached = cached_tokens // demand.model.page_size_tokens
    if (pages := min(held_pages, len(demand.keys)) - cached) > 0:
        events.computed_again(SOONER, pages)


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
