"""Which workers can run a job, and which of them shall.

A route names one worker for each part: two for a hand-off, the prefill worker alone where one token
is wanted, and the same worker twice where one runs the job whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from baton.worker.v1 import worker_pb2
from router.ledger import Charge
from router.registry import PREFILLS, can_hand_off

if TYPE_CHECKING:
    from router.jobs import Job, ServedModel
    from router.link import WorkerLink
    from router.policies import Policy

Test = Callable[["WorkerLink", "Job"], bool]


class Route(NamedTuple):
    """Who runs an attempt."""

    prefill: WorkerLink
    decode: WorkerLink | None
    """None: nothing to decode, the first token is the last."""

    @property
    def whole(self) -> bool:
        """One worker runs it from prompt to last token."""
        return self.prefill is self.decode


def prefill_charge(job: Job) -> Charge:
    """What the prompt takes of the worker that computes it."""
    return Charge(prefill_tokens=job.prompt_tokens)


def decode_charge(job: Job) -> Charge:
    """What the job takes of the worker that decodes: the prompt's pages, and one more a choice."""
    prompt_pages = -(-job.prompt_tokens // job.model.page_size_tokens)
    return Charge(pages=prompt_pages + job.choices, sequences=job.choices)


def is_servable(job: Job, workers: Sequence[WorkerLink]) -> bool:
    """Whether these workers could run the job if they had room."""
    return any(
        _partners(worker, job, workers, _anyone) for worker in _starters(job, workers, _anyone)
    )


def holds(worker: WorkerLink, model: ServedModel) -> bool:
    """Whether the worker has this model, of this very revision."""
    served = worker.identity.model
    return served.name == model.name and served.revision == model.revision


def can_run(workers: Sequence[WorkerLink]) -> bool:
    """Whether these workers of one model could run a job from prompt to last token."""
    return any(
        first.identity.role == worker_pb2.WORKER_ROLE_BOTH
        or any(can_hand_off(first, second) for second in workers)
        for first in workers
    )


def choose(
    job: Job, workers: Sequence[WorkerLink], policy: Policy, avoid: Collection[WorkerLink]
) -> Route | None:
    """The policy's choice among the workers that have room now; None where there is none.

    A worker to avoid failed this job before: it is taken only where nobody else has room.
    """
    starters: dict[WorkerLink, list[WorkerLink | None]] = {
        worker: partners
        for worker in _starters(job, workers, _has_credit)
        if (partners := _partners(worker, job, workers, _has_room))
    }
    if not starters:
        return None
    candidates = _preferred(starters, avoid)
    first = candidates[policy.prefill(candidates)]
    decoders = [partner for partner in starters[first] if partner is not None]
    if not decoders:
        return Route(first, None)
    candidates = _preferred(decoders, avoid)
    return Route(first, candidates[policy.decode(candidates)])


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


def _serves(worker: WorkerLink, job: Job) -> bool:
    return holds(worker, job.model) and not worker.draining


def _anyone(_worker: WorkerLink, _job: Job) -> bool:
    return True


def _has_credit(worker: WorkerLink, _job: Job) -> bool:
    """Any credit will do: no prompt is so long that a worker could not begin it."""
    return worker.room().prefill_credit_tokens > 0


def _has_room(worker: WorkerLink, job: Job) -> bool:
    """Slots and pages; what no room could ever hold is the worker's to refuse."""
    room, need = worker.room(), decode_charge(job)
    if room.free_sequences < min(need.sequences, max(1, room.max_sequences)):
        return False
    return need.pages <= room.free_pages or need.pages > room.total_pages


def _preferred(
    workers: Iterable[WorkerLink], avoid: Collection[WorkerLink]
) -> Sequence[WorkerLink]:
    everyone = list(workers)
    return [worker for worker in everyone if worker not in avoid] or everyone
