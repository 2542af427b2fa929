"""Dead peers whose last bytes may still be on their way into this process's pages.

A process that has ended posts nothing more, but what it had posted may not have landed yet: over
TCP up to some MiB of it lie in the kernel's sockets until the progress thread of this process reads
them and writes them where they belong. Seen with NIXL 1.5.1 where this process had been stopped
under a push: up to 48 pages of 90 KiB were written within 13 ms after the writer was proven dead.
So the pages that it was granted stay out of use for far longer than that.

1. `begin`: the process is proven gone.
2. `over`: this process has been awake for `SETTLING_S` since. Time in which it stood still (a
   stopped process, a debugger) does not count: nothing was taken in it.
"""

from __future__ import annotations

from typing import Final

from kv_transfer.tables import Clock

SETTLING_S: Final = 1.0
"""Many times what it took; a dead peer's pages are rarely missed for a second."""
LONGEST_TURN_S: Final = 0.1
"""Most that counts between two looks. The thread looks every 20 ms while it knows any peer."""


class SettlingWrites:
    """Peers that are proven dead, until nothing of them can land any more."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._left_s: dict[str, float] = {}

    @property
    def is_pending(self) -> bool:
        """Whether there is such a peer."""
        return bool(self._left_s)

    def begin(self, agent_name: str) -> None:
        """The process of a peer is proven gone; saying so again changes nothing."""
        if agent_name not in self._left_s:
            self._left_s[agent_name] = SETTLING_S
            self._looked_s = self._clock()

    def over(self) -> list[str]:
        """Peers of which nothing can land any more, each reported once."""
        now_s = self._clock()
        awake_s = min(now_s - self._looked_s, LONGEST_TURN_S)
        self._looked_s = now_s
        if not self._left_s:
            return []
        self._left_s = {name: left_s - awake_s for name, left_s in self._left_s.items()}
        over = [name for name, left_s in self._left_s.items() if left_s <= 0]
        for name in over:
            del self._left_s[name]
        return over
