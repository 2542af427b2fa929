"""Who holds how much of a prompt: what workers have reported, and what was just routed.

A worker's events come up to 50 ms late, and a prompt's pages exist only when it is computed. So the
pages of a prompt count as held by its workers for `JUST_ROUTED_S` after it was routed. Siblings of
one prompt, such as samples of an agent, thus find each other. If the pages do not come, the worker
computes them: a wrong guess costs time and never an answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from router.jobs import Demand

JUST_ROUTED_S: Final = 2.0
"""So long do pages count as held by a worker to which their prompt was sent."""


class Held(NamedTuple):
    """The leading pages of a prompt that a worker holds."""

    pool_pages: int = 0
    """In its pool."""
    host_pages: int = 0
    """In its pool or in host memory."""


class Holdings(Protocol):
    """What the workers of a model have reported."""

    def held(self, demand: Demand) -> Mapping[str, Held]:
        """The leading pages of a prompt that each worker holds, by its agent's name. Workers that
        hold none may be missing."""
        ...


class NoHoldings:
    """Nothing is known."""

    def held(self, demand: Demand) -> Mapping[str, Held]:
        """Nothing."""
        return {}


class JustRouted:
    """The pages of prompts that were just routed, by agent name.

    A key covers all tokens up to its page's end, so whoever gets a page gets all before it. That
    makes the number of leading pages a binary search.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: dict[str, dict[int, float]] = {}
        """For each agent the keys of its pages, and until when they count."""
        self._order: deque[tuple[float, str, list[int]]] = deque()

    def add(self, agent_name: str, keys: NDArray[np.uint64]) -> None:
        """A prompt was sent to a worker."""
        self._expire()
        if not len(keys):
            return
        until_s, listed = self._clock() + JUST_ROUTED_S, keys.tolist()
        self._until_s.setdefault(agent_name, {}).update(dict.fromkeys(listed, until_s))
        self._order.append((until_s, agent_name, listed))

    def pages(self, agent_name: str, keys: NDArray[np.uint64]) -> int:
        """The leading pages of a prompt that were just routed to a worker."""
        self._expire()
        if not (found := self._until_s.get(agent_name)):
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
            until_s, agent_name, keys = self._order.popleft()
            known = self._until_s[agent_name]
            for key in keys:
                if known.get(key, until_s + 1) <= until_s:
                    del known[key]
            if not known:
                del self._until_s[agent_name]
