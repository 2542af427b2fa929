"""How much later first tokens come beside a batch, and what the batch gets.

    python -m bench.batch_beside [--load chat azure] [--part 0.3 0.5 0.7] [--seconds S] [--draws N]

The router's own dispatcher and the room that it gives to batches (`router.doors.batches.room`), on
the virtual clock and the scripted worker of `bench.overload`. Interactive requests come at random,
at a part of the capacity; lines of the same lengths, 32 at once, fill the rest. A line for each
case: the mean and the 99th percentile of first tokens, ms, without the batch, beside it, and beside
one that only stands behind them in the queue; and what the batch got, in parts of what was left.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from bench.harness import table
from bench.overload import Clock, Router, Seen, lengths_of, now_s
from router.doors.batches.room import Room
from router.jobs import Job, JobTokens

AT_ONCE = 32
LONG_S = 1e4


class Times(Router):
    """A router whose first tokens are timed."""

    def __init__(self, lengths: Sequence[tuple[int, int]], seed: int) -> None:
        super().__init__(lengths, seed)
        self.first_s: list[float] = []

    async def one(self, seen: Seen, deadline_s: float) -> None:
        """One interactive request."""
        began_s, came = now_s(), False

        def take(event: object) -> None:
            nonlocal came
            if isinstance(event, JobTokens) and not came:
                came = True
                self.first_s.append(now_s() - began_s)

        await self.dispatcher.run(self._job(deadline_s), take)
        seen.ends["OK"] += 1

    async def batch(self, seen: Seen, room: Room | None) -> None:
        """Lines, for ever."""

        async def line() -> None:
            while True:
                if room is not None:
                    await room.enter()
                job: Job = replace(self._job(LONG_S), priority=-100)
                await self.dispatcher.run(job, lambda _: None)
                seen.ends["OK"] += 1

        await asyncio.gather(*(line() for _ in range(AT_ONCE)))


async def case(
    lengths: Sequence[tuple[int, int]], part: float, seconds: float, seed: int, how: str
) -> tuple[list[float], float]:
    """First tokens, and the batch's answers in parts of the capacity that was left."""
    router = Times(lengths, seed)
    capacity = await router.closed(60)
    router.first_s.clear()
    seen, room = Seen(now_s()), None
    if how == "room":
        room = Room(lambda: [router.worker], lambda: router.dispatcher.queued_jobs)
    work = asyncio.create_task(asyncio.sleep(LONG_S) if how == "none" else router.batch(seen, room))
    await router.phase(part * capacity, seconds, LONG_S)
    got = seen.rate(seconds) / (capacity * (1 - part))
    work.cancel()
    await asyncio.wait({work})
    router.worker.stop()
    return router.first_s, got


def run(*arguments: Any) -> tuple[list[float], float]:
    """`case` on a clock of its own."""
    clock = Clock()
    with (
        mock.patch.object(time, "monotonic", clock.time),
        mock.patch.object(time, "time_ns", clock.time_ns),
        asyncio.Runner(loop_factory=lambda: clock) as runner,
    ):
        return runner.run(case(*arguments))


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", nargs="+", default=["chat", "azure"], choices=["chat", "azure"])
    parser.add_argument("--part", nargs="+", type=float, default=[0.3, 0.5, 0.7])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--draws", type=int, default=3)
    given = parser.parse_args()
    rows: list[list[object]] = [["load", "part", "batch", "mean ms", "p99 ms", "batch's part"]]
    for load, part, how in itertools.product(given.load, given.part, ("none", "room", "queue")):
        draws = [
            run(lengths_of(load), part, given.seconds, seed, how) for seed in range(given.draws)
        ]
        first_ms = np.concatenate([np.array(first) for first, _ in draws]) * 1e3
        got = sum(got for _, got in draws) / len(draws)
        mean, p99 = first_ms.mean(), np.percentile(first_ms, 99)
        rows.append([load, part, how, f"{mean:.1f}", f"{p99:.1f}", f"{got:.2f}"])
    print(table(rows))


if __name__ == "__main__":
    main()
