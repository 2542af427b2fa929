"""Fetches, as the owner of an engine asks for them (`engine.tiers.peers`). Any thread may call."""

from __future__ import annotations

from collections.abc import Sequence

from engine.loop.step_loop import StepLoop
from engine.schedule.scheduler import Scheduler
from engine.tiers.peers import AskPeer, ReportHeld


class FetchPort:
    """Passes calls on to the step loop's thread."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop

    def fetch_by(self, ask: AskPeer) -> None:
        """Sets who makes fetches. Without that, no request waits for a peer."""
        self._loop.post(lambda scheduler: scheduler.fetches.fetch_by(ask))

    def fetched(self, fetch_id: bytes, landed_pages: int, *, others: bool = False) -> None:
        """Ends a fetch: its first pages of group 0 are there, and all of the `others` or none. The
        rest is computed."""
        self._loop.post(
            lambda scheduler: scheduler.fetches.fetched(fetch_id, landed_pages, others=others)
        )

    def freed(self, fetch_id: bytes) -> None:
        """After `fetched`: nothing can land any more in the pages that did not come."""
        self._loop.post(lambda scheduler: scheduler.fetches.freed(fetch_id))

    def hold(self, hold_id: bytes, keys: Sequence[Sequence[bytes]], report: ReportHeld) -> None:
        """Holds the leading keys of each group that are here, once they are in the pool, and
        reports their pages. See `Fetches.hold`."""

        def hold(scheduler: Scheduler) -> None:
            rooms = scheduler.admission.rooms_for_peers(len(keys[0]))
            scheduler.fetches.hold(hold_id, keys, rooms, report)

        self._loop.post(hold)

    def let_go(self, hold_id: bytes) -> None:
        """Ends a hold: nothing reads its pages any more."""
        self._loop.post(lambda scheduler: scheduler.fetches.let_go(hold_id))
