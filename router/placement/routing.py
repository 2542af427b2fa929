"""Finds the workers that can run a demand, and chooses among them.

A route names one worker for each leg. A hand-off has two workers. A job for a single token has
the prefill worker alone. If one worker runs the whole job, the route names it twice: it has the
role both, or it is a decode worker for one of the reasons in `router.placement.placing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from router.placement.few import MANY, few_of, largest_of
from router.placement.pairs import Pairs, agreeing, largest, pairs_of, passing
from router.placement.placing import LocalReason
from router.placement.ways import Way
from router.workers.load_estimate import Reservation
from router.workers.registry import can_hand_off
from serving.release import Protocol, protocol_of

if TYPE_CHECKING:
    from router.jobs import Demand
    from router.placement.cost import Cost
    from router.settings import LocalPrefill
    from router.workers.link import WorkerLink

SEARCHES: Final = Protocol(1, 1)
"""Workers that speak an earlier protocol know no beam search."""
KEPT_FREE: Final = 16
"""One slot in so many is given to those alone who hold none at the worker."""

Test = Callable[["Demand", "WorkerLink"], bool]


class Route(NamedTuple):
    """The workers of an attempt."""

    prefill: WorkerLink
    decode: WorkerLink | None
    """None if the first token is the last, so that there is nothing to decode."""
    local_reason: LocalReason | None = None
    """The reason for which a decode worker runs the whole job; None if it does not."""
    takeover_tokens: int = 0
    """For a hand-off: the most tokens of the prompt that the decode worker may compute itself, if
    it holds the larger part."""
    way: Way = Way(0.0)
    """How the worker that computes the prompt comes by the first token, by estimate."""

    @property
    def whole(self) -> bool:
        """Whether one worker runs it from prompt to last token."""
        return self.prefill is self.decode


@dataclass(frozen=True, slots=True)
class Failed:
    """The workers that failed a job before."""

    workers: set[WorkerLink] = field(default_factory=set)
    pairs: set[tuple[WorkerLink, WorkerLink]] = field(default_factory=set)
    """Pairs of prefill and decode worker whose hand-off failed. Either of the two may have said
    so."""

    def copy(self) -> Failed:
        """An independent copy."""
        return Failed(set(self.workers), set(self.pairs))


def prefill_reservation(demand: Demand, cached_tokens: int = 0) -> Reservation:
    """The reservation at the worker that computes the prompt, of which so many tokens are cached
    there."""
    return Reservation(prefill_tokens=demand.prompt_tokens - cached_tokens)


def decode_reservation(demand: Demand) -> Reservation:
    """The reservation at the worker that decodes: the prompt's pages, and one more for each choice
    that will need one."""
    size = demand.model.page_size_tokens
    prompt_pages = -(-demand.prompt_tokens // size)
    all_pages = -(-(demand.whole_tokens) // size)
    growth = min(1, all_pages - prompt_pages)
    return Reservation(pages=prompt_pages + growth * demand.choices, sequences=demand.choices)


def largest_pool_tokens(
    demand: Demand, workers: Sequence[WorkerLink], local: LocalPrefill
) -> int | None:
    """Prompt and output tokens that the largest route could ever hold; None without a route."""
    limits, workers = [], largest_of(workers)
    local = "never" if demand.pools else local
    for first, partner in largest(_possible(demand, workers), partial(_pool_tokens, demand)):
        tokens = _pool_tokens(demand, first)
        if partner is None:
            limits.append(tokens + demand.max_tokens)  # The last token needs no KV.
        else:
            limits.append(tokens if demand.prompt_tokens > tokens else partner)
    if local != "never":
        limits += [_pool_tokens(demand, worker) for worker in _decoders(demand, workers, _anyone)]
    return max(limits, default=None)


def can_run(workers: Sequence[WorkerLink], local: LocalPrefill) -> bool:
    """Whether these workers of one model could run a job from prompt to last token. A model that
    only pools needs no decode worker."""
    return any(
        (first.decodes and (first.prefills or local != "never"))
        or (first.only_pools and first.prefills)
        or any(can_hand_off(first, second) for second in workers)
        for first in workers
    )


def choose(
    demand: Demand,
    workers: Sequence[WorkerLink],
    policy: Cost,
    failed: Failed,
    local: LocalPrefill,
) -> Route | None:
    """The route with the smallest finish time among those with capacity now; None if there is none.

    Two kinds of route are the last resort: a prefill worker or pair that failed this job before,
    and a pair that complains of more than a slow path. An attempt there fails at once, and a job
    has few attempts. They are used only if no other pair could run the job now or later, and no
    decode worker could run it alone. A pair with a slow path is used if no other has capacity.

    Of many workers a few are drawn (`router.placement.few`), unless some failed the job before.
    """
    policy.look(demand)
    local = "never" if demand.pools else local
    if len(workers) > MANY and not (failed.workers or failed.pairs):
        workers = few_of(workers, demand, policy.holders(demand), _has_credit, _has_room)
    those = everyone(demand, workers)
    route = _place(demand, workers, those, policy, failed, local)
    if route is None:
        return None
    way = policy.way(demand, route.prefill, those)
    route = route._replace(way=way)
    if route.decode is None or route.whole or local == "never" or demand.prompt_logprobs:
        return route  # Log probabilities of a prompt need every token of it computed.
    tokens = policy.takeover_tokens(demand, way, route.prefill, route.decode, those)
    return route._replace(takeover_tokens=tokens)


def _place(
    demand: Demand,
    workers: Sequence[WorkerLink],
    those: Sequence[WorkerLink],
    policy: Cost,
    failed: Failed,
    local: LocalPrefill,
) -> Route | None:
    """The workers of the route. `those` are of the demand's model."""
    possible = _possible(demand, workers)
    fit = _fit(demand, possible, failed)
    avoid = failed.workers
    if local != "never":
        if not fit:
            if (route := _alone(demand, those, policy, avoid)) is not None:
                return route
            if _decoders(demand, those, _could_hold):
                return None
        elif route := _sooner_alone(demand, those, policy, avoid, list(fit), local):
            return route
    return _usual_route(demand, those, policy, avoid, fit or possible)


def everyone(demand: Demand, workers: Sequence[WorkerLink]) -> list[WorkerLink]:
    """Workers of the demand's model, also those that take no new work. They may hold its pages."""
    return [worker for worker in workers if worker.serves(demand.model)]


def _alone(
    demand: Demand, those: Sequence[WorkerLink], policy: Cost, avoid: Collection[WorkerLink]
) -> Route | None:
    """A decode worker that runs the whole job, since no prefill worker is left."""
    decoders = _decoders(demand, those, _has_both)
    if not decoders:
        return None
    candidates = _preferred(decoders, avoid)
    worker = candidates[policy.prefill(demand, candidates, those)]
    return Route(worker, worker, LocalReason.NO_PREFILL_WORKER)


def _sooner_alone(
    demand: Demand,
    those: Sequence[WorkerLink],
    policy: Cost,
    avoid: Collection[WorkerLink],
    prefills: Sequence[WorkerLink],
    local: LocalPrefill,
) -> Route | None:
    """The decode worker that would have the first token before any prefill worker. Prefill workers
    without credit now are compared, too, since they may have credit later."""
    decoders = _decoders(demand, those, _has_both)
    if not decoders:
        return None
    candidates = _preferred(decoders, avoid)
    if (chosen := policy.local(demand, candidates, prefills, those, local)) is None:
        return None
    index, reason = chosen
    return Route(candidates[index], candidates[index], reason)


def _usual_route(
    demand: Demand,
    those: Sequence[WorkerLink],
    policy: Cost,
    avoid: Collection[WorkerLink],
    possible: Pairs,
) -> Route | None:
    """A prefill worker with its decode worker, or a worker that does both, of the possible ones."""
    pairs = passing(possible, partial(_has_credit, demand), partial(_has_room, demand))
    if not pairs:
        return None
    pairs = agreeing(pairs, lambda worker: worker.complained_of) or pairs
    candidates = _preferred(pairs, avoid)
    first = candidates[policy.prefill(demand, candidates, those)]
    decoders = [partner for partner in pairs[first] if partner is not None]
    if not decoders:
        return Route(first, None)
    candidates = _preferred(decoders, avoid)
    return Route(first, candidates[policy.decode(demand, candidates)])


def _possible(demand: Demand, workers: Sequence[WorkerLink]) -> Pairs:
    """All pairs that serve the demand's model."""
    serving = [worker for worker in workers if _serves(demand, worker)]
    return pairs_of(serving, decodes=demand.decodes)


def _fit(demand: Demand, possible: Pairs, failed: Failed) -> Pairs:
    """Sound pairs that have not failed the job and could run it if they had capacity. A prefill
    worker holds only the prompt."""
    fit = passing(
        possible,
        lambda first: (
            first not in failed.workers and demand.prompt_tokens <= _pool_tokens(demand, first)
        ),
        partial(_could_hold, demand),
    )
    return agreeing(fit, lambda worker: worker.gave_up_on, failed.pairs)


def _decoders(demand: Demand, workers: Sequence[WorkerLink], test: Test) -> list[WorkerLink]:
    """Workers with the role decode that pass the test."""
    return [
        worker
        for worker in workers
        if worker.decodes
        and not worker.prefills
        and _serves(demand, worker)
        and test(demand, worker)
    ]


def _pool_tokens(demand: Demand, worker: WorkerLink) -> int:
    """Tokens of a choice that the empty pool holds. While the pool is unknown, the context
    counts."""
    pages = worker.capacity().total_pages
    return demand.most_tokens(pages) if pages else demand.model.max_context_tokens


def _serves(demand: Demand, worker: WorkerLink) -> bool:
    if worker.draining or not worker.serves(demand.model):
        return False
    if demand.searches and (protocol_of(worker.identity) or SEARCHES) < SEARCHES:
        return False  # It would ignore that, and draw.
    if demand.pools and not worker.pools:
        return False
    return demand.extensions <= worker.extensions


def _anyone(_demand: Demand, _worker: WorkerLink) -> bool:
    return True


def _has_credit(demand: Demand, worker: WorkerLink) -> bool:
    """Whether the worker has any credit. Some is enough, since it can begin a prompt of any
    length."""
    fits = demand.prompt_tokens <= _pool_tokens(demand, worker)
    return fits and worker.capacity().prefill_credit_tokens > 0


def _has_room(demand: Demand, worker: WorkerLink) -> bool:
    """Slots and pages, in a pool that can hold the whole of it.

    The last slots are for those who hold none here, so that nobody waits for a slot until
    somebody else's long answer is over.
    """
    capacity, need = worker.capacity(), decode_reservation(demand)
    free = capacity.free_sequences
    if demand.holder and worker.estimate.held(demand.holder):
        free -= capacity.max_sequences // KEPT_FREE
    if free < min(need.sequences, max(1, capacity.max_sequences)):
        return False
    whole_tokens = demand.whole_tokens
    return need.pages <= capacity.free_pages and whole_tokens <= _pool_tokens(demand, worker)


def _could_hold(demand: Demand, worker: WorkerLink) -> bool:
    """Whether the empty pool could hold the demand."""
    return demand.whole_tokens <= _pool_tokens(demand, worker)


def _has_both(demand: Demand, worker: WorkerLink) -> bool:
    return _has_credit(demand, worker) and _has_room(demand, worker)


def _preferred(
    workers: Iterable[WorkerLink], avoid: Collection[WorkerLink]
) -> Sequence[WorkerLink]:
    everyone = list(workers)
    return [worker for worker in everyone if worker not in avoid] or everyone
