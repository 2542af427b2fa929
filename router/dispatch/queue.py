"""The admission queue: jobs that wait for a worker with room, each taken in its turn.

Life of an entry: pushed (or refused at once) -> taken, or removed by its owner. Each model has a
queue of its own, so that a busy model holds up nobody else's requests. In the queue of a model,

1. work that was begun before goes first;
2. then the tenant that was given least goes first, counted in tokens (`_Tenants`);
3. in a tenant's line, calls take turns (`_Line`). A call has one place in the line, for its first
   job. As that one is taken, the call goes to the end of the line with the next one. So a call of
   256 prompts holds up another call by one prompt.

Where nobody is asked for a token, addresses take the place of tenants, and connections that of
calls. So a client with 200 streams holds up another one by one stream.

Places in a line are in the order of arrival. One level of priority is worth `AGEING` places, so
that nobody waits for ever: the same rule as the workers' (`engine.schedule.policies`).
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

from router import errors
from router.dispatch.pace import Pace

if TYPE_CHECKING:
    from router.jobs import Demand

MIN_RETRY_AFTER_S: Final = 0.5
MAX_RETRY_AFTER_S: Final = 60.0
UNMEASURED_RETRY_AFTER_S: Final = 1.0
"""Wait that a router names which has not measured its pace yet: it is likely to have started just
now."""
MOST_REMEMBERED: Final = 1024
"""Tenants and addresses whose count is kept while nothing of theirs waits."""
AGEING: Final = 64
"""Places in a line that one level of priority is worth."""


class Waiting(Protocol):
    """An entry of the queue."""

    @property
    def model(self) -> str:
        """The model it needs."""
        ...

    @property
    def tenant(self) -> str:
        """Whose turn it takes: a tenant, or an address."""
        ...

    @property
    def call(self) -> str:
        """The call that it belongs to, or the connection."""
        ...

    @property
    def demand(self) -> Demand:
        """What it asks of workers."""
        ...

    @property
    def priority(self) -> int:
        """Larger goes first."""
        ...

    @property
    def is_resumed(self) -> bool:
        """It was begun before."""
        ...


Entry = TypeVar("Entry", bound=Waiting)


class _Job(NamedTuple, Generic[Entry]):
    entry: Entry
    work: int
    """As it was expected when it came, tokens."""


class _Place(NamedTuple, Generic[Entry]):
    rank: int
    """Smaller goes first."""
    job: _Job[Entry]


class _Line(Generic[Entry]):
    """What waits for one tenant, calls in turns.

    Invariant: of every call that waits, the first job and no other has a place, sorted by rank.
    """

    def __init__(self) -> None:
        self._places: list[_Place[Entry]] = []
        self._behind: dict[str, deque[_Job[Entry]]] = {}
        """By call: the jobs behind its first."""
        self._tickets = 0
        self.work = 0
        """Tokens of all that waits here."""
        self._first_work = 0
        """Tokens of the jobs that have a place."""

    def __bool__(self) -> bool:
        return bool(self._places)

    def first(self, test: Callable[[Entry], bool]) -> Entry | None:
        """The first that has a place and passes a test."""
        entries = (place.job.entry for place in self._places)
        return next((entry for entry in entries if test(entry)), None)

    def add(self, entry: Entry, work: int) -> None:
        """Adds an entry: at the end, or behind others of its call."""
        self.work += work
        if (behind := self._behind.get(entry.call)) is not None:
            behind.append(_Job(entry, work))
        else:
            self._behind[entry.call] = deque()
            self._give_place(_Job(entry, work))

    def remove(self, entry: Entry, work: int) -> None:
        """Removes an entry that is there; its call goes to the end of the line."""
        self.work -= work
        behind = self._behind[entry.call]
        if (job := _Job(entry, work)) in behind:
            behind.remove(job)
            return
        self._first_work -= work
        self._places = [place for place in self._places if place.job.entry is not entry]
        if behind:
            self._give_place(behind.popleft())
        else:
            del self._behind[entry.call]

    def ahead(self, entry: Entry) -> int:
        """Work that goes before an entry that comes now."""
        if entry.call in self._behind:
            return self.work
        if entry.priority <= 0:
            return self._first_work
        rank = self._tickets + 1 - AGEING * entry.priority
        return sum(place.job.work for place in self._places if place.rank < rank)

    def _give_place(self, job: _Job[Entry]) -> None:
        self._tickets += 1
        self._first_work += job.work
        place = _Place(self._tickets - AGEING * job.entry.priority, job)
        bisect.insort(self._places, place, key=lambda one: one.rank)


class _Tenants(Generic[Entry]):
    """Lines of the tenants of one model. The tenant that was given least work goes first.

    This is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al.,
    OSDI 2024), with the work that is expected of a job in place of what it has cost so far. A
    tenant that comes back gets nothing for the time it was away: its counter is lifted to that of
    the tenant served last.
    """

    def __init__(self) -> None:
        self.lines: dict[str, _Line[Entry]] = {}
        """Lines of tenants with something waiting."""
        self._given: dict[str, int] = {}
        """By tenant, tokens."""
        self._floor = 0

    def order(self) -> list[_Line[Entry]]:
        """Lines by whose turn it is."""
        return [self.lines[name] for name in sorted(self.lines, key=self._given.__getitem__)]

    def add(self, entry: Entry, work: int) -> None:
        """Adds an entry to its tenant's line."""
        if entry.tenant not in self.lines:
            self._forget_some()
            self.lines[entry.tenant] = _Line()
            self._given[entry.tenant] = max(self._given.get(entry.tenant, 0), self._floor)
        self.lines[entry.tenant].add(entry, work)

    def remove(self, entry: Entry, work: int) -> None:
        """Removes an entry that is there."""
        line = self.lines[entry.tenant]
        line.remove(entry, work)
        if not line:
            del self.lines[entry.tenant]

    def taken(self, entry: Entry, work: int) -> None:
        """Counts what a tenant is given."""
        self._floor = self._given[entry.tenant]
        self._given[entry.tenant] += work

    def _forget_some(self) -> None:
        """Forgets those who would be lifted anyway; and all who are away, if those are too many."""
        if len(self._given) < MOST_REMEMBERED:
            return
        for least in (self._floor, math.inf):
            self._given = {
                name: given
                for name, given in self._given.items()
                if name in self.lines or given > least
            }
            if len(self._given) < MOST_REMEMBERED:
                return

    def ahead(self, entry: Entry, work: int) -> int:
        """Work that goes before an entry that comes now: what does in its own tenant's line, and
        of each other tenant as much as the own one is given until then."""
        line = self.lines.get(entry.tenant)
        own = line.ahead(entry) if line else 0
        others = [line.work for name, line in self.lines.items() if name != entry.tenant]
        return own + sum(min(other, own + work) for other in others)


class _Entered(NamedTuple):
    pushed_s: float
    work: int
    """As it was expected when it came, tokens."""


class ModelQueue(Generic[Entry]):
    """What waits for one model, and how fast that goes.

    Invariant: `tokens` and `_work` are sums over the entries.
    """

    def __init__(self) -> None:
        self.pace = Pace()
        self.tokens = 0
        """Tokens of the prompts that wait."""
        self._entered: dict[Entry, _Entered] = {}
        self._resumed: deque[Entry] = deque()
        self._tenants: _Tenants[Entry] = _Tenants()
        self._work = 0
        self._seen_s = 0.0

    def __len__(self) -> int:
        return len(self._entered)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entered))

    def first(self, test: Callable[[Entry], bool] = lambda _: True) -> Entry | None:
        """Whose turn it is, of those that pass a test."""
        resumed = next((entry for entry in self._resumed if test(entry)), None)
        if resumed is not None:
            return resumed
        firsts = (line.first(test) for line in self._tenants.order())
        return next((entry for entry in firsts if entry is not None), None)

    def add(self, entry: Entry, now_s: float) -> None:
        """Adds an entry behind its equals."""
        self._advance(now_s)
        work = self.pace.work(entry.demand)
        self._entered[entry] = _Entered(now_s, work)
        self._work += work
        self.tokens += entry.demand.prompt_tokens
        self.pace.is_backlogged = True
        if entry.is_resumed:
            self._resumed.append(entry)
        else:
            self._tenants.add(entry, work)

    def take(self, entry: Entry, now_s: float) -> float:
        """Removes an entry that is dispatched now; returns how long it waited, seconds."""
        if not entry.is_resumed:
            self._tenants.taken(entry, self._entered[entry].work)
        return now_s - self.remove(entry, now_s)

    def remove(self, entry: Entry, now_s: float) -> float:
        """Removes an entry, if it is there; returns when it was pushed."""
        self._advance(now_s)
        entered = self._entered.pop(entry, None)
        if entered is None:
            return now_s
        self._work -= entered.work
        self.tokens -= entry.demand.prompt_tokens
        self.pace.is_backlogged = bool(self._entered)
        if entry in self._resumed:
            self._resumed.remove(entry)
        else:
            self._tenants.remove(entry, entered.work)
        return entered.pushed_s

    def wait_s(self, now_s: float) -> float | None:
        """How long all that waits takes to drain; None while nothing was measured."""
        self._advance(now_s)
        return self.pace.wait_s(self._work)

    def wait_of_s(self, entry: Entry, now_s: float) -> float | None:
        """How long an entry that came now would wait; None while nothing was measured."""
        self._advance(now_s)
        ahead = self._tenants.ahead(entry, self.pace.work(entry.demand))
        ahead += sum(self._entered[resumed].work for resumed in self._resumed)
        return self.pace.wait_s(ahead)

    def _advance(self, now_s: float) -> None:
        if self._entered:
            self.pace.backlog(now_s - self._seen_s)
        self._seen_s = now_s


class AdmissionQueue(Generic[Entry]):
    """A queue for each model, bounded by entries and by prompt tokens: a model that is swamped
    refuses its own requests only. An empty queue is kept for the pace that it has measured.
    """

    def __init__(self, max_entries: int, max_tokens: int) -> None:
        self._max_entries = max_entries
        self._max_tokens = max_tokens
        self._queues: dict[str, ModelQueue[Entry]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Entry]:
        return iter([entry for queue in self._queues.values() for entry in queue])

    @property
    def tokens(self) -> int:
        """Prompt tokens waiting in all queues."""
        return sum(queue.tokens for queue in self._queues.values())

    def of(self, model: str) -> ModelQueue[Entry]:
        """The queue of a model."""
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = ModelQueue()
        return queue

    def queues(self) -> list[ModelQueue[Entry]]:
        """The queues in which something waits."""
        return [queue for queue in self._queues.values() if len(queue)]

    def counts(self) -> dict[str, int]:
        """Number of entries by model, of models for which something waits."""
        return {name: len(queue) for name, queue in self._queues.items() if len(queue)}

    def push(self, entry: Entry, now_s: float, *, bounded: bool = True) -> None:
        """Adds an entry. An empty queue has room for an entry of any size.

        Args:
            entry: the entry.
            now_s: time of a steady clock.
            bounded: False for work that was accepted before and returns.

        Raises:
            RouterError: QUEUE_FULL.
        """
        queue = self.of(entry.model)
        tokens = queue.tokens + entry.demand.prompt_tokens
        full = len(queue) >= self._max_entries or tokens > self._max_tokens
        if bounded and full and len(queue):
            raise errors.queue_full(len(queue), self.retry_after_s(entry.model, now_s))
        queue.add(entry, now_s)

    def waits_s(self, now_s: float) -> dict[str, float]:
        """By model: how long what waits takes to drain, where that is known."""
        waits = {name: queue.wait_s(now_s) for name, queue in self._queues.items()}
        return {name: wait_s for name, wait_s in waits.items() if wait_s is not None}

    def retry_after_s(self, model: str, now_s: float) -> float:
        """When a refused client may find room, by the measured pace."""
        wait_s = self.of(model).wait_s(now_s)
        if wait_s is None:
            return UNMEASURED_RETRY_AFTER_S
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s))
