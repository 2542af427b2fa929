"""How many of this worker's pages each peer may write, granted and quarantined together.

Pages under a transfer cannot be taken back, and those in quarantine have no time bound: a peer that
froze with grants in its hand must not sit on the whole pool. So each may hold `limit_pages`; what
is over that waits until the peer has delivered or given back. A single prompt that is longer is
let through while its peer holds nothing else, or it could never be granted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple


class _Hold(NamedTuple):
    peer: str
    pages: int


class PeerPages:
    """Who holds how many pages, and who waits. Names of requests are opaque.

    Invariant: a request is in one of both tables at most, and what a peer holds is over the limit
    only by the one request that it held first.
    """

    def __init__(self, limit_pages: int) -> None:
        self._limit_pages = limit_pages
        self._holds: dict[bytes, _Hold] = {}
        self._held: dict[str, int] = {}
        self._waiting: deque[tuple[bytes, _Hold]] = deque()

    def take(self, request_id: bytes, peer: str, pages: int, *, first: bool = False) -> bool:
        """Whether the request may be granted now; otherwise it waits for `given_back`, before all
        others that wait where `first` is set."""
        hold = _Hold(peer, pages)
        if self._fits(hold):
            self._keep(request_id, hold)
            return True
        (self._waiting.appendleft if first else self._waiting.append)((request_id, hold))
        return False

    def give_back(self, request_id: bytes) -> Iterator[bytes]:
        """The request holds or wants nothing any more; yields those that may be granted now."""
        hold = self._holds.pop(request_id, None)
        if hold is None:
            self._waiting = deque(entry for entry in self._waiting if entry[0] != request_id)
            return
        self._held[hold.peer] -= hold.pages
        if not self._held[hold.peer]:
            del self._held[hold.peer]
        for entry in [entry for entry in self._waiting if entry[1].peer == hold.peer]:
            if self._fits(entry[1]):
                self._waiting.remove(entry)
                self._keep(*entry)
                yield entry[0]

    def held_by(self, peer: str) -> int:
        """Pages that the peer may write, or may yet."""
        return self._held.get(peer, 0)

    def _fits(self, hold: _Hold) -> bool:
        held = self.held_by(hold.peer)
        return not held or held + hold.pages <= self._limit_pages

    def _keep(self, request_id: bytes, hold: _Hold) -> None:
        self._holds[request_id] = hold
        self._held[hold.peer] = self.held_by(hold.peer) + hold.pages
