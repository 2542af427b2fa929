"""Finds the workers that can run a demand, and chooses among them.

A route names one worker for each leg. A hand-off has two workers. A job for a single token has
the prefill worker alone. If one worker runs the whole job, the route names it twice: it has the
role both, or it is a decode worker for one of the reasons in `router.placement.placing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.worker.v1 import worker_pb2
from router.placement.placing import LocalReason
from router.placement.ways import Way
from router.workers.load_estimate import Reservation
from router.workers.registry import PREFILLS, can_hand_off

if TYPE_CHECKING:
    from router.jobs import Demand, ServedModel
    from router.placement.policies import Policy
    from router.settings import LocalPrefill
    from router.workers.link import WorkerLink

KEPT_FREE: Final = 16
"""One slot in so many is given to those alone who hold none at the worker."""

Test = Callable[["WorkerLink", "Demand"], bool]
Pairs = Mapping["WorkerLink", Sequence["WorkerLink | None"]]
"""The possible second workers for each first worker; None if the job needs no decode."""


class Fetch(NamedTuple):
    """Leading pages of the prompt that another worker holds. The worker that computes the prompt
    gets what it lacks of them from there."""

    holder: WorkerLink
    pages: int


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
    fetch: Fetch | None = None
    """Where the worker that computes the prompt gets pages that it lacks; None: it computes
    them."""
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
    limits = [
        _route_tokens(demand, first, partner)
        for first in _starters(demand, workers, _anyone)
        for partner in _partners(first, demand, workers, _anyone)
    ]
    if local != "never":
        limits += [_pool_tokens(demand, worker) for worker in _decoders(demand, workers, _anyone)]
    return max(limits, default=None)


def holds(worker: WorkerLink, model: ServedModel) -> bool:
    """Whether the worker has this revision of this model."""
    served = worker.identity.model
    return served.name == model.name and served.revision == model.revision


def can_run(workers: Sequence[WorkerLink], local: LocalPrefill) -> bool:
    """Whether these workers of one model could run a job from prompt to last token."""
    return any(
        first.identity.role == worker_pb2.WORKER_ROLE_BOTH
        or (local != "never" and first.identity.role == worker_pb2.WORKER_ROLE_DECODE)
        or any(can_hand_off(first, second) for second in workers)
        for first in workers
    )


def choose(
    demand: Demand,
    workers: Sequence[WorkerLink],
    policy: Policy,
    failed: Failed,
    local: LocalPrefill,
) -> Route | None:
    """The route with the smallest finish time among those with capacity now; None if there is none.

    Two kinds of route are the last resort: a prefill worker or pair that failed this job before,
    and a pair that complains of more than a slow path. An attempt there fails at once, and a job
    has few attempts. They are used only if no other pair could run the job now or later, and no
    decode worker could run it alone. A pair with a slow path is used if no other has capacity.
    """
    policy.look(demand)
    route = _place(demand, workers, policy, failed, local)
    if route is None:
        return None
    way = policy.way(demand, route.prefill, everyone(demand, workers))
    fetch = None if way.holder is None else Fetch(way.holder, way.fetched_pages)
    route = route._replace(way=way, fetch=fetch)
    if route.decode is None or route.whole or local == "never" or demand.prompt_logprobs:
        return route  # Log probabilities of a prompt need every token of it computed.
    tokens = policy.takeover_tokens(demand, way, route.prefill, route.decode)
    return route._replace(takeover_tokens=tokens)


def _place(
    demand: Demand,
    workers: Sequence[WorkerLink],
    policy: Policy,
    failed: Failed,
    local: LocalPrefill,
) -> Route | None:
    """The workers of the route."""
    fit = _fit(demand, workers, failed)
    avoid = failed.workers
    if local != "never":
        if not fit:
            if (route := _alone(demand, workers, policy, avoid)) is not None:
                return route
            if _decoders(demand, workers, _could_hold):
                return None
        elif route := _sooner_alone(demand, workers, policy, avoid, list(fit), local):
            return route
    return _usual_route(demand, workers, policy, avoid, fit)


def everyone(demand: Demand, workers: Sequence[WorkerLink]) -> list[WorkerLink]:
    """Workers of the demand's model, also those that take no new work. They may hold its pages."""
    return [worker for worker in workers if holds(worker, demand.model)]


def _alone(
    demand: Demand, workers: Sequence[WorkerLink], policy: Policy, avoid: Collection[WorkerLink]
) -> Route | None:
    """A decode worker that runs the whole job, since no prefill worker is left."""
    decoders = _decoders(demand, workers, _has_both)
    if not decoders:
        return None
    candidates = _preferred(decoders, avoid)
    worker = candidates[policy.whole(demand, candidates, everyone(demand, workers))]
    return Route(worker, worker, LocalReason.NO_PREFILL_WORKER)


def _sooner_alone(
    demand: Demand,
    workers: Sequence[WorkerLink],
    policy: Policy,
    avoid: Collection[WorkerLink],
    prefills: Sequence[WorkerLink],
    local: LocalPrefill,
) -> Route | None:
    """The decode worker that would have the first token before any prefill worker. Prefill workers
    without credit now are compared, too, since they may have credit later."""
    decoders = _decoders(demand, workers, _has_both)
    if not decoders:
        return None
    candidates = _preferred(decoders, avoid)
    those = everyone(demand, workers)
    if (chosen := policy.local(demand, candidates, prefills, those, local)) is None:
        return None
    index, reason = chosen
    return Route(candidates[index], candidates[index], reason)


def _usual_route(
    demand: Demand,
    workers: Sequence[WorkerLink],
    policy: Policy,
    avoid: Collection[WorkerLink],
    fit: Pairs,
) -> Route | None:
    """A prefill worker with its decode worker, or a worker that does both. It comes from `fit` if
    one of those has capacity."""
    pairs = _pairs(demand, workers, _has_credit, _has_room)
    if fit:
        pairs = _only(pairs, lambda first, partner: partner in fit.get(first, ()))
    if not pairs:
        return None
    pairs = _only(pairs, _is_sound) or pairs
    candidates = _preferred(pairs, avoid)
    first = candidates[policy.prefill(demand, candidates, everyone(demand, workers))]
    decoders = [partner for partner in pairs[first] if partner is not None]
    if not decoders:
        return Route(first, None)
    candidates = _preferred(decoders, avoid)
    return Route(first, candidates[policy.decode(demand, candidates)])


def _fit(demand: Demand, workers: Sequence[WorkerLink], failed: Failed) -> Pairs:
    """Sound pairs that have not failed the job and could run it if they had capacity."""
    tokens = demand.whole_tokens

    def test(first: WorkerLink, partner: WorkerLink | None) -> bool:
        if first in failed.workers or tokens > _route_tokens(demand, first, partner):
            return False
        return partner is None or not (
            (first, partner) in failed.pairs or first.gave_up(partner) or partner.gave_up(first)
        )

    return _only(_pairs(demand, workers, _anyone, _anyone), test)


def _pairs(
    demand: Demand, workers: Sequence[WorkerLink], first_test: Test, partner_test: Test
) -> Pairs:
    """The workers that could begin the demand, and the possible second workers of each."""
    return {
        first: partners
        for first in _starters(demand, workers, first_test)
        if (partners := _partners(first, demand, workers, partner_test))
    }


def _only(pairs: Pairs, test: Callable[[WorkerLink, WorkerLink | None], bool]) -> Pairs:
    """The pairs that pass the test."""
    return {
        first: partners
        for first, everyone in pairs.items()
        if (partners := [partner for partner in everyone if test(first, partner)])
    }


def _decoders(demand: Demand, workers: Sequence[WorkerLink], test: Test) -> list[WorkerLink]:
    """Workers with the role decode that pass the test."""
    return [
        worker
        for worker in workers
        if worker.identity.role == worker_pb2.WORKER_ROLE_DECODE
        and _serves(worker, demand)
        and test(worker, demand)
    ]


def _starters(demand: Demand, workers: Sequence[WorkerLink], test: Test) -> list[WorkerLink]:
    return [
        worker
        for worker in workers
        if worker.identity.role in PREFILLS and _serves(worker, demand) and test(worker, demand)
    ]


def _partners(
    first: WorkerLink, demand: Demand, workers: Sequence[WorkerLink], test: Test
) -> list[WorkerLink | None]:
    """The workers that can decode the prompt of `first`; [None] if the job needs no decode.

    A worker that does both keeps its own prompts, since a hand-off would only cost time.
    """
    if first.identity.role == worker_pb2.WORKER_ROLE_BOTH:
        return [first] if test(first, demand) else []
    if demand.max_tokens == 1:
        return [None]
    return [
        worker
        for worker in workers
        if can_hand_off(first, worker) and _serves(worker, demand) and test(worker, demand)
    ]


def _is_sound(first: WorkerLink, partner: WorkerLink | None) -> bool:
    """Whether neither complains of the other."""
    return partner is None or not (first.avoids(partner) or partner.avoids(first))


def _route_tokens(demand: Demand, first: WorkerLink, partner: WorkerLink | None) -> int:
    """Tokens of a choice that the route can hold. A prefill worker holds only the prompt. Without a
    decode worker the last token needs no KV."""
    first_tokens = _pool_tokens(demand, first)
    if partner is None:
        return first_tokens + 1
    return first_tokens if demand.prompt_tokens > first_tokens else _pool_tokens(demand, partner)


def _pool_tokens(demand: Demand, worker: WorkerLink) -> int:
    """Tokens of a choice that the empty pool holds. While the pool is unknown, the context
    counts."""
    pages = worker.capacity().total_pages
    shared = 2 * (demand.choices - 1)  # Pages in which the choices diverge.
    return (
        (pages - shared) * demand.model.page_size_tokens
        if pages
        else demand.model.max_context_tokens
    )


def _serves(worker: WorkerLink, demand: Demand) -> bool:
    if worker.draining or not holds(worker, demand.model):
        return False
    return demand.extensions <= set(worker.identity.model.extensions)


def _anyone(_worker: WorkerLink, _demand: Demand) -> bool:
    return True


def _has_credit(worker: WorkerLink, demand: Demand) -> bool:
    """Whether the worker has any credit. Some is enough, since it can begin a prompt of any
    length."""
    fits = demand.prompt_tokens <= _pool_tokens(demand, worker)
    return fits and worker.capacity().prefill_credit_tokens > 0


def _has_room(worker: WorkerLink, demand: Demand) -> bool:
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


def _could_hold(worker: WorkerLink, demand: Demand) -> bool:
    """Whether the empty pool could hold the demand."""
    return demand.whole_tokens <= _pool_tokens(demand, worker)


def _has_both(worker: WorkerLink, demand: Demand) -> bool:
    return _has_credit(worker, demand) and _has_room(worker, demand)


def _preferred(
    workers: Iterable[WorkerLink], avoid: Collection[WorkerLink]
) -> Sequence[WorkerLink]:
    everyone = list(workers)
    return [worker for worker in everyone if worker not in avoid] or everyone
