"""Which workers run a job, among those that have room for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from router.placement.placing import rate_of_unmeasured, soonest

if TYPE_CHECKING:
    from router.workers.load_estimate import Capacity


class Choosable(Protocol):
    """A worker, as a policy sees it."""

    @property
    def worker_id(self) -> str:
        """Its stable name."""
        ...

    def capacity(self) -> Capacity:
        """What it has, by the router's estimate."""
        ...


class Policy(Protocol):
    """Chooses; never refuses: the candidates, at least one, all have room."""

    name: str

    def prefill(self, candidates: Sequence[Choosable], tokens: int) -> int:
        """Index of the worker that computes a prompt of so many tokens."""
        ...

    def decode(self, candidates: Sequence[Choosable]) -> int:
        """Index of the worker that decodes."""
        ...


class LeastWork:
    """The worker that gets to the job first.

    Prefill: the one that computes the prompt soonest (`router.placement.placing`).

    Decode: the emptiest, by whichever of slots and pages is scarcer there. A step's time grows with
    the batch, and pages run out before slots where contexts are long: the larger of the two shares
    is the pressure; of equals the one with fewer running sequences.
    """

    name = "least_work"

    def prefill(self, candidates: Sequence[Choosable], tokens: int) -> int:
        """Index of the worker that computes the prompt soonest."""
        capacities = [worker.capacity() for worker in candidates]
        return soonest(capacities, tokens, rate_of_unmeasured(capacities))

    def decode(self, candidates: Sequence[Choosable]) -> int:
        """Index of the worker under the least pressure."""
        pressures = [_pressure(worker.capacity()) for worker in candidates]
        return pressures.index(min(pressures))


class RoundRobin:
    """Each worker in turn, by name; blind to load, so a measure of what looking at it brings."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = {"prefill": "", "decode": ""}

    def prefill(self, candidates: Sequence[Choosable], tokens: int) -> int:
        """Index of the next worker."""
        return self._next("prefill", candidates)

    def decode(self, candidates: Sequence[Choosable]) -> int:
        """Index of the next worker."""
        return self._next("decode", candidates)

    def _next(self, leg: str, candidates: Sequence[Choosable]) -> int:
        names = [worker.worker_id for worker in candidates]
        later = [name for name in names if name > self._last[leg]]
        self._last[leg] = min(later or names)
        return names.index(self._last[leg])


POLICIES: Final[dict[str, type[LeastWork] | type[RoundRobin]]] = {
    kind.name: kind for kind in (LeastWork, RoundRobin)
}


def _pressure(capacity: Capacity) -> tuple[float, int]:
    used_slots = capacity.running_sequences / max(1, capacity.max_sequences)
    used_pages = 1 - capacity.free_pages / max(1, capacity.total_pages)
    return max(used_slots, used_pages), capacity.running_sequences
