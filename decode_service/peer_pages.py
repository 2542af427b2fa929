"""How many of this worker's pages each peer may write, granted and quarantined together.

Pages under a transfer cannot be taken back, and those in quarantine have no time bound: a peer that
froze with grants in its hand must not sit on the whole pool. So each may hold `limit_pages`; what
is over that waits until the peer has delivered or given back. A single prompt that is longer is
let through while its peer holds nothing else, or it could never be granted. A request that waits
may be passed by smaller ones a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAX_PASSED_OVER: Final = 16
"""As often as the engine lets a request be passed (`engine.bounds`)."""


@dataclass(slots=True, eq=False)
class _Hold:
    request_id: bytes
    peer: str
    pages: int
    passed_over: int = 0
    """By how many that came later, while it waited."""


class PeerPages:
    """Who holds how many pages, and who waits. Names of requests are opaque.

    Invariant: a request is in one of both tables at most, and what a peer holds is over the limit
    only by the one request that it held first.
    """

    def __init__(self, limit_pages: int) -> None:
        self._limit_pages = limit_pages
        self._holds: dict[bytes, _Hold] = {}
        self._held: dict[str, int] = {}
        self._waiting: list[_Hold] = []

    def take(self, request_id: bytes, peer: str, pages: int, *, first: bool = False) -> bool:
        """Whether the request may be granted now; otherwise it waits for `give_back`, before all
        others that wait where `first` is set."""
        hold = _Hold(request_id, peer, pages)
        before = [] if first else self._waiting_for(peer)
        if self._may_pass(hold, before):
            self._keep(hold, before)
            return True
        self._waiting.insert(0 if first else len(self._waiting), hold)
        return False

    def give_back(self, request_id: bytes) -> Iterator[bytes]:
        """The request holds or wants nothing any more; yields those that may be granted now."""
        gone = self._holds.pop(request_id, None)
        if gone is not None:
            self._count(gone.peer, -gone.pages)
        elif (gone := self._wait_of(request_id)) is not None:
            self._waiting.remove(gone)
        before: list[_Hold] = []
        for hold in self._waiting_for(gone.peer) if gone is not None else ():
            if self._may_pass(hold, before):
                self._waiting.remove(hold)
                self._keep(hold, before)
                yield hold.request_id
            else:
                before.append(hold)

    def held_by(self, peer: str) -> int:
        """Pages that the peer may write, or may yet."""
        return self._held.get(peer, 0)

    def _wait_of(self, request_id: bytes) -> _Hold | None:
        return next((one for one in self._waiting if one.request_id == request_id), None)

    def _waiting_for(self, peer: str) -> list[_Hold]:
        return [one for one in self._waiting if one.peer == peer]

    def _may_pass(self, hold: _Hold, before: list[_Hold]) -> bool:
        """Whether it fits, and none of those before it was passed too often."""
        held = self.held_by(hold.peer)
        fits = not held or held + hold.pages <= self._limit_pages
        return fits and all(one.passed_over < MAX_PASSED_OVER for one in before)

    def _keep(self, hold: _Hold, before: list[_Hold]) -> None:
        for one in before:
            one.passed_over += 1
        self._holds[hold.request_id] = hold
        self._count(hold.peer, hold.pages)

    def _count(self, peer: str, pages: int) -> None:
        self._held[peer] = self.held_by(peer) + pages
        if not self._held[peer]:
            del self._held[peer]
