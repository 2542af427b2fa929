"""A few of many workers, so that a choice among a thousand takes no longer than one among some.

To compare every worker's ways to the first token takes 35 us a worker. So eight workers with
capacity are taken of each role, from a drawn place on. Those that hold most of the prompt are
looked at as well, wherever they are, and some that have its adapter in a slot.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from router.placement.adapters import is_in_slot

if TYPE_CHECKING:
    from router.jobs import Demand, ServedModel
    from router.workers.link import WorkerLink

    Test = Callable[[Demand, WorkerLink], bool]

MANY: Final = 64
"""More workers than this are drawn from. A cell has no more (docs/cells.md)."""
DRAWN: Final = 8
"""Workers with capacity of each role."""
FULL_DRAWN: Final = 2
"""Workers without, of each role. They say whether waiting helps."""
FREE: Final = True
"""Index of the count of workers with capacity."""


def few_of(
    workers: Sequence[WorkerLink],
    demand: Demand,
    holders: Iterable[str],
    has_credit: Test,
    has_room: Test,
) -> list[WorkerLink]:
    """Workers of a demand's model to choose among, in their order.

    Args:
        workers: all.
        demand: what is to run.
        holders: names of workers that hold pages of its prompt.
        has_credit: whether a worker could begin the prompt now.
        has_room: whether it could decode now.
    """
    names = frozenset(holders)
    found = [one for one in workers if one.worker_id in names] if names else []
    firsts, seconds = [0, 0], [0, 0]
    start = random.randrange(len(workers))
    turned = (*workers[start:], *workers[:start])
    if demand.model.digest:
        found += _with_adapter(turned, demand.model)
    for worker in turned:
        if not worker.serves(demand.model):
            continue
        capacity = worker.capacity()
        if worker.prefills and firsts[FREE] < DRAWN:
            counts = firsts
            may = capacity.prefill_credit_tokens > 0 and has_credit(demand, worker)
        elif worker.decodes and seconds[FREE] < DRAWN:
            counts = seconds
            may = capacity.free_sequences > 0 and has_room(demand, worker)
        elif firsts[FREE] >= DRAWN and seconds[FREE] >= DRAWN:
            break
        else:
            continue
        if counts[may] < (DRAWN if may else FULL_DRAWN) and not worker.draining:
            counts[may] += 1
            found.append(worker)
    return sorted(set(found), key=lambda one: one.worker_id)


def _with_adapter(workers: Iterable[WorkerLink], model: ServedModel) -> list[WorkerLink]:
    """The first DRAWN workers of each role that have a model's adapter in a slot."""
    firsts: list[WorkerLink] = []
    seconds: list[WorkerLink] = []
    for worker in workers:
        if not is_in_slot(worker, model.digest) or not worker.serves(model):
            continue
        if worker.prefills and len(firsts) < DRAWN:
            firsts.append(worker)
        elif worker.decodes and len(seconds) < DRAWN:
            seconds.append(worker)
        elif len(firsts) >= DRAWN and len(seconds) >= DRAWN:
            break
    return firsts + seconds


def largest_of(workers: Iterable[WorkerLink]) -> list[WorkerLink]:
    """The workers with the largest pools among those that are alike in all else."""
    found: dict[object, tuple[float, WorkerLink]] = {}
    for worker in workers:
        kind, pages = worker.kind, worker.capacity().total_pages or math.inf
        if kind not in found or pages > found[kind][0]:
            found[kind] = pages, worker
    return [worker for _, worker in found.values()]
