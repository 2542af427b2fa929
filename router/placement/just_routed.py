"""What was just routed, and so counts as held.

A worker's events come up to 50 ms late, and a prompt's pages exist only when it is computed. So the
pages of a prompt count as held by the worker that computes it, for `JUST_ROUTED_S` after it was
routed. Siblings of one prompt, such as samples of an agent, thus find each other. A decode worker
that is handed the prompt has its pages when the hand-off is over, and they count from then on: a
sibling that came before would be computed anew. If the pages do not come, the worker computes them:
a wrong guess costs time and never an answer.

Prompts share their beginnings, so each prompt at each worker is a *claim* of its own. A page counts
as held as long as any claim covers it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prefixes.keys import ShortKeys
    from router.jobs import Demand

JUST_ROUTED_S: Final = 2.0
"""So long do pages count as held by a worker that computes or got them."""


@dataclass(frozen=True, eq=False)
class _Claim:
    """A prompt that was routed to a worker."""

    worker_id: str
    demand: Demand
    """Kept, so that no other has its identity."""
    keys: list[int]
    until_s: float


class JustRouted:
    """The pages of prompts that were just routed, by worker id.

    A key covers all tokens up to its page's end, so whoever gets a page gets all before it. That
    makes the number of leading pages a binary search.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._claims: dict[tuple[str, int], _Claim] = {}
        """Claims that count, by worker and the demand's identity: siblings' demands are equal."""
        self._counts: dict[str, Counter[int]] = {}
        """For each worker the keys of its pages, and how many claims cover them."""
        self._order: deque[_Claim] = deque()
        """Until when claims count. Some may have been forgotten or renewed since."""

    def add(self, worker_id: str, demand: Demand) -> None:
        """A worker computes a prompt from now on, or has got it."""
        self._expire()
        if not len(demand.keys):
            return
        self.forget(worker_id, demand)
        claim = _Claim(worker_id, demand, demand.keys.tolist(), self._clock() + JUST_ROUTED_S)
        self._claims[worker_id, id(demand)] = claim
        self._counts.setdefault(worker_id, Counter()).update(claim.keys)
        self._order.append(claim)

    def forget(self, worker_id: str, demand: Demand) -> None:
        """The pages of a prompt may never come to the worker: an attempt failed or was left, or
        another worker took the prompt over. Those that a sibling computes count on."""
        if (claim := self._claims.pop((worker_id, id(demand)), None)) is None:
            return
        counts = self._counts[worker_id]
        for key in claim.keys:
            if counts[key] > 1:
                counts[key] -= 1
            else:
                counts.pop(key)  # Faster than `del`, which a Counter has of its own.
        if not counts:
            del self._counts[worker_id]

    def holders(self, keys: ShortKeys) -> list[str]:
        """Names of the workers to which the first page of a prompt was just routed."""
        self._expire()
        first = int(keys[0])
        return [name for name, found in self._counts.items() if first in found]

    def pages(self, worker_id: str, keys: ShortKeys) -> int:
        """The leading pages of a prompt that were just routed to a worker."""
        self._expire()
        if not (found := self._counts.get(worker_id)):
            return 0
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if int(keys[middle - 1]) in found:
                low = middle
            else:
                high = middle - 1
        return low

    def _expire(self) -> None:
        now_s = self._clock()
        while self._order and self._order[0].until_s <= now_s:
            claim = self._order.popleft()
            if self._claims.get((claim.worker_id, id(claim.demand))) is claim:
                self.forget(claim.worker_id, claim.demand)
