"""Bounds the bytes of this worker that each peer may write, granted and quarantined together.

Pages under a transfer cannot be taken back, and pages in quarantine have no time bound. A peer that
froze with grants in its hand must not sit on the whole pool. So each peer may hold pages of
`limit_bytes`; those of cache groups differ in size. Requests beyond that wait until the peer has
delivered or given pages back. A prompt that is longer than the limit passes while its peer holds
nothing else, or it could never be granted. Smaller requests may pass a waiting one a bounded number
of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAX_PASSED_OVER: Final = 16
"""The engine has the same bound (`engine.bounds`)."""


@dataclass(slots=True, eq=False)
class _Hold:
    request_id: bytes
    peer: str
    size: int
    """Bytes."""
    passed_over: int = 0
    """Requests that came later and were granted while it waited."""


class PeerPages:
    """The pages that each request holds, and the requests that wait. Request ids are opaque.

    Invariants: no request both holds and waits. A peer exceeds the limit only by a single request,
    which it held first.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._holds: dict[bytes, _Hold] = {}
        self._held: dict[str, int] = {}
        self._waiting: list[_Hold] = []

    def take(self, request_id: bytes, peer: str, size: int, *, first: bool = False) -> bool:
        """Takes the pages if the request may be granted now. If not, it waits for `give_back`.

        Args:
            request_id: names the request.
            peer: agent name of the worker that would write.
            size: bytes of all pages that are granted if none is held.
            first: if it has to wait, it waits before all others.

        Returns:
            Whether it may be granted now.
        """
        hold = _Hold(request_id, peer, size)
        before = [] if first else self._waiting_for(peer)
        if self._may_pass(hold, before):
            self._keep(hold, before)
            return True
        self._waiting.insert(0 if first else len(self._waiting), hold)
        return False

    def give_back(self, request_id: bytes) -> Iterator[bytes]:
        """Forgets a request. Yields the requests that may be granted now."""
        gone = self._holds.pop(request_id, None)
        if gone is not None:
            self._count(gone.peer, -gone.size)
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
        """Bytes that the peer may write, or whose writes may still land."""
        return self._held.get(peer, 0)

    def _wait_of(self, request_id: bytes) -> _Hold | None:
        return next((one for one in self._waiting if one.request_id == request_id), None)

    def _waiting_for(self, peer: str) -> list[_Hold]:
        return [one for one in self._waiting if one.peer == peer]

    def _may_pass(self, hold: _Hold, before: list[_Hold]) -> bool:
        """Whether it fits, and no request before it was passed too often."""
        held = self.held_by(hold.peer)
        fits = not held or held + hold.size <= self._limit_bytes
        return fits and all(one.passed_over < MAX_PASSED_OVER for one in before)

    def _keep(self, hold: _Hold, before: list[_Hold]) -> None:
        for one in before:
            one.passed_over += 1
        self._holds[hold.request_id] = hold
        self._count(hold.peer, hold.size)

    def _count(self, peer: str, size: int) -> None:
        self._held[peer] = self.held_by(peer) + size
        if not self._held[peer]:
            del self._held[peer]
