"""What it brings that the router knows who holds what: the policies on a virtual clock.

python -m bench.who_holds [--load mooncake talk burst] [--policies least_work cost] [--rate 3]
                          [--requests 2000] [--prefill 4] [--decode 4] [--pool-gib 96] [--gbps 50]
                          [--hosts 1] [--far-gbps 5] [--slack 0.0625 ...] [--seed 7]

Nothing is computed. The router's own routing and load estimates place prompts (`router.placement`).
Prefill workers compute them one after the other at 25 us a token, as one H200 with an 8B model does
(`bench.step_time`). Decode workers hold a prompt's pages while its answer is generated, and compute
prompts themselves in pieces of 192 tokens, 49 us a token. Each pool is an LRU cache of pages of 64
tokens, 8 MB each. What a worker holds is known 50 ms later. A prompt finds the pages of those that
are computed before it. A hand-off takes no time: the decode worker has the pages with the first
token. A fetch takes its bytes at the rate given and 5 ms. Workers are dealt out to hosts; between
hosts the rate is another one. 0 means that no path was measured. `--slack` replaces a constant of
the policy `cost` (`router.placement.cost`).

Loads: `mooncake`, the head of Mooncake's conversation trace, its arrivals stretched to the rate;
`talk`, conversations of six turns with log-normal messages (`baton bench --conversations`);
`burst`, eight prompts within a second that share their first 4,000 tokens and go on with 100 of
their own, then eight others. A line for each: TTFT of all and of those that share most of their
prompt with an earlier one, hits, where prompts were computed, the delay of streams by prompts
beside them, a request, the most rows that a decode worker had at once, and the CPU time to choose a
route, which is real.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from baton.worker.v1 import worker_pb2
from bench.two_queues import Queue
from console.loadgen.trace_files import BLOCK_TOKENS, read_trace
from console.loadgen.workload import Conversations
from prefixes.index import Held
from router.jobs import Demand, ServedModel
from router.placement import cost, routing
from router.placement.just_routed import JustRouted
from router.workers.load_estimate import Capacity, LoadEstimate

if TYPE_CHECKING:
    from router.placement.routing import Route
    from router.workers.link import WorkerLink

PAGE, PAGE_BYTES = 64, 8 << 20
TOKEN_S, CHUNK_TOKEN_S, PIECE, PIECE_DELAY_S = 25e-6, 49e-6, 192, 3.1e-3
OUTPUT_TOKEN_S, EVENT_S, REPORT_S, FETCH_S = 8e-3, 0.05, 0.1, 5e-3
MODEL = ServedModel("m", "r", "", 1 << 18, 1, (), PAGE)


@dataclass(eq=False)
class Asked:
    """One request."""

    at_s: float
    keys: np.ndarray[Any, np.dtype[np.uint64]]
    tokens: int
    answer_keys: tuple[int, ...]
    output_tokens: int
    then: list[tuple[float, Asked]] = field(default_factory=list)
    """The next turn, with the time of thought before it."""
    first_s: float = 0.0
    cached_tokens: int = 0
    seen_before: float = 0.0
    """Share of its pages that anybody had asked for before."""


class Machine:
    """A worker, and the router's link to it."""

    def __init__(self, events: Queue, name: str, options: argparse.Namespace) -> None:
        self.is_decode = name.startswith("d")
        role = worker_pb2.WORKER_ROLE_DECODE if self.is_decode else worker_pb2.WORKER_ROLE_PREFILL
        self.worker_id = self.agent_name = name
        self.host = int(name[1:]) % options.hosts
        self.identity = worker_pb2.WorkerIdentity(
            worker_id=name, role=role,
            model=worker_pb2.ModelInfo(name="m", revision="r", fingerprint="f"),
            endpoint=worker_pb2.KvEndpoint(agent_name=name, transport="nixl"),
        )  # fmt: skip
        self.draining, self.page_bytes, self.resume_bytes = False, PAGE_BYTES, 0
        self.model, self.kind = ("m", "r"), 1 + self.is_decode
        self.prefills, self.decodes = not self.is_decode, self.is_decode
        self.estimate = LoadEstimate()
        self.rows = self.most_rows = 0
        self.delay_s = 0.0
        self.measured: frozenset[str] = frozenset()
        """See `WorkerLink`."""
        self.reported: set[int] = set()
        """Pages that routers know of."""
        self._pool: OrderedDict[int, None] = OrderedDict()
        self._due_s: dict[int, float] = {}
        """When pages of the prompts that it is to compute, or has computed, are there."""
        self._most = int(options.pool_gib * (1 << 30) / PAGE_BYTES)
        self._rate: float = 1e9 * options.gbps
        self._far_rate: float = 1e9 * options.far_gbps
        self._events = events
        self._waiting: deque[tuple[float, int]] = deque()
        """End and tokens of what it is to compute."""
        self._free_s = 0.0
        self._unreported: list[bytes] = []
        self._report()

    def capacity(self) -> Capacity:
        """See `WorkerLink`."""
        return self.estimate.capacity()

    def serves(self, _model: object) -> bool:
        """See `WorkerLink`."""
        return True

    def avoids(self, _other: object) -> bool:
        """See `WorkerLink`."""
        return False

    complained_of = gave_up_on = extensions = frozenset[str]()
    fingerprint = "f"
    """See `WorkerLink`."""

    def path_bytes_per_s(self, other: Machine) -> float:
        """See `WorkerLink`."""
        return self._rate if other.host == self.host else self._far_rate

    def leading(self, keys: Iterable[int]) -> int:
        """Leading pages in its pool."""
        return sum(1 for _ in itertools.takewhile(self._pool.__contains__, keys))

    def put(self, keys: Iterable[int]) -> None:
        """Pages are here now. The oldest go."""
        for key in keys:
            new = key not in self._pool
            self._pool[key] = None
            self._pool.move_to_end(key)
            if new:
                self._events.at(self._events.now_s + EVENT_S, partial(self.reported.add, key))
        while len(self._pool) > self._most:
            key, _ = self._pool.popitem(last=False)
            self._events.at(self._events.now_s + EVENT_S, partial(self.reported.discard, key))

    def compute(self, request: Asked, attempt: bytes, holder: Machine | None, pages: int) -> float:
        """Takes a prompt on. Returns when its first token is there."""
        now_s, keys = self._events.now_s, request.keys.tolist()
        due = itertools.takewhile(
            lambda key: key in self._pool or self._due_s.get(key, 0.0) > now_s, keys
        )
        have, fetch_s = sum(1 for _ in due), 0.0
        if holder is not None and (got := min(pages, holder.leading(keys))) > have:
            fetch_s = FETCH_S + (got - have) * PAGE_BYTES / self.path_bytes_per_s(holder)
            self.put(keys[:got])
            have = got
        request.cached_tokens = min(have * PAGE, request.tokens - 1)
        rest = request.tokens - request.cached_tokens
        token_s = CHUNK_TOKEN_S if self.is_decode else TOKEN_S
        self._free_s = max(self._free_s, now_s + fetch_s) + rest * token_s
        if self.is_decode:
            self.delay_s += max(1, rest / PIECE) * self.rows * PIECE_DELAY_S
        self._waiting.append((self._free_s, rest))
        self._unreported.append(attempt)
        self._due_s.update(dict.fromkeys(keys, self._free_s))
        self._events.at(self._free_s, partial(self.put, keys))
        return self._free_s

    def _report(self) -> None:
        now_s = self._events.now_s
        while self._waiting and self._waiting[0][0] <= now_s:
            self._waiting.popleft()
        queued, token_s = 0, CHUNK_TOKEN_S if self.is_decode else TOKEN_S
        for end_s, rest in self._waiting:
            queued += min(rest, round((end_s - now_s) / token_s))
        self.estimate.report(
            worker_pb2.Load(
                queued_prefill_tokens=queued, prefill_credit_tokens=8192 - queued,
                prefill_tokens_per_s=1 / token_s, prefill_token_s=token_s,
                piece_delay_ms=1e3 * PIECE_DELAY_S if self.is_decode else 0.0,
                piece_tokens=PIECE if self.is_decode else 0.0, fetch_latency_ms=1e3 * FETCH_S,
                running_sequences=self.rows, max_sequences=256, known_attempts=self._unreported,
                total_pages=self._most, free_pages=self._most,
            )
        )  # fmt: skip
        self._unreported = []
        self._events.at(now_s + REPORT_S, self._report)


class Truth:
    """`Holdings` of the machines."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = machines

    def held(self, demand: Demand) -> Mapping[str, Held]:
        """The leading pages that each one told of."""
        keys, found = demand.keys.tolist(), {}
        for one in self._machines:
            if count := sum(1 for _ in itertools.takewhile(one.reported.__contains__, keys)):
                found[one.worker_id] = Held.all(count, count)
        return found


class Run:
    """One run of one policy."""

    def __init__(self, requests: Sequence[Asked], policy: str, options: argparse.Namespace) -> None:
        self.events = Queue()
        names = [f"p{i}" for i in range(options.prefill)] + [f"d{i}" for i in range(options.decode)]
        self.machines = [Machine(self.events, name, options) for name in names]
        for one in self.machines:
            paths = (other.agent_name for other in self.machines if one.path_bytes_per_s(other))
            one.measured = frozenset(paths)
        self.policy = cost.policy_of(policy)
        if policy == cost.Cost.name:
            clock = JustRouted(lambda: self.events.now_s)
            self.policy = cost.Cost(Truth(self.machines), clock)
        self.choosing_s = 0.0
        self.done: list[Asked] = []
        self.ways: Counter[str] = Counter()
        self._waiting: deque[Asked] = deque()
        self._seen: set[int] = set()
        self._numbers = itertools.count()
        for request in requests:
            self.events.at(request.at_s, partial(self._arrive, request))
        self._pump_on()
        total = sum(_length(request) for request in requests)
        self.events.run(lambda: len(self.done) == total)

    def _arrive(self, request: Asked) -> None:
        request.at_s = self.events.now_s
        keys = request.keys.tolist()
        seen = sum(1 for _ in itertools.takewhile(self._seen.__contains__, keys))
        request.seen_before = seen / max(1, len(keys))
        self._seen.update(keys)
        self._waiting.append(request)
        self._pump()

    def _pump_on(self) -> None:
        self._pump()
        self.events.at(self.events.now_s + 2e-3, self._pump_on)

    def _pump(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            demand = Demand(MODEL, request.tokens, request.output_tokens, 1, keys=request.keys)
            workers = cast("list[WorkerLink]", self.machines)
            began_s = time.thread_time()
            route = routing.choose(demand, workers, self.policy, routing.Failed(), "cached")
            self.choosing_s += time.thread_time() - began_s
            if route is None:
                return
            self._waiting.popleft()
            self._place(request, demand, route)

    def _place(self, request: Asked, demand: Demand, route: Route) -> None:
        first, second = cast("Machine", route.prefill), cast("Machine", route.decode)
        attempt = next(self._numbers).to_bytes(16, "big")
        keys = request.keys.tolist()
        rest = request.tokens - second.leading(keys) * PAGE
        takes_over = not route.whole and rest <= min(route.takeover_tokens, request.tokens / 2)
        runs = second if takes_over else first
        self.policy.routed(demand, cast("WorkerLink", runs))
        holder = None if takes_over else cast("Machine | None", route.way.holder)
        pages = route.way.fetched_pages
        way = "decode" if runs.is_decode else "fetched" if holder else "computed"
        self.ways[way] += 1
        tokens = routing.prefill_reservation(demand, route.way.cached_tokens)
        runs.estimate.reserve(attempt, tokens)
        request.first_s = runs.compute(request, attempt, holder, pages)
        second.rows += 1
        second.most_rows = max(second.most_rows, second.rows)
        self.events.at(request.first_s, partial(self._first, request, runs, second, attempt))
        if runs is not second:
            handed_off = partial(self.policy.routed, demand, cast("WorkerLink", second))
            self.events.at(request.first_s, handed_off)

    def _first(self, request: Asked, runs: Machine, decode: Machine, attempt: bytes) -> None:
        runs.estimate.release(attempt)
        decode.put(request.keys.tolist())
        end_s = self.events.now_s + request.output_tokens * OUTPUT_TOKEN_S
        self.events.at(end_s, partial(self._end, request, decode))

    def _end(self, request: Asked, decode: Machine) -> None:
        decode.rows -= 1
        decode.put(request.answer_keys)
        self.done.append(request)
        for think_s, following in request.then:
            self.events.at(self.events.now_s + think_s, partial(self._arrive, following))


def _length(request: Asked) -> int:
    return 1 + sum(_length(following) for _, following in request.then)


def mooncake(options: argparse.Namespace) -> list[Asked]:
    """The trace. A page's key follows from its block, which names all before it."""
    rows = read_trace("mooncake-conversation")[: options.requests]
    scale = len(rows) / options.rate / rows[-1].at_s
    found = []
    for row in rows:
        pages = BLOCK_TOKENS // PAGE
        keys = [block * pages + i + 1 for block in row.blocks for i in range(pages)]
        keys = keys[: (row.prompt_tokens - 1) // PAGE]
        asked = np.array(keys, np.uint64)
        answer = max(2, row.output_tokens)
        found.append(Asked(row.at_s * scale, asked, row.prompt_tokens, (), answer))
    return found


def talk(options: argparse.Namespace) -> list[Asked]:
    """Conversations of six turns."""
    turns = 6
    plan = Conversations(options.requests // turns, turns, 10.0, 256, context_tokens=32_000).plan(
        options.rate / turns, seed=options.seed
    )
    found: list[Asked] = []
    tokens, last = 0, None
    for planned in plan.requests:
        assert planned.turn
        tokens = planned.prompt_tokens + (tokens if planned.turn.number else 0)
        own = (planned.turn.conversation + 1) << 32
        system = planned.turn.system_tokens or 512

        def keys(first: int, end: int, own: int = own, system: int = system) -> list[int]:
            return [i + 1 + (own if i * PAGE >= system else 0) for i in range(first, end)]

        prompt_pages, all_pages = (tokens - 1) // PAGE, (tokens + 255) // PAGE
        asked = Asked(
            planned.due_s, np.array(keys(0, prompt_pages), np.uint64), tokens,
            tuple(keys(prompt_pages, all_pages)), 256,
        )  # fmt: skip
        if planned.turn.number and last is not None:
            last.then.append((planned.turn.think_s, asked))
        else:
            found.append(asked)
        last, tokens = asked, tokens + 256
    return found


def burst(options: argparse.Namespace) -> list[Asked]:
    """Siblings: prompts within a second that begin alike."""
    siblings, shared, own, answer_tokens = 8, 4000, 100, 256
    rng = np.random.default_rng(options.seed)
    found: list[Asked] = []
    began_s = 0.0
    for number in range(options.requests // siblings):
        began_s += rng.exponential(siblings / options.rate)
        first = (number + 1) << 32
        for sibling, after_s in enumerate(rng.random(siblings).tolist()):
            apart = (sibling + 1) << 16
            pages = range((shared + own - 1) // PAGE)
            keys = [first + page + (apart if (page + 1) * PAGE > shared else 0) for page in pages]
            asked = np.array(keys, np.uint64)
            found.append(Asked(began_s + after_s, asked, shared + own, (), answer_tokens))
    return found


def main() -> None:
    """Prints a line for each load and policy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    loads = {"mooncake": mooncake, "talk": talk, "burst": burst}
    parser.add_argument("--load", nargs="+", default=list(loads), choices=list(loads))
    parser.add_argument("--policies", nargs="+", default=["least_work", "cost"])
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--pool-gib", type=float, default=96.0)
    parser.add_argument("--gbps", type=float, default=50.0)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--far-gbps", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--slack", type=float, nargs="+", default=[cost.SLACK])
    options = parser.parse_args()
    for load, policy, slack in itertools.product(options.load, options.policies, options.slack):
        vars(cost).update(SLACK=slack)
        run = Run(loads[load](options), policy, options)
        ttft = {
            name: [1e3 * (one.first_s - one.at_s) for one in run.done if one.seen_before >= least]
            for name, least in (("ttft", 0.0), ("ttft_shared", 0.5))
        }
        found = {
            f"{name}_p{q}_ms": round(float(np.percentile(values, q)), 1)
            for name, values in ttft.items()
            for q in (50, 90, 99)
        }
        tokens = sum(one.tokens for one in run.done)
        hits = sum(one.cached_tokens for one in run.done) / tokens
        delay_ms = 1e3 * sum(one.delay_s for one in run.machines) / len(run.done)
        setting = {"load": load, "policy": policy, "slack": slack}
        figures = {
            "hits": round(hits, 3),
            "delay_ms": round(delay_ms, 1),
            "most_rows": max(one.most_rows for one in run.machines),
            "choose_us": round(1e6 * run.choosing_s / len(run.done)),
            **run.ways,
        }
        print(json.dumps(setting | found | figures), flush=True)


if __name__ == "__main__":
    main()
