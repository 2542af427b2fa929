"""How long requests wait for a slot of their adapter. It belongs to the step loop's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

FRESH_S: Final = 30.0
"""An average that is older counts as 0. Otherwise routers would keep a worker from adapters that it
does not have, and it could never show a shorter wait."""
_WEIGHT: Final = 0.25
"""Weight of the newest wait in the average; not tuned."""


class SlotWaits:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        """Requests that had to wait, and got a slot."""
        self.seconds = 0.0
        """How long they waited, all together."""
        self._clock = clock
        self._average_s = 0.0
        self._last_s = 0.0
        """When the last one ended."""

    def began(self) -> float:
        """When a wait begins that begins now."""
        return self._clock()

    def ended(self, began_s: float) -> None:
        """A request that began to wait then has a slot."""
        now_s = self._clock()
        waited_s, usual_s = now_s - began_s, self.recent_s()
        self.count += 1
        self.seconds += waited_s
        self._average_s = usual_s + _WEIGHT * (waited_s - usual_s) if usual_s else waited_s
        self._last_s = now_s

    def recent_s(self) -> float:
        """How long such requests wait, on average; 0: none did lately."""
        return self._average_s if self._clock() - self._last_s <= FRESH_S else 0.0
