"""A router's policy for tests: every prompt comes with the word that some worker holds it.

It knows nothing of what workers hold, so most of what it says is wrong, as an index may be. Where a
model has several groups of layers, it says what the router knows: a place behind which nobody can
go on would bring nothing. It is put on top of the router's own choice of workers. Where holders are
named, no worker begins two prompts one after the other: the one that began a prompt has its pages,
and would fetch nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

FETCHING: Final = "TEST_FETCHING"
"""Environment of a router that `nursery` starts: names of holders with commas between, `any` for a
random one each time."""


def everybody_fetches(holders: str) -> None:
    """From now on in this process every route says that one of the holders has the prompt."""
    from router.placement import routing

    routing.choose = fetching(routing.choose, holders.split(","))


def fetching(choose: Callable[..., Any], holders: Sequence[str]) -> Callable[..., Any]:
    """`routing.choose` with a fetch for each route."""
    from router.workers.between import can_fetch

    rng = random.Random(7)
    last: list[Any] = [None]

    def chosen(demand: Any, workers: Sequence[Any], *args: Any) -> Any:
        route = None
        if "any" not in holders:
            route = choose(demand, [one for one in workers if one is not last[0]], *args)
        route = route or choose(demand, workers, *args)
        last[0] = route.prefill if route is not None else last[0]
        if route is None:
            return None
        others = [
            worker
            for worker in workers
            if can_fetch(route.prefill, worker)
            and (worker.worker_id in holders or "any" in holders)
        ]
        pages = demand.prompt_tokens // demand.model.page_size_tokens
        if not others or not pages:
            return route
        holder = rng.choice(others)
        if holder.identity.model.resume_pages:
            # Of several groups a resume point comes or nothing, so a wrong one would bring nothing.
            held = args[0]._held.get(holder.worker_id)
            pages = held.host_resume if held else 0
        way = route.way._replace(holder=holder, fetched_pages=pages)
        return route._replace(way=way)

    return chosen
