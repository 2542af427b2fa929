"""How much of a router each tenant may have at once.

A job counts from its admission to its end, waiting or running. A call that only turns text into
ids, or back, counts as a request. A router counts its own alone: with several routers a tenant may
have as much at each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from router import errors
from router.jobs import Quota

if TYPE_CHECKING:
    from router.jobs import Job


@dataclass(slots=True)
class _Usage:
    requests: int = 0
    tokens: int = 0
    sequences: int = 0

    def add(self, job: Job, sign: int) -> None:
        for name, amount in _amounts(job).items():
            setattr(self, name, getattr(self, name) + sign * amount)


class _Lack(NamedTuple):
    """A limit that leaves no room for a job."""

    name: str
    used: int
    wanted: int
    limit: int


class Quotas:
    """What every tenant uses now. Without jobs nothing is kept."""

    def __init__(self) -> None:
        self._usage: dict[str, _Usage] = {}
        self._freed: dict[str, asyncio.Event] = {}
        """Set when a job of a tenant ends, where others of it wait for room."""

    def enter(self, job: Job) -> None:
        """Counts a job.

        Raises:
            RouterError: QUOTA_EXCEEDED; the job is not counted.
        """
        if lack := self._lack(job):
            raise errors.quota_exceeded(*lack)
        self._usage.setdefault(job.tenant, _Usage()).add(job, 1)

    async def room(self, job: Job) -> None:
        """Waits until the job could be counted, for as long as its tenant's others leave no room.
        One that is too much by itself does not wait."""
        while (lack := self._lack(job)) and lack.wanted <= lack.limit:
            await self._freed.setdefault(job.tenant, asyncio.Event()).wait()

    def leave(self, job: Job) -> None:
        """The job is over."""
        self._usage[job.tenant].add(job, -1)
        self._forget(job.tenant)

    @contextmanager
    def counted(self, tenant: str, quota: Quota) -> Iterator[None]:
        """Counts a call that is no job as one request, as long as the block runs.

        Raises:
            RouterError: QUOTA_EXCEEDED.
        """
        usage = self._usage.get(tenant, _Usage())
        if quota.requests is not None and usage.requests >= quota.requests:
            raise errors.quota_exceeded("requests", usage.requests, 1, quota.requests)
        usage.requests += 1
        self._usage[tenant] = usage
        try:
            yield
        finally:
            usage.requests -= 1
            self._forget(tenant)

    def _lack(self, job: Job) -> _Lack | None:
        """The first limit that leaves no room for a job."""
        usage = self._usage.get(job.tenant, _Usage())
        for name, amount in _amounts(job).items():
            limit, used = getattr(job.quota, name), getattr(usage, name)
            if limit is not None and used + amount > limit:
                return _Lack(name, used, amount, limit)
        return None

    def _forget(self, tenant: str) -> None:
        if not self._usage[tenant].requests:
            del self._usage[tenant]
        if (freed := self._freed.pop(tenant, None)) is not None:
            freed.set()


def _amounts(job: Job) -> dict[str, int]:
    tokens = job.prompt_tokens + job.choices * job.stopping.max_tokens
    return {"requests": 1, "tokens": tokens, "sequences": job.choices}
