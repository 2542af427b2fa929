"""Policies that choose the workers of a job among those that have capacity for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from router.placement.placing import rate_of_unmeasured, soonest

if TYPE_CHECKING:
    from router.workers.load_estimate import Capacity


class Choosable(Protocol):
    """The parts of a worker that a policy uses."""

    @property
    def worker_id(self) -> str:
        """Its stable name."""
        ...

    def capacity(self) -> Capacity:
        """Its capacity, by the router's estimate."""
        ...


class Policy(Protocol):
    """Chooses a worker and never refuses. There is at least one candidate, and all have
    capacity."""

    name: str

    def prefill(self, candidates: Sequence[Choosable], tokens: int) -> int:
        """Index of the worker that computes a prompt of `tokens` tokens."""
        ...

    def decode(self, candidates: Sequence[Choosable]) -> int:
        """Index of the worker that decodes."""
        ...


class LeastWork:
    """Chooses the worker with the least work.

    Prefill: the worker that finishes the prompt first (`router.placement.placing`).

    Decode: the worker with the least pressure. The pressure is the used share of slots or of pages,
    whichever is larger: a step's time grows with the batch, and pages run out before slots if
    contexts are long. On a tie it is the worker with fewer running sequences.
    """

    name = "least_work"

    def prefill(self, candidates: Sequence[Choosable], tokens: int) -> int:
        """Index of the worker that finishes the prompt first."""
        capacities = [worker.capacity() for worker in candidates]
        return soonest(capacities, tokens, rate_of_unmeasured(capacities))

    def decode(self, candidates: Sequence[Choosable]) -> int:
        """Index of the worker under the least pressure."""
        pressures = [_pressure(worker.capacity()) for worker in candidates]
        return pressures.index(min(pressures))


class RoundRobin:
    """Takes each worker in turn, by name. It ignores load and serves for comparisons."""

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
