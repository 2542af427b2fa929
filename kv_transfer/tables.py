"""Small tables of the state machines: what is over, what is due, and what may soon be complete."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Clock = Callable[[], float]
"""Monotonic seconds."""
REMEMBERED: Final = 64
"""Transfers whose fastest says when the next ones may be complete. Not tuned."""
EARLY: Final = 0.8
"""Part of that time after which the thread looks often: the next one may be a little faster. Not
tuned."""
ACTIVE_POLL_S: Final = 200e-6
"""Between looks while a transfer may be complete or a push is open: a small part of a hand-off."""
RARE_POLL_S: Final = 2e-3
"""Between looks before: what a transfer loses that is faster than all before. Not tuned."""
GROUP_S: Final = 3e-3
"""Prompts that a peer computes in one step end within this time, as long as fresh pushes take
(`kv_transfer.exchange.FRESH_S`). It says nothing about their pace."""


class BoundedMemory(Generic[K, V]):
    """Remembers a key at least until it is `age_s` old or `entries` others came after it.

    Two generations, the young one for new keys: when it is full or old, the other is dropped whole
    and it takes its place. So an entry needs no time and no order of its own: 90 bytes for an id,
    nothing for the garbage collector to walk, and never more than `2 * entries` of them.

    Forgetting is safe only once nobody can still ask, so both bounds are chosen far above the
    longest life of a request.
    """

    def __init__(self, entries: int, age_s: float, clock: Clock) -> None:
        self._entries = entries
        self._age_s = age_s
        self._clock = clock
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}
        self._began_s = clock()
        """When the young generation did."""

    def add(self, key: K, value: V) -> None:
        """Remembers a key from now on, with a new value where it is known."""
        self._turn()
        self._young[key] = value

    def get(self, key: K) -> V | None:
        """The value of a key, or None where it is not remembered."""
        self._turn()
        return self._young[key] if key in self._young else self._old.get(key)

    def __contains__(self, key: K) -> bool:
        self._turn()
        return key in self._young or key in self._old

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def _turn(self) -> None:
        """Begins a generation where it is time."""
        now_s = self._clock()
        age_s = now_s - self._began_s
        if len(self._young) < self._entries and age_s < self._age_s:
            return
        # None was added to the young one after it was `age_s` old.
        self._old = self._young if age_s < 2 * self._age_s else {}
        self._young, self._began_s = {}, now_s


class Timers:
    """Keys to look at again, each at a time; setting one twice means two looks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, bytes]] = []

    def set(self, key: bytes, after_s: float) -> None:
        """Asks for a look at `key` in `after_s` seconds."""
        heapq.heappush(self._heap, (self._clock() + after_s, key))

    def pop_due(self) -> list[bytes]:
        """Keys whose time has come."""
        now_s = self._clock()
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap)[1])
        return due

    def next_after_s(self) -> float | None:
        """Seconds until the next look, or None."""
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None


@dataclass(slots=True)
class _Awaited:
    """What a peer is to write."""

    since_s: float
    """Its last end, or the first grant since then."""
    pages: dict[bytes, int] = field(default_factory=dict)
    """By transfer."""


class EarliestEnds:
    """The transfers that are waited for, and when one may be complete at the earliest.

    A peer writes a prompt's pages once it has computed them. Nothing wakes this process when
    they have landed: its thread has to look, and each look takes the interpreter from the step
    loop and the event loop. A peer computes one prompt after the other, or several as fast
    together. So none is complete before the time that the fastest of the last transfers took a
    page, counted from the grant or from its peer's last end. Until shortly before, the thread
    looks rarely.

    A peer with a prompt's pages in its cache is faster. The first time this is seen
    `RARE_POLL_S` late at most, and then it is the fastest transfer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._awaited: dict[str, _Awaited] = {}
        """By peer."""
        self._page_s: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds that a page of each of the last transfers took."""

    def __len__(self) -> int:
        return sum(len(one.pages) for one in self._awaited.values())

    def expect(self, peer: str, transfer_id: bytes, pages: int) -> None:
        """The peer may write so many pages from now on. 0: it computes nothing first, as in a
        fetch."""
        if peer not in self._awaited:
            self._awaited[peer] = _Awaited(self._clock())
        self._awaited[peer].pages[transfer_id] = pages

    def ended(self, peer: str, transfer_id: bytes, *, complete: bool) -> None:
        """Nobody waits for the transfer any more. `complete`: all of its pages have landed."""
        awaited = self._awaited[peer]
        pages = awaited.pages.pop(transfer_id)
        if complete and pages:
            took_s = self._clock() - awaited.since_s
            if took_s > GROUP_S:
                self._page_s.append(took_s / pages)
            awaited.since_s += took_s
        if not awaited.pages:
            del self._awaited[peer]

    def pause_s(self) -> float | None:
        """Longest time to the next look; None: nothing is waited for."""
        if not self._awaited:
            return None
        now_s, page_s = self._clock(), EARLY * min(self._page_s, default=0.0)
        if any(now_s < one.since_s + GROUP_S for one in self._awaited.values()):
            return ACTIVE_POLL_S
        due_s = min(
            one.since_s + page_s * min(one.pages.values()) for one in self._awaited.values()
        )
        return min(max(due_s - now_s, ACTIVE_POLL_S), RARE_POLL_S)
