"""What the chart's scaling rules do in an hour of real traffic, beside the best fixed split.

    python -m bench.scaling [--begins 3:3 2:4] [--start-s 180 60] [--least 1] [--json FILE]

The cluster is that of `bench.balance`, on a virtual clock with the rates of an H100. What is scaled
is what the chart in compose/kubernetes scales, by the same figures, targets and behaviour: a
HorizontalPodAutoscaler looks every 15 s at figures of the last minute, may double a pool in 30 s,
and takes one pod away in 120 s, once nothing has asked for it for 20 minutes. A pod serves
`--start-s` after it was asked for, and has its drain to leave. `gpus`: the mean over the hour, pods
that start or leave counted. `turns`: changes of direction of one pool, the most in any hour.
`fewer` and `more` are the best fixed splits of as many GPUs, rounded down and up.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import quantiles
from typing import Final, NamedTuple

from bench.balance import DRAIN_S, HOUR_S, RATES, TOKEN_S, Cluster, Worker, kept_of, load_of, served
from bench.harness import write_json
from console.planning.simulation import MOST_ROWS
from router.workers.balance import DECODE, PREFILL
from router.workers.link import name_of

SYNC_S, TOLERANCE = 15.0, 0.1
"""Kubernetes' own: an autoscaler looks so often, and does nothing within a tenth of a target."""
MEAN_S = 60.0
"""The chart's queries are rates of a minute."""
FULL, EMPTY_S = 0.9, 120.0
"""The chart's, for `queue`."""
UP_S, DOWN_S, WINDOW_S = 30.0, 120.0, 1200.0
"""The chart's behaviour (`baton.scaling-behavior`, `scaling.windowSeconds`)."""


class Trigger(NamedTuple):
    """A figure that a pool is scaled by.

    Attributes:
        target: of each pod, or of the pool.
        each: the figure is in pods: so many would be needed if each were full. Else the pool grows
            in the proportion of the figure to its target.
    """

    target: float
    each: bool


TRIGGERS: Final[Mapping[int, Mapping[str, Trigger]]] = {
    PREFILL: {"busy": Trigger(0.6, each=True), "queue": Trigger(1.0, each=True)},
    DECODE: {
        "pages": Trigger(0.75, each=True),
        "slots": Trigger(0.8, each=True),
        "step": Trigger(0.85 * TOKEN_S, each=False),
    },
}
"""What the chart has, by role. `queue`: pods that would empty the queue in two minutes beside what
they do; none if the pool is not full, since then others make the queue wait."""


@dataclass
class Pool:
    """What the autoscaler knows of a pool."""

    least: int
    most: int
    now: int
    told: deque[tuple[float, int]] = field(default_factory=deque)
    """What was asked for in the window, with when."""
    changes: list[tuple[float, int]] = field(default_factory=list)
    """When the pool became how large."""

    def look(
        self, now_s: float, ready: int, figures: Mapping[str, float], of: Mapping[str, Trigger]
    ) -> None:
        """Sets the pool's size as a HorizontalPodAutoscaler does."""
        wanted = max(self._wanted(ready, figures[name], one) for name, one in of.items())
        self.told.append((now_s, wanted))
        while self.told[0][0] < now_s - WINDOW_S:
            self.told.popleft()
        size = self.now
        if wanted > size:
            size = min(wanted, 2 * self._before(now_s - UP_S))
        elif (highest := max(told for _, told in self.told)) < size:
            size = max(highest, self._before(now_s - DOWN_S) - 1)
            size = min(size, self.now)
        size = min(self.most, max(self.least, size))
        if size != self.now:
            self.now = size
            self.changes.append((now_s, size))

    def _wanted(self, ready: int, figure: float, trigger: Trigger) -> int:
        pods = self.now if trigger.each else ready
        use = figure / trigger.target / (self.now if trigger.each else 1)
        return self.now if abs(use - 1) <= TOLERANCE else ceil(use * pods)

    def _before(self, at_s: float) -> int:
        """Its size then."""
        sizes = [size for changed_s, size in self.changes if changed_s <= at_s]
        return sizes[-1]

    def turns(self) -> int:
        """The most changes of direction within an hour."""
        ups = [(at_s, b > a) for (_, a), (at_s, b) in pairwise(self.changes)]
        turned = [at_s for (_, a), (at_s, b) in pairwise(ups) if a != b]
        return max((sum(0 <= other - at < HOUR_S for other in turned) for at in turned), default=0)


class Scaled(Cluster):
    """A cluster whose pools grow and shrink.

    Args:
        begins: pods of both pools at the start.
        least: pods of each pool at any time.
        most: pods of each pool at most.
        start_s: from the decision to the pod that serves.
    """

    def __init__(self, begins: tuple[int, int], least: int, most: int, start_s: float) -> None:
        super().__init__(*begins, None)
        self.pools = {
            role: Pool(least, most, count, deque([(0.0, count)]), [(-HOUR_S, count)])
            for role, count in zip((PREFILL, DECODE), begins, strict=True)
        }
        self.gpu_s = 0.0
        self.until_s = 0.0
        self._start_s = start_s
        self._looked_s = 0.0
        self._seconds = 0
        self._begun: list[tuple[float, int]] = []
        self._computed: dict[str, deque[int]] = {}
        self._steps: deque[list[float]] = deque(maxlen=int(MEAN_S))
        self._made = len(self.workers)

    def look(self, now_s: float) -> None:
        """Reads the figures of this second, and every 15 s sets the sizes."""
        for worker in self.workers:
            worker.report(now_s)
            done = self._computed.setdefault(worker.worker_id, deque([0], maxlen=int(MEAN_S) + 1))
            done.append(worker.estimate.load.computed_prompt_tokens)
        decoding = [one for one in self.workers if one.identity.role == DECODE and one.rows]
        self._steps.append([RATES.decode_s(len(one.rows), one.context) for one in decoding])
        self._leave(now_s)
        if now_s - self._looked_s >= SYNC_S:
            self._looked_s = now_s
            for role, pool in self.pools.items():
                ready = sum(one.takes(role) for one in self.workers)
                pool.look(now_s, ready, self._figures(role), TRIGGERS[role])
        for role, pool in self.pools.items():
            self._fit(now_s, role, pool.now)
        if now_s <= self.until_s:
            self.gpu_s += len(self.workers) + len(self._begun)

    def _figures(self, role: int) -> dict[str, float]:
        pods = [one for one in self.workers if one.takes(role)]
        if role == PREFILL:
            tokens = [self._computed[one.worker_id] for one in pods]
            busy = sum(done[-1] - done[0] for done in tokens) * RATES.prefill_token_s / MEAN_S
            queued = sum(one.prompt for one in self.prompts) * RATES.prefill_token_s
            is_full = busy > FULL * len(pods)
            return {"busy": busy, "queue": busy + queued / EMPTY_S if is_full else 0.0}
        steps = [step for second in self._steps for step in second]
        return {
            "pages": sum(one.context for one in pods) / RATES.kv_tokens,
            "slots": sum(len(one.rows) for one in pods) / MOST_ROWS,
            "step": quantiles(steps, n=10)[-1] if len(steps) > 1 else 0.0,
        }

    def _fit(self, now_s: float, role: int, wanted: int) -> None:
        """Starts pods, or tells the youngest to leave."""
        ready = [at_s for at_s, of in self._begun if of == role and at_s <= now_s]
        self._begun = [one for one in self._begun if one[1] != role or one[0] > now_s]
        self.workers += [self._new(now_s, role) for _ in ready]
        pods = [one for one in self.workers if one.takes(role)]
        coming = [one for one in self._begun if one[1] == role]
        for _ in range(wanted - len(pods) - len(coming)):
            self._begun.append((now_s + self._start_s, role))
        for _ in range(len(pods) + len(coming) - wanted):
            if coming:
                self._begun.remove(coming.pop())
            else:
                leaves = pods.pop()
                leaves.next_role, leaves.until_s = -1, now_s + DRAIN_S

    def _new(self, now_s: float, role: int) -> Worker:
        self._made += 1
        made = self.worker(self._made, PREFILL if role == PREFILL else DECODE)
        made.now_s = made.free_s = now_s
        return made

    def _leave(self, now_s: float) -> None:
        for worker in [one for one in self.workers if one.next_role]:
            is_done = not worker.rows and worker.free_s <= now_s
            if is_done or now_s >= worker.until_s:
                self.give_back(worker)
                self.workers.remove(worker)


@cache
def best_fixed(load: str, gpus: int) -> tuple[float, str]:
    """The best split of so many GPUs, and what it keeps."""
    splits = [(p, gpus - p) for p in range(1, gpus)]
    return max((kept_of(served(Cluster(p, d, None), load)), f"{p}P{d}D") for p, d in splits)


def run(load: str, begins: tuple[int, int], least: int, start_s: float) -> dict[str, object]:
    """A row of the table."""
    cluster = Scaled(begins, least, 12, start_s)
    cluster.until_s = load_of(load)[-1].at_s
    kept = kept_of(served(cluster, load))
    gpus = cluster.gpu_s / cluster.until_s
    fewer, more = best_fixed(load, int(gpus)), best_fixed(load, ceil(gpus))
    sizes = {
        name_of(role): " ".join(f"{max(0, at_s):.0f}s:{size}" for at_s, size in pool.changes)
        for role, pool in cluster.pools.items()
    }
    return {
        "load": load,
        "begins": "{}P{}D".format(*begins),
        "least": least,
        "start_s": start_s,
        "gpus": round(gpus, 2),
        "kept": round(kept, 4),
        "turns": max(pool.turns() for pool in cluster.pools.values()),
        "fewer": "{1} {0:.4f}".format(*fewer),
        "more": "{1} {0:.4f}".format(*more),
        **sizes,
    }


def main() -> None:
    """A line for each load and start."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", nargs="+", default=["azure", "mooncake", "both"])
    parser.add_argument("--begins", nargs="+", default=["3:3"])
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--start-s", type=float, nargs="+", default=[180.0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for load in arguments.loads:
        for begins in arguments.begins:
            prefill, decode = map(int, begins.split(":"))
            for start_s in arguments.start_s:
                found.append(run(load, (prefill, decode), arguments.least, start_s))
                print("  ".join(f"{value!s:<9}" for value in found[-1].values()), flush=True)
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
