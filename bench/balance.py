"""What `--balance auto` does in an hour of real traffic, beside the best fixed split.

    python -m bench.balance [--gpus 6] [--json FILE]

A simulation on a virtual clock, with the rates of an H100 that `baton plan` has. Prompts wait in
one queue for a prefill worker; a decode worker's rows get their tokens at the rate of its steps.
The balance is the router's own (`router.workers.balance`), and looks at load reports made of this.
A worker that leaves decode gives its rows 30 s, and then others compute their prompts again.
`kept`: requests with their first token in 2 s, and 25 ms a token on average. `turns`: changes of
direction.

Loads: Azure's hour of conversations, the head of Mooncake's conversations again and again for an
hour, and the one behind the other, so that the prompts of an answer's token grow from 5 to 39.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from baton.worker.v1 import worker_pb2
from console.loadgen.trace_files import read_trace
from console.planning.rates import GPUS, HAND_OFF_S, PREFILL_STEP_S, ROUTER_S, rates_of
from console.planning.simulation import MOST_ROWS
from router.settings import Thresholds
from router.workers.balance import DECODE, LOOK_S, PREFILL, Balance
from router.workers.life import AskedRole

RATES = rates_of(GPUS["h100"], 8.03e9, 131_072, 1, fp8=False)
PAGE = 16
HOUR_S = 3600.0
FIRST_S, TOKEN_S = 2.0, 0.025
DRAIN_S = 30.0
TIMES = {"azure": 14.0, "mooncake": 2.0}
"""Arrivals of a trace, times so many: what six GPUs serve well if they are divided well."""


@dataclass
class Request:
    """A request on its way."""

    at_s: float
    prompt: int
    output: int
    first_s: float = -1.0
    ended_s: float = -1.0

    @property
    def kept(self) -> bool:
        """Whether it kept the service level."""
        tokens_s = self.ended_s - self.at_s - self.first_s
        is_fast = tokens_s <= TOKEN_S * max(1, self.output - 1) + HAND_OFF_S
        return self.ended_s >= 0 and self.first_s <= FIRST_S and is_fast


@dataclass
class Estimate:
    """What of a link's estimate the balance reads."""

    load: worker_pb2.Load
    draining: bool = False


@dataclass
class Worker:
    """A worker: what the balance reads of its link, and what it does."""

    worker_id: str
    identity: worker_pb2.WorkerIdentity
    estimate: Estimate
    model: tuple[str, str] = ("m", "r")
    flexible: bool = True
    next_role: int = 0
    asked: AskedRole = field(default_factory=AskedRole)
    gave_up_on: frozenset[str] = frozenset()
    until_s: float = 0.0
    """While it leaves its role: when its rows must be over."""
    free_s: float = 0.0
    """Prefill: when its prompt is computed."""
    begun_tokens: int = 0
    """Prefill: tokens of all prompts that it has begun."""
    rows: list[tuple[float, int, Request]] = field(default_factory=list)
    """Decode: by the token at which each ends, a heap."""
    tokens: float = 0.0
    """Tokens that each row has got since the start."""
    now_s: float = 0.0
    context: int = 0

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return bool(self.next_role)

    def takes(self, role: int) -> bool:
        """Whether it has the role and is not about to leave it."""
        return self.identity.role == role and not self.next_role

    def has_room(self, one: Request) -> bool:
        """Whether it can decode one more."""
        fits = self.context + one.prompt + one.output <= RATES.kv_tokens
        return len(self.rows) < MOST_ROWS and fits

    def advance(self, to_s: float) -> Iterator[tuple[float, Request]]:
        """Yields the rows that end until then, and when."""
        while self.rows:
            step_s = RATES.decode_s(len(self.rows), self.context)
            ends_s = self.now_s + (self.rows[0][0] - self.tokens) * step_s
            if ends_s > to_s:
                self.tokens += (to_s - self.now_s) / step_s
                break
            self.tokens, self.now_s = self.rows[0][0], ends_s
            _, _, one = heapq.heappop(self.rows)
            self.context -= one.prompt + one.output
            yield ends_s, one
        self.now_s = max(self.now_s, to_s)

    def report(self, now_s: float) -> None:
        """Makes the load report."""
        load, left_s = self.estimate.load, max(0.0, self.free_s - now_s)
        load.computed_prompt_tokens = max(
            0, int(self.begun_tokens - left_s / RATES.prefill_token_s)
        )
        load.running_sequences = len(self.rows)
        load.free_pages = max(0, (RATES.kv_tokens - self.context) // PAGE)


class Cluster:
    """Workers and requests on a virtual clock."""

    def __init__(self, prefill: int, decode: int, balance: Balance | None) -> None:
        roles = [PREFILL] * prefill + [DECODE] * decode
        self.workers = [self.worker(number, role) for number, role in enumerate(roles)]
        self.balance = balance
        self.moves: list[tuple[float, str]] = []
        self.prompts: deque[Request] = deque()
        self._delivered: list[tuple[float, int, Request]] = []
        self._waiting: deque[Request] = deque()

    @staticmethod
    def worker(number: int, role: worker_pb2.WorkerRole.ValueType) -> Worker:
        """A new one."""
        load = worker_pb2.Load(
            max_sequences=MOST_ROWS,
            total_pages=RATES.kv_tokens // PAGE,
            prefill_tokens_per_s=1 / RATES.prefill_token_s,
            balancer="router",
        )
        identity = worker_pb2.WorkerIdentity(role=role)
        return Worker(f"w{number}", identity, Estimate(load))

    def run(self, requests: Sequence[Request]) -> None:
        """Serves all of them."""
        coming, now_s = deque(requests), 0.0
        tick_s, looked_s = 0.02, 0.0
        while coming or self.prompts or self._delivered or self._waiting or self._running():
            now_s += tick_s
            while coming and coming[0].at_s <= now_s:
                self.prompts.append(coming.popleft())
            self._compute(now_s)
            self._decode(now_s)
            if now_s - looked_s >= LOOK_S:
                looked_s = now_s
                self.look(now_s)
            if now_s > requests[-1].at_s + HOUR_S:
                return  # What is left was never served.

    def _running(self) -> bool:
        return any(worker.rows for worker in self.workers)

    def _compute(self, now_s: float) -> None:
        """Prompts go to the worker that is free first. Those that wait for a decode worker with
        room stay in the queue, as in the router."""
        while self.prompts:
            may = [one for one in self.workers if one.takes(PREFILL) and one.free_s <= now_s]
            room = any(one.takes(DECODE) and one.has_room(self.prompts[0]) for one in self.workers)
            if not may or not room:
                return
            worker, one = min(may, key=lambda each: each.free_s), self.prompts.popleft()
            took_s = PREFILL_STEP_S + RATES.prompt_s(one.prompt)
            begun_s = max(worker.free_s, one.at_s + ROUTER_S, now_s - 0.02)
            worker.free_s = begun_s + took_s
            worker.begun_tokens += one.prompt
            if one.first_s < 0:
                one.first_s = worker.free_s + ROUTER_S - one.at_s
            heapq.heappush(self._delivered, (worker.free_s + HAND_OFF_S, id(one), one))

    def _decode(self, now_s: float) -> None:
        for worker in self.workers:
            for ended_s, one in worker.advance(now_s):
                one.ended_s = ended_s
        while self._delivered and self._delivered[0][0] <= now_s:
            self._waiting.append(heapq.heappop(self._delivered)[2])
        while self._waiting:
            one = self._waiting[0]
            may = [each for each in self.workers if each.takes(DECODE) and each.has_room(one)]
            if not may:
                return
            worker = min(may, key=lambda each: len(each.rows))
            self._waiting.popleft()
            worker.context += one.prompt + one.output
            heapq.heappush(worker.rows, (worker.tokens + one.output - 1, id(one), one))

    def look(self, now_s: float) -> None:
        """What whoever changes the cluster does each second: here the balance."""
        if self.balance is None:
            return
        for worker in self.workers:
            worker.report(now_s)
            if worker.next_role and (not worker.rows or now_s >= worker.until_s):
                self.give_back(worker)
                worker.identity.role, worker.next_role = worker.next_role, 0  # type: ignore[assignment]
        members: Any = self.workers
        for worker_id, role, _ in self.balance.look(now_s, members, {"m": len(self.prompts)}):
            worker = next(one for one in self.workers if one.worker_id == worker_id)
            worker.next_role, worker.until_s = role, now_s + DRAIN_S
            self.moves.append((now_s, "P" if role == PREFILL else "D"))

    def give_back(self, worker: Worker) -> None:
        """Others go on with what the worker still ran."""
        for ends, _, one in worker.rows:
            done = max(0, one.output - 1 - int(ends - worker.tokens))
            one.prompt, one.output = one.prompt + done, one.output - done
            self.prompts.appendleft(one)
        worker.rows, worker.context = [], 0


def load_of(name: str) -> list[Request]:
    """An hour's requests, or two."""
    if name == "both":
        azure, mooncake = load_of("azure"), load_of("mooncake")
        for one in mooncake:
            one.at_s += HOUR_S
        return azure + mooncake
    rows = read_trace(f"{name}-conversation")
    length_s, times = rows[-1].at_s + 0.5, TIMES[name]
    copies = max(1, round(HOUR_S / length_s))
    found = []
    for copy in range(copies):
        for row in rows:
            whole = int(times)  # Copies of a request are spread over its neighbourhood.
            for number in range(whole):
                at_s = copy * length_s + row.at_s + number * 1.37 % 7.0
                found.append(Request(at_s, row.prompt_tokens, row.output_tokens))
    return sorted(found, key=lambda one: one.at_s)


def served(cluster: Cluster, load: str) -> list[Request]:
    """A load's requests, once a cluster has served them."""
    requests = load_of(load)
    counts = [(one.prompt, one.output) for one in requests]
    cluster.run(requests)
    for one, (prompt, output) in zip(requests, counts, strict=True):
        one.prompt, one.output = prompt, output
    return requests


def kept_of(requests: Sequence[Request]) -> float:
    """The part of them that was served as it should."""
    return sum(one.kept for one in requests) / len(requests)


def run(name: str, prefill: int, decode: int, balance: Balance | None) -> dict[str, object]:
    """A row of the table."""
    cluster = Cluster(prefill, decode, balance)
    requests = served(cluster, name)
    directions = [to for _, to in cluster.moves]
    return {
        "load": name,
        "plan": f"{prefill}P{decode}D" + (" auto" if balance else ""),
        "kept": round(kept_of(requests), 4),
        "late": round(sum(one.first_s > FIRST_S for one in requests) / len(requests), 4),
        "moves": [f"{at_s:.0f} s {to}" for at_s, to in cluster.moves],
        "turns": sum(a != b for a, b in pairwise(directions)),
    }


def main() -> None:
    """A line for each load and plan."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=6)
    parser.add_argument("--loads", nargs="+", default=["azure", "mooncake", "both"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for name in arguments.loads:
        for prefill in range(1, arguments.gpus):
            for balance in (None, Balance(Thresholds(), "router")):
                found.append(run(name, prefill, arguments.gpus - prefill, balance))
                print("  ".join(f"{value!s:<10}" for value in found[-1].values()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
