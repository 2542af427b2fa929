"""How much of a router each tenant may have at once.

A job counts from its admission to its end, waiting or running. A router counts its own jobs only:
with several routers a tenant may have as much at each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from router import errors
from router.jobs import Demand

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


class Quotas:
    """What every tenant uses now. Without jobs nothing is kept."""

    def __init__(self) -> None:
        self._usage: dict[str, _Usage] = {}

    def enter(self, job: Job) -> None:
        """Counts a job.

        Raises:
            RouterError: QUOTA_EXCEEDED; the job is not counted.
        """
        usage = self._usage.get(job.tenant, _Usage())
        for name, amount in _amounts(job).items():
            limit, used = getattr(job.quota, name), getattr(usage, name)
            if limit is not None and used + amount > limit:
                raise errors.quota_exceeded(name, used, amount, limit)
        usage.add(job, 1)
        self._usage[job.tenant] = usage

    def leave(self, job: Job) -> None:
        """The job is over."""
        usage = self._usage[job.tenant]
        usage.add(job, -1)
        if not usage.requests:
            del self._usage[job.tenant]


def _amounts(job: Job) -> dict[str, int]:
    demand = Demand.of(job)
    tokens = demand.prompt_tokens + demand.choices * demand.max_tokens
    return {"requests": 1, "tokens": tokens, "sequences": demand.choices}
