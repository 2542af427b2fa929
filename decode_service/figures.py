"""How the attempts of a decode worker stand: for load reports, metrics and a drain."""

from __future__ import annotations

from collections import Counter

from baton.worker_attempts import Attempts
from baton.worker_overdue import Unended
from decode_service.attempt import DecodeAttempt, DecodeState


class DecodeFigures:
    """Counted anew each time. Belongs to the event loop, as the attempts do."""

    def __init__(self, attempts: Attempts[DecodeAttempt], max_pages_per_peer: int) -> None:
        self._attempts = attempts
        self._max_pages_per_peer = max_pages_per_peer

    @property
    def active(self) -> int:
        """Attempts under way, quarantined ones left out: nobody waits for those."""
        return len(self._attempts) - self.quarantined

    @property
    def quarantined(self) -> int:
        """Attempts whose pages a write may still land in."""
        return len(self._in_quarantine())

    def quarantines(self) -> list[Unended]:
        """Every attempt in quarantine."""
        now_s = self._attempts.clock()
        return [
            Unended(attempt.peer, now_s - attempt.quarantined_s)
            for attempt in self._in_quarantine()
        ]

    def crowding_peers(self) -> list[str]:
        """Peers whose whole share is pages in quarantine: further grants to them would wait."""
        pages: Counter[str] = Counter()
        for attempt in self._in_quarantine():
            pages[attempt.peer] += attempt.num_pages
        return [peer for peer, held in pages.items() if held >= self._max_pages_per_peer]

    def _in_quarantine(self) -> list[DecodeAttempt]:
        return [one for one in self._attempts if one.state is DecodeState.QUARANTINED]
