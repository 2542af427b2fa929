"""Which workers can run a job, and which of them shall.

A route names one worker for each part: two for a hand-off, the prefill worker alone where one token
is wanted, and the same worker twice where one runs the job whole: one that does both, or a decode
worker for one of the reasons in `router.local_prefill`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from baton.worker.v1 import worker_pb2
from router.ledger import Charge, Room
from router.local_prefill import (
    LocalPrefill,
    LocalReason,
    break_even_tokens,
)
from router.registry import PREFILLS, can_hand_off

if TYPE_CHECKING:
    from router.jobs import Job, ServedModel
    from router.link import WorkerLink
    from router.policies import Policy

Test = Callable[["WorkerLink", "Job"], bool]
Pairs = Mapping["WorkerLink", Sequence["WorkerLink | None"]]
"""By who begins, with whom: None where nobody has to decode."""


class Route(NamedTuple):
    """Who runs an attempt."""

    prefill: WorkerLink
    decode: WorkerLink | None
    """None: nothing to decode, the first token is the last."""
    local_reason: LocalReason | None = None
    """Why a decode worker runs it whole; None where it does not."""
    local_tokens: int = 0
    """Where it is handed off: longest rest of the prompt that the decode worker may compute."""

    @property
    def whole(self) -> bool:
        """One worker runs it from prompt to last token."""
        return self.prefill is self.decode


@dataclass(frozen=True, slots=True)
class Failed:
    """Who failed a job before."""

    workers: set[WorkerLink] = field(default_factory=set)
    pairs: set[tuple[WorkerLink, WorkerLink]] = field(default_factory=set)
    """Prefill and decode worker that could not hand it off, whichever of the two said so."""

    def copy(self) -> Failed:
        """One that goes on by itself."""
        return Failed(set(self.workers), set(self.pairs))


def prefill_charge(job: Job) -> Charge:
    """What the prompt takes of the worker that computes it."""
    return Charge(prefill_tokens=job.prompt_tokens)


def decode_charge(job: Job) -> Charge:
    """What the job takes of the worker that decodes: the prompt's pages, and one more for each
    choice that will need one."""
    size = job.model.page_size_tokens
    prompt_pages = -(-job.prompt_tokens // size)
    all_pages = -(-(job.prompt_tokens + job.stopping.max_tokens) // size)
    growth = min(1, all_pages - prompt_pages)
    return Charge(pages=prompt_pages + growth * job.choices, sequences=job.choices)


def largest_pool_tokens(job: Job, workers: Sequence[WorkerLink], local: LocalPrefill) -> int | None:
    """Prompt and output tokens that the roomiest route could ever hold; None without a route."""
    limits = [
        _route_tokens(job, first, partner)
        for first in _starters(job, workers, _anyone)
        for partner in _partners(first, job, workers, _anyone)
    ]
    if local.allowed:
        limits += [_pool_tokens(job, worker) for worker in _decoders(job, workers, _anyone)]
    return max(limits, default=None)


def holds(worker: WorkerLink, model: ServedModel) -> bool:
    """Whether the worker has this model, of this very revision."""
    served = worker.identity.model
    return served.name == model.name and served.revision == model.revision


def can_run(workers: Sequence[WorkerLink], local: LocalPrefill) -> bool:
    """Whether these workers of one model could run a job from prompt to last token."""
    return any(
        first.identity.role == worker_pb2.WORKER_ROLE_BOTH
        or (local.allowed and first.identity.role == worker_pb2.WORKER_ROLE_DECODE)
        or any(can_hand_off(first, second) for second in workers)
        for first in workers
    )


def choose(
    job: Job,
    workers: Sequence[WorkerLink],
    policy: Policy,
    failed: Failed,
    local: LocalPrefill,
) -> Route | None:
    """The policy's choice among the workers that have room now; None where there is none.

    A prefill worker or a pair that failed this job before is taken, like a pair that complains of
    more than a slow path, only where no other could run the job, not even later, and no decode
    worker by itself: an attempt there fails at once, and there are not many. A pair whose path is
    slow is taken where no other has room.
    """
    fit = _fit(job, workers, failed)
    avoid = failed.workers
    if local.allowed:
        route = _local_route(job, workers, policy, avoid, local, list(fit))
        if route is not None:
            return route
        if not fit and _decoders(job, workers, _could_hold):
            return None
    route = _usual_route(job, workers, policy, avoid, fit)
    if route is None or route.decode is None or route.whole:
        return route
    return route._replace(local_tokens=_rest_tokens(job, route, local))


def _local_route(
    job: Job,
    workers: Sequence[WorkerLink],
    policy: Policy,
    avoid: Collection[WorkerLink],
    local: LocalPrefill,
    prefills: Sequence[WorkerLink],
) -> Route | None:
    """A decode worker that runs the job whole, where there is a reason for that."""
    if prefills and not local.weighs_queues:
        return None
    candidates: Sequence[WorkerLink] = _decoders(job, workers, _has_both)
    reason = LocalReason.NO_PREFILL_WORKER
    if prefills:
        rooms = [worker.room() for worker in prefills]
        reason, candidates = _sooner_alone(job, rooms, candidates)
    if not candidates:
        return None
    candidates = _preferred(candidates, avoid)
    worker = candidates[policy.decode(candidates)]
    return Route(worker, worker, reason)


def _sooner_alone(
    job: Job,
    prefills: Sequence[Room],
    decoders: Sequence[WorkerLink],
) -> tuple[LocalReason, Sequence[WorkerLink]]:
    """Those by which a prompt is sooner computed than by any prefill worker, and why."""
    tokens = job.prompt_tokens
    sooner = [one for one in decoders if tokens <= break_even_tokens(prefills, one.room())]
    return LocalReason.FASTER, sooner


def _rest_tokens(job: Job, route: Route, local: LocalPrefill) -> int:
    """How much of the prompt the decode worker may compute where it holds the larger part. Nothing
    where log probabilities of the whole prompt are wanted: those need every token computed."""
    if not local.allowed or job.prompt_logprobs or route.decode is None:
        return 0
    if not local.weighs_queues:
        return local.rest_tokens
    sooner = break_even_tokens([route.prefill.room()], route.decode.room())
    return max(local.rest_tokens, sooner)


def _usual_route(
    job: Job,
    workers: Sequence[WorkerLink],
    policy: Policy,
    avoid: Collection[WorkerLink],
    fit: Pairs,
) -> Route | None:
    """A prefill worker and its partner, or one that does both; of those that fit, if any do."""
    pairs = _pairs(job, workers, _has_credit, _has_room)
    if fit:
        pairs = _only(pairs, lambda first, partner: partner in fit.get(first, ()))
    if not pairs:
        return None
    pairs = _only(pairs, _is_sound) or pairs
    candidates = _preferred(pairs, avoid)
    first = candidates[policy.prefill(candidates)]
    decoders = [partner for partner in pairs[first] if partner is not None]
    if not decoders:
        return Route(first, None)
    candidates = _preferred(decoders, avoid)
    return Route(first, candidates[policy.decode(candidates)])


def _fit(job: Job, workers: Sequence[WorkerLink], failed: Failed) -> Pairs:
    """Pairs that could run the job if they had room, and that nothing speaks against."""
    tokens = job.prompt_tokens + job.stopping.max_tokens

    def test(first: WorkerLink, partner: WorkerLink | None) -> bool:
        if first in failed.workers or tokens > _route_tokens(job, first, partner):
            return False
        return partner is None or not (
            (first, partner) in failed.pairs or first.gave_up(partner) or partner.gave_up(first)
        )

    return _only(_pairs(job, workers, _anyone, _anyone), test)


def _pairs(job: Job, workers: Sequence[WorkerLink], first_test: Test, partner_test: Test) -> Pairs:
    """Who could begin the job, and with whom each."""
    return {
        first: partners
        for first in _starters(job, workers, first_test)
        if (partners := _partners(first, job, workers, partner_test))
    }


def _only(pairs: Pairs, test: Callable[[WorkerLink, WorkerLink | None], bool]) -> Pairs:
    """The pairs that pass."""
    return {
        first: partners
        for first, everyone in pairs.items()
        if (partners := [partner for partner in everyone if test(first, partner)])
    }


def _decoders(job: Job, workers: Sequence[WorkerLink], test: Test) -> list[WorkerLink]:
    """Workers that decode and do nothing else, as long as they are let."""
    return [
        worker
        for worker in workers
        if worker.identity.role == worker_pb2.WORKER_ROLE_DECODE
        and _serves(worker, job)
        and test(worker, job)
    ]


def _starters(job: Job, workers: Sequence[WorkerLink], test: Test) -> list[WorkerLink]:
    return [
        worker
        for worker in workers
        if worker.identity.role in PREFILLS and _serves(worker, job) and test(worker, job)
    ]


def _partners(
    first: WorkerLink, job: Job, workers: Sequence[WorkerLink], test: Test
) -> list[WorkerLink | None]:
    """Who can decode what `first` computed; [None] where nobody has to.

    A worker that does both keeps its own: a hand-off would only cost.
    """
    if first.identity.role == worker_pb2.WORKER_ROLE_BOTH:
        return [first] if test(first, job) else []
    if job.stopping.max_tokens == 1:
        return [None]
    return [
        worker
        for worker in workers
        if can_hand_off(first, worker) and _serves(worker, job) and test(worker, job)
    ]


def _is_sound(first: WorkerLink, partner: WorkerLink | None) -> bool:
    """Whether neither complains of the other."""
    return partner is None or not (first.avoids(partner) or partner.avoids(first))


def _route_tokens(job: Job, first: WorkerLink, partner: WorkerLink | None) -> int:
    """A prefill worker holds the prompt alone; a last token has no KV where nobody decodes."""
    first_tokens = _pool_tokens(job, first)
    if partner is None:
        return first_tokens + 1
    return first_tokens if job.prompt_tokens > first_tokens else _pool_tokens(job, partner)


def _pool_tokens(job: Job, worker: WorkerLink) -> int:
    """Tokens of a choice that the empty pool holds; what the context holds while it is unknown."""
    pages = worker.room().total_pages
    shared = 2 * (job.choices - 1)  # Pages in which choices begin to differ.
    return (pages - shared) * job.model.page_size_tokens if pages else job.model.max_context_tokens


def _serves(worker: WorkerLink, job: Job) -> bool:
    return holds(worker, job.model) and not worker.draining


def _anyone(_worker: WorkerLink, _job: Job) -> bool:
    return True


def _has_credit(worker: WorkerLink, job: Job) -> bool:
    """Any credit will do: no prompt is so long that a worker could not begin it."""
    fits = job.prompt_tokens <= _pool_tokens(job, worker)
    return fits and worker.room().prefill_credit_tokens > 0


def _has_room(worker: WorkerLink, job: Job) -> bool:
    """Slots and pages, in a pool that can hold the whole of it."""
    room, need = worker.room(), decode_charge(job)
    if room.free_sequences < min(need.sequences, max(1, room.max_sequences)):
        return False
    whole_tokens = job.prompt_tokens + job.stopping.max_tokens
    return need.pages <= room.free_pages and whole_tokens <= _pool_tokens(job, worker)


def _could_hold(worker: WorkerLink, job: Job) -> bool:
    """In a pool that is empty."""
    return job.prompt_tokens + job.stopping.max_tokens <= _pool_tokens(job, worker)


def _has_both(worker: WorkerLink, job: Job) -> bool:
    return _has_credit(worker, job) and _has_room(worker, job)


def _preferred(
    workers: Iterable[WorkerLink], avoid: Collection[WorkerLink]
) -> Sequence[WorkerLink]:
    everyone = list(workers)
    return [worker for worker in everyone if worker not in avoid] or everyone
