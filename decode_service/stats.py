"""Stats of a decode worker's legs: for load reports, metrics and a drain."""

from __future__ import annotations

from collections import Counter

from decode_service.leg import DecodeLeg, DecodeState
from worker_base.legs import LegTable
from worker_base.overdue import Unended


class DecodeStats:
    """Counts the legs afresh at each call. Belongs to the event loop, as the legs do."""

    def __init__(self, legs: LegTable[DecodeLeg], max_bytes_per_peer: int) -> None:
        self._legs = legs
        self._max_bytes_per_peer = max_bytes_per_peer

    @property
    def active(self) -> int:
        """Legs under way without those in quarantine, because nobody waits for them."""
        return len(self._legs) - self.quarantined

    @property
    def quarantined(self) -> int:
        """Legs in quarantine: a write may still land in their pages."""
        return len(self._in_quarantine())

    def quarantines(self) -> list[Unended]:
        """Every leg in quarantine."""
        now_s = self._legs.clock()
        return [Unended(leg.peer, now_s - leg.quarantined_s) for leg in self._in_quarantine()]

    def crowding_peers(self) -> list[str]:
        """Peers whose whole share is in quarantine. Further grants to them would wait."""
        sizes: Counter[str] = Counter()
        for leg in self._in_quarantine():
            sizes[leg.peer] += leg.share_bytes
        return [peer for peer, held in sizes.items() if held >= self._max_bytes_per_peer]

    def _in_quarantine(self) -> list[DecodeLeg]:
        return [leg for leg in self._legs if leg.state is DecodeState.QUARANTINED]
