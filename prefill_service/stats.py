"""Stats of a prefill worker's legs: for load reports, metrics and a drain."""

from __future__ import annotations

from prefill_service.leg import PrefillLeg
from worker_base.legs import LegTable
from worker_base.messages import kv_tokens
from worker_base.overdue import Unended


class PrefillStats:
    """Counts the legs afresh at each call. Belongs to the event loop, as the legs do."""

    def __init__(self, legs: LegTable[PrefillLeg]) -> None:
        self._legs = legs

    @property
    def active(self) -> int:
        """Legs under way, quiescing ones included."""
        return len(self._legs)

    @property
    def ungranted_tokens(self) -> int:
        """Tokens of the prompts that wait for a grant."""
        return sum(
            kv_tokens(leg.request)
            for leg in self._legs
            if leg.peer and leg.outgoing.destination is None
        )

    def unended_sends(self) -> list[Unended]:
        """Every leg that waits only for the end of its send."""
        now_s = self._legs.clock()
        return [
            Unended(leg.peer, now_s - leg.sending_s)
            for leg in self._legs
            if leg.sending_s is not None
        ]
