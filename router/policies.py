"""Which workers run a job, among those that have room for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from router.ledger import Room


class Choosable(Protocol):
    """A worker, as a policy sees it."""

    @property
    def worker_id(self) -> str:
        """Its stable name."""
        ...

    def room(self) -> Room:
        """What it has, by the router's estimate."""
        ...


class Policy(Protocol):
    """Chooses; never refuses: the candidates, at least one, all have room."""

    name: str

    def prefill(self, candidates: Sequence[Choosable]) -> int:
        """Index of the worker that computes the prompt."""
        ...

    def decode(self, candidates: Sequence[Choosable]) -> int:
        """Index of the worker that decodes."""
        ...


class LeastWork:
    """The worker that gets to the job first.

    Prefill: the shortest queue in seconds: queued tokens over tokens per second. Workers that have
    not measured their rate yet are given the fastest known one, so that a new worker gets work; of
    equals the first. In tokens alone, a slow worker would get as much as a fast one.

    Decode: the emptiest, by whichever of slots and pages is scarcer there. A step's time grows with
    the batch, and pages run out before slots where contexts are long: the larger of the two shares
    is the pressure; of equals the one with fewer running sequences.
    """

    name = "least_work"

    def prefill(self, candidates: Sequence[Choosable]) -> int:
        """Index of the worker with the shortest queue."""
        rooms = [worker.room() for worker in candidates]
        fastest = max(room.prefill_tokens_per_s for room in rooms) or 1.0
        waits_s = [
            room.queued_prefill_tokens / (room.prefill_tokens_per_s or fastest) for room in rooms
        ]
        return waits_s.index(min(waits_s))

    def decode(self, candidates: Sequence[Choosable]) -> int:
        """Index of the worker under the least pressure."""
        pressures = [_pressure(worker.room()) for worker in candidates]
        return pressures.index(min(pressures))


class RoundRobin:
    """Each worker in turn, by name; blind to load, so a measure of what looking at it brings."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = {"prefill": "", "decode": ""}

    def prefill(self, candidates: Sequence[Choosable]) -> int:
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


def _pressure(room: Room) -> tuple[float, int]:
    used_slots = room.running_sequences / max(1, room.max_sequences)
    used_pages = 1 - room.free_pages / max(1, room.total_pages)
    return max(used_slots, used_pages), room.running_sequences
