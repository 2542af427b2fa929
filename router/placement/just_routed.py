"""What was just routed, and so counts as held.

A worker's events come up to 50 ms late, and a prompt's pages exist only when it is computed. So the
pages of a prompt count as held by the worker that computes it, for `JUST_ROUTED_S` after it was
routed. Siblings of one prompt, such as samples of an agent, thus find each other. A decode worker
that is handed the prompt has its pages when the hand-off is over, and they count from then on: a
sibling that came before would be computed anew. If the pages do not come, the worker computes them:
a wrong guess costs time and never an answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prefixes.keys import ShortKeys

JUST_ROUTED_S: Final = 2.0
"""So long do pages count as held by a worker that computes or got them."""


class JustRouted:
    """The pages of prompts that were just routed, by worker id.

    A key covers all tokens up to its page's end, so whoever gets a page gets all before it. That
    makes the number of leading pages a binary search.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: dict[str, dict[int, float]] = {}
        """For each worker the keys of its pages, and until when they count."""
        self._order: deque[tuple[float, str, list[int]]] = deque()

    def add(self, worker_id: str, keys: ShortKeys) -> None:
        """A worker computes a prompt from now on, or has got it."""
        self._expire()
        if not len(keys):
            return
        until_s, listed = self._clock() + JUST_ROUTED_S, keys.tolist()
        self._until_s.setdefault(worker_id, {}).update(dict.fromkeys(listed, until_s))
        self._order.append((until_s, worker_id, listed))

    def forget(self, worker_id: str, keys: ShortKeys) -> None:
        """An attempt at a prompt failed, or another worker took it over, so its pages may never
        come to the worker. Siblings that share some of them are forgotten as far, too."""
        if known := self._until_s.get(worker_id):
            for key in keys.tolist():
                known.pop(key, None)

    def pages(self, worker_id: str, keys: ShortKeys) -> int:
        """The leading pages of a prompt that were just routed to a worker."""
        self._expire()
        if not (found := self._until_s.get(worker_id)):
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
        while self._order and self._order[0][0] <= now_s:
            until_s, worker_id, keys = self._order.popleft()
            known = self._until_s.get(worker_id, {})
            for key in keys:
                if known.get(key, until_s + 1) <= until_s:
                    del known[key]
            if not known:
                self._until_s.pop(worker_id, None)
