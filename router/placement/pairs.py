"""The pairs of workers that could run a job: the first computes the prompt, its partner decodes.

A hundred workers of each role make 10,000 pairs, and a route is searched for each job, on the event
loop. So nothing here looks at every pair. Prefill workers of one fingerprint share one list of
partners, and each worker is tested once. Only where somebody complains is a list copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.workers.link import WorkerLink

Partners = Sequence["WorkerLink | None"]
Pairs = Mapping["WorkerLink", Partners]
"""The partners of each first worker, at least one; None if the job needs no decode."""
_NOBODY: Final[Partners] = (None,)


def pairs_of(workers: Sequence[WorkerLink], *, decodes: bool) -> Pairs:
    """All pairs. A worker that does both keeps its own prompts, since a hand-off would only cost
    time.

    Args:
        workers: those that serve the job's model.
        decodes: whether the job needs decode.
    """
    decoders: dict[str, list[WorkerLink]] = {}
    for worker in workers:
        if worker.decodes and worker.agent_name:
            decoders.setdefault(worker.fingerprint, []).append(worker)
    found: dict[WorkerLink, Partners] = {}
    for first in workers:
        if first.prefills and first.decodes:
            found[first] = (first,)
        elif first.prefills and not decodes:
            found[first] = _NOBODY
        elif first.prefills and first.agent_name:
            found[first] = decoders.get(first.fingerprint, ())
    return {first: partners for first, partners in found.items() if partners}


def passing(
    pairs: Pairs, first: Callable[[WorkerLink], bool], partner: Callable[[WorkerLink], bool]
) -> Pairs:
    """The pairs whose workers pass these tests."""
    lists = {id(partners): partners for partners in pairs.values()}
    passed = set(filter(partner, {one for each in lists.values() for one in each if one}))
    kept = {
        key: [one for one in partners if one is None or one in passed]
        for key, partners in lists.items()
    }
    return {
        worker: kept[id(partners)]
        for worker, partners in pairs.items()
        if kept[id(partners)] and first(worker)
    }


def agreeing(
    pairs: Pairs,
    against: Callable[[WorkerLink], Set[str]],
    apart: Collection[tuple[WorkerLink, WorkerLink]] = (),
) -> Pairs:
    """The pairs of which neither is against the other.

    Args:
        pairs: of these.
        against: the agent names that a worker is against.
        apart: pairs that are left out, too.
    """
    lists = {id(partners): partners for partners in pairs.values()}
    named = {
        key: frozenset().union(*(against(one) for one in partners if one))
        for key, partners in lists.items()
    }
    names = {key: {one.agent_name for one in partners if one} for key, partners in lists.items()}
    firsts = {first for first, _ in apart}
    found: dict[WorkerLink, Partners] = {}
    for first, partners in pairs.items():
        name, own = first.agent_name, against(first)
        kept = partners
        if (
            not own.isdisjoint(names[id(partners)])
            or name in named[id(partners)]
            or first in firsts
        ):
            kept = [
                one
                for one in partners
                if one is None
                or not (one.agent_name in own or name in against(one) or (first, one) in apart)
            ]
        if kept:
            found[first] = kept
    return found


def largest(
    pairs: Pairs, size: Callable[[WorkerLink], int]
) -> Iterator[tuple[WorkerLink, int | None]]:
    """Each first worker with the largest size among its partners; None if the job needs none."""
    found: dict[int, int | None] = {}
    for first, partners in pairs.items():
        if id(partners) not in found:
            found[id(partners)] = max((size(one) for one in partners if one), default=None)
        yield first, found[id(partners)]
