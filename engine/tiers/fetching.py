"""The stores below the host tier, as the step loop sees them: seeking, fetching, storing.

An object is the pages of 256 tokens; of a window's group, the last ones of them that somebody reads
who goes on behind them. Its pages are loaded into host slots; from there they go on
like all others. A slot's page is stored before it is evicted: a quarter of the slots is kept ready.

    a prompt goes on below the host tier -> SEEK: all stores are asked -> FETCH: objects are read
    into held slots -> they are cached there -> the prompt's pages are loaded from their slots

Slots that a store reads or writes are held until its process has answered or is gone.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from engine.pages.blocks import BlockManager
from engine.pages.lending import Loan
from engine.pages.watch import CacheEventKind, CacheEvents
from engine.tiers.lanes import LATE, LEAST_DEADLINE_S
from engine.tiers.protocol import Wait
from engine.tiers.stores.messages import LOAD, LOOKUP, STORE
from engine.tiers.stores.process import Job, StoreProcess
from engine.types import PageIds

READY_SHARE: Final = 4
FETCHED_AT_ONCE: Final = 8
"""Most objects of one question."""
STORED_AT_ONCE: Final = 4
"""Objects that are being stored at a time."""
_LOOKS: Final = 4
"""Slots that are looked at in a turn to find an object to store. The batch waits for a turn."""
_REST_S: Final = 0.02
"""Time between looks if there was nothing to store, seconds."""


@dataclass(eq=False, slots=True)
class Seek:
    """A prompt's objects that may be in a store."""

    keys: Sequence[bytes]
    """Keys of the prompt's pages."""
    first: int
    """Index of the first object in the prompt."""
    objects: list[bytes]
    """Keys of their last pages."""
    queued_tokens: int
    kept_back: int
    """Pages that the prompt must leave in the pool."""
    wait: Wait
    lookups: dict[Job, StoreProcess] = field(default_factory=dict)
    found: dict[StoreProcess, list[bool]] = field(default_factory=dict)
    """For each store, and each object, whether it has it."""
    fetches: set[Job] = field(default_factory=set)

    def leading(self) -> tuple[StoreProcess | None, int]:
        """The store that has most of the leading objects, or of several the fastest, and how many
        it has."""
        counts = {process: _leading(flags) for process, flags in self.found.items()}
        having = {process: count for process, count in counts.items() if count}
        if not having:
            return None, 0
        process = max(having, key=lambda one: (having[one], one.bytes_per_s))
        return process, having[process]


class Seeker(Protocol):
    """What `StoreTiers` asks of its owner."""

    def found(self, seek: Seek) -> None:
        """All stores have answered a seek, or are late. `StoreTiers.fetch` takes what is to
        come."""
        ...

    def sought(self, seek: Seek) -> None:
        """All that a seek waited for has ended, or is late."""
        ...


class StoreTiers:
    """See the module. It belongs to the step loop's thread.

    Args:
        blocks: the pool's pages.
        host: the slots.
        processes: the stores.
        done: where their jobs end.
        stride: pages from the end of an object to that of the next.
        pages: pages of an object, the last ones up to its end.
    """

    def __init__(
        self,
        blocks: BlockManager,
        host: BlockManager,
        processes: Sequence[StoreProcess],
        done: queue.SimpleQueue[tuple[StoreProcess, Job]],
        stride: int,
        pages: int,
    ) -> None:
        self._blocks = blocks
        self._host = host
        self.processes = processes
        self._done = done
        self.stride = stride
        self.pages = pages
        self._group_of: dict[bytes, tuple[bytes, ...]] = {}
        """For the key of each page in the pool or in a slot: the keys of its object."""
        self._seeks: dict[Job, list[Seek]] = {}
        """By the lookups and fetches that they wait for."""
        self._fetching: dict[bytes, Job] = {}
        self._fetches: dict[Job, tuple[StoreProcess, Seek]] = {}
        self._storing: dict[Job, tuple[list[Loan], PageIds]] = {}
        self._rest_until_s = 0.0
        self.version = 0
        """Changes with the counts."""
        self.came_from: dict[bytes, str] = {}
        """For keys in slots that a store has filled: its name."""
        self._failures: Counter[str] = Counter()
        self._bytes_moved: Counter[str] = Counter()
        for tier in (blocks, host):
            tier.subscribe(self._evicted, (CacheEventKind.EVICTED,))

    # -- groups ---------------------------------------------------------------------------------

    def published(self, keys: Sequence[bytes], first: int) -> None:
        """The pages of a sequence from `first` on have keys now. `keys` are those of all pages."""
        size = self.stride
        for end in range((first // size + 1) * size, len(keys) + 1, size):
            group = tuple(keys[end - self.pages : end])
            if all(self._is_here(key) for key in group):
                self._group_of.update(dict.fromkeys(group, group))

    def _is_here(self, key: bytes) -> bool:
        """Pages behind a window may be gone already. What is here now is heard of when it goes."""
        return any(books.page_of(key) is not None for books in (self._blocks, self._host))

    def _evicted(self, events: CacheEvents) -> None:
        for key in events.keys:
            if self._host.page_of(key) is None:
                self.came_from.pop(key, None)
                if self._blocks.page_of(key) is None:
                    self._group_of.pop(key, None)

    # -- seeking and fetching -------------------------------------------------------------------

    def seek(self, keys: Sequence[bytes], known: int) -> list[bytes]:
        """The objects of a prompt that reach beyond its first `known` pages."""
        size = self.stride
        return [keys[end - 1] for end in range((known // size + 1) * size, len(keys) + 1, size)]

    def begin(self, seek: Seek) -> bool:
        """Asks all stores. False: none can be asked."""
        for process in self.processes:
            job = Job(LOOKUP, seek.objects, due_s=time.monotonic() + LEAST_DEADLINE_S)
            if process.ask(job):
                seek.lookups[job] = process
                self._seeks[job] = [seek]
        if seek.lookups:
            seek.wait.under_way.add(seek)
        return bool(seek.lookups)

    def turn(self, seeker: Seeker) -> None:
        """Reads what has ended, passes it to `seeker`, and stores what may be evicted next."""
        while not self._done.empty():
            process, job = self._done.get()
            self.version += 1
            process.settle(job)
            self._settle(process, job, seeker)
        now = time.monotonic()
        for job in [job for job in self._seeks if job.due_s < now]:
            job.late = True
            self.version += 1
            self._failures["late " + job.verb] += 1
            self._advance(job, seeker)
        self._store_ahead(now)

    def counts(self) -> tuple[dict[str, int], dict[str, float], Counter[str]]:
        """Bytes moved, rates and failures, each by what it is of."""
        rates = {process.name + " load": process.bytes_per_s for process in self.processes}
        return dict(self._bytes_moved), rates, +self._failures

    def stop(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.stop()

    def due_s(self) -> float | None:
        """The next deadline."""
        return min((job.due_s for job in self._seeks), default=None)

    def _settle(self, process: StoreProcess, job: Job, seeker: Seeker) -> None:
        self._failures[process.name] += job.failed
        self._failures[process.name + " damaged"] += job.damaged
        if job.verb == STORE:
            self._settle_store(process, job)
        elif job.verb == LOAD:
            self._settle_fetch(process, job)
        elif job in self._seeks:
            (seek,) = self._seeks[job]
            seek.found[process] = job.good
        self._advance(job, seeker)

    def _advance(self, job: Job, seeker: Seeker) -> None:
        """A job has ended, or nobody waits for it any more."""
        for key in job.keys:
            if self._fetching.get(key) is job:
                del self._fetching[key]
        for seek in self._seeks.pop(job, ()):
            was_lookup = seek.lookups.pop(job, None) is not None
            seek.fetches.discard(job)
            if was_lookup and not seek.lookups:
                seeker.found(seek)
            if not seek.lookups and not seek.fetches:
                seeker.sought(seek)

    def fetch(self, process: StoreProcess, seek: Seek, first: int, end: int) -> None:
        """Fetches objects [first, end) of a seek."""
        for start in range(first, end, FETCHED_AT_ONCE):
            self._fetch(process, seek, start, min(end, start + FETCHED_AT_ONCE))

    def _fetch(self, process: StoreProcess, seek: Seek, start: int, end: int) -> None:
        missing = []
        for index in range(start, end):
            job = self._fetching.get(seek.objects[index])
            if job is None:
                missing.append(index)
            else:
                self._join(job, seek)
        count = len(missing) * self.pages
        if not missing or count > self._host.available:
            return
        slots = self._host.allocate(count)
        limit_s = max(LATE * process.expected_s(len(missing)), LEAST_DEADLINE_S)
        job = Job(
            LOAD,
            [seek.objects[index] for index in missing],
            np.split(slots, len(missing)),
            due_s=time.monotonic() + limit_s,
        )
        if not process.ask(job):
            self._host.release(slots)
            return
        self._fetches[job] = process, seek
        self._fetching.update(dict.fromkeys(job.keys, job))
        self._join(job, seek)

    def _join(self, job: Job, seek: Seek) -> None:
        self._seeks.setdefault(job, []).append(seek)
        seek.fetches.add(job)

    def _settle_fetch(self, process: StoreProcess, job: Job) -> None:
        _, seek = self._fetches.pop(job)
        for last, slots, good in zip(job.keys, job.slots, job.good, strict=True):
            if good and not job.late:
                end = (seek.first + seek.objects.index(last) + 1) * self.stride
                keys = seek.keys[end - self.pages : end]
                self._host.adopt(slots.tolist(), keys)
                self.published(seek.keys[:end], end - self.pages)
                self.came_from.update(dict.fromkeys(keys, process.name))
                self._bytes_moved[process.name + " load"] += process.object_bytes
            self._host.release(slots)

    # -- storing --------------------------------------------------------------------------------

    def _store_ahead(self, now: float) -> None:
        host = self._host
        if host.ready >= host.total // READY_SHARE or now < self._rest_until_s:
            return
        busy = len(self._storing)
        for _ in range(_LOOKS):
            if len(self._storing) >= STORED_AT_ONCE * len(self.processes):
                return
            loans = host.lend(1)
            if not loans:
                break
            host.take_back(loans, saved=False)  # Where it cannot be stored, it is the last again.
            self._store(self._group_of.get(loans[0].key, ()))
        if len(self._storing) == busy:
            self._rest_until_s = now + _REST_S

    def _store(self, group: Sequence[bytes]) -> None:
        """Stores an object if all its pages are in slots."""
        places = [self._host.page_of(key) for key in group]
        slots = [slot for slot in places if slot is not None]
        if not group or len(slots) < len(group):
            return
        pinned = np.array(slots, np.int32)
        for process in self.processes:
            loans = self._host.lend_keys(group)
            job = Job(STORE, [group[-1]], [pinned])
            if process.ask(job):
                self._host.pin(pinned)
                self._storing[job] = loans, pinned
            else:
                self._host.take_back(loans, saved=False)
                self._failures[process.name + " full"] += 1

    def _settle_store(self, process: StoreProcess, job: Job) -> None:
        loans, slots = self._storing.pop(job)
        self._host.take_back(loans, saved=job.good == [True])
        self._host.unpin(slots[::-1])
        if job.good == [True]:
            self._bytes_moved[process.name + " store"] += process.object_bytes


def _leading(flags: Sequence[bool]) -> int:
    return flags.index(False) if False in flags else len(flags)
