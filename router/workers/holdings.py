"""Who holds which pages of a prompt, as the workers have reported.

There is an index for each fingerprint, since equal keys mean equal pages only within it. A worker
is followed (`prefixes.follower`) for as long as its stream lives. All that it reported is forgotten
with the stream.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from baton.worker.v1 import worker_pb2
from prefixes.codec import Events, ShardSnapshot, Wanted
from prefixes.follower import Follower
from prefixes.index import MOST_GROUPS, Held, PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.jobs import Demand
    from router.workers.link import WorkerLink


class Holdings(Protocol):
    """What placement may ask. It may be old, or wrong: workers decide what is true."""

    def held(self, demand: Demand) -> Mapping[str, Held]:
        """The leading pages of the demand's prompt, by `WorkerLink.worker_id`. Workers that hold
        none are left out."""
        ...


class NoHoldings:
    """Nobody is known to hold anything."""

    def held(self, demand: Demand) -> Mapping[str, Held]:
        """See `Holdings`."""
        return {}


NO_HOLDINGS: Final = NoHoldings()


class PagesLoad(NamedTuple):
    """The present state of what is known."""

    behind: Mapping[str, int]
    """Events that a worker announced and that have not come, by worker."""
    keys: Mapping[tuple[str, str], int]
    """Pages that are known, by worker and tier ("pool", "host")."""
    dropped: Mapping[str, int]
    """Messages dropped since the start, by reason."""
    asked: Mapping[str, int]
    """Times that a worker was asked again, by reason."""
    forgotten: int
    """Keys dropped since the start because an index was full."""


class _Family(NamedTuple):
    """The workers of one fingerprint."""

    revision: str
    pages: PrefixIndex


class WorkerPages:
    """`Holdings` of attached workers. Belongs to the event loop.

    Args:
        wanted: whether workers are asked at all.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self._wanted = wanted
        self._families: dict[str, _Family] = {}
        """By fingerprint."""
        self._followers: dict[WorkerLink, Follower] = {}
        self._dropped: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()
        self._forgotten = 0
        """By indexes that are gone."""
        self._sweeper: asyncio.Task[None] | None = None

    def attached(self, link: WorkerLink) -> None:
        """Begins to follow a worker, if its pages can be found again."""
        model = link.identity.model
        if not (self._wanted and model.prefix_cache):
            return
        family = self._families.get(model.fingerprint)
        if family is None:
            index = PrefixIndex(resume_pages=model.resume_pages[: MOST_GROUPS - 1])
            family = _Family(model.revision, index)
            self._families[model.fingerprint] = family
        ask = _asker(link)
        follower = Follower(family.pages, link.worker_id, ask, self._dropped, self._asked)
        self._followers[link] = follower
        follower.start(_now_s())

    def loaded(self, link: WorkerLink) -> None:
        """A load report came."""
        if (follower := self._followers.get(link)) is not None:
            follower.announced(link.estimate.load.page_sequence, _now_s())

    def received(self, link: WorkerLink, message: worker_pb2.WorkResponse) -> None:
        """A worker reported pages."""
        if (follower := self._followers.get(link)) is None:
            return
        if message.HasField("page_events"):
            events = message.page_events
            follower.events(Events(events.first_sequence, events.keys, events.kinds), _now_s())
        else:
            part = message.page_snapshot
            shards = part.first_shard, part.end_shard
            follower.part(ShardSnapshot(part.sequence, *shards, part.keys, part.tiers), _now_s())

    def lost(self, link: WorkerLink) -> None:
        """Forgets a worker. What is left of it is swept in small steps."""
        if (follower := self._followers.pop(link, None)) is None:
            return
        follower.end()
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep())

    def close(self) -> None:
        """Ends the sweeping."""
        if self._sweeper is not None:
            self._sweeper.cancel()

    def held(self, demand: Demand) -> Mapping[str, Held]:
        """See `Holdings`."""
        found: dict[str, Held] = {}
        if len(demand.keys):
            for family in self._families.values():
                if family.revision == demand.model.revision:
                    found |= family.pages.held(demand.keys)
        return found

    def load(self) -> PagesLoad:
        """See there."""
        behind, keys = {}, {}
        for link, follower in self._followers.items():
            behind[link.worker_id] = follower.behind
            index = self._families[link.identity.model.fingerprint].pages
            keys[link.worker_id, "pool"], keys[link.worker_id, "host"] = index.counts(
                link.worker_id
            )
        lost = sum(family.pages.dropped for family in self._families.values())
        return PagesLoad(behind, keys, self._dropped, self._asked, self._forgotten + lost)

    async def _sweep(self) -> None:
        """Sweeps every index, and drops those that nobody is in. No turn takes long."""
        while swept := [family.pages.sweep() for family in self._families.values()]:
            if not any(swept):
                break
            await asyncio.sleep(0)
        for fingerprint, (_, index) in list(self._families.items()):
            if not index.holders:
                self._forgotten += index.dropped
                del self._families[fingerprint]


def _asker(link: WorkerLink) -> Callable[[Wanted], None]:
    def ask(wanted: Wanted) -> None:
        message = worker_pb2.PagesWanted(
            next_sequence=wanted.next_sequence, next_shard=wanted.next_shard
        )
        link.send(worker_pb2.WorkRequest(pages_wanted=message))

    return ask


def _now_s() -> float:
    return asyncio.get_running_loop().time()
