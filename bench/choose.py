"""What a router takes to choose among many workers, and to hear of their loads.

    python -m bench.choose [--workers 8 100 1000] [--repeats 5]

Half of the workers compute prompts and half decode. Nothing is sent: the links are a router's own,
without streams. Medians and the largest of all calls, by the process's CPU time:

- choose: a route for a prompt of 1,024 ids whose pages some workers hold, as `routing.choose` finds
  it. `full`: no worker has room, so that the head of a queue waits.
- admit: what the largest route could hold, which decides whether a request is refused.
- report: a load report of a worker that knows all others as its peers. They are left out where
  none is new.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from baton.worker.v1 import worker_pb2
from prefixes.index import Held
from router.dispatch.dispatcher import JobDispatcher
from router.jobs import Demand, ServedModel
from router.placement import routing
from router.placement.cost import Cost
from router.settings import RouterSettings
from router.workers.link import WorkerLink

PAGE_TOKENS = 16
MODEL = worker_pb2.ModelInfo(
    name="bench", fingerprint="f", max_context_tokens=1 << 17, page_size_tokens=PAGE_TOKENS
)
ROLES = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
CALLS = 100


class Known:
    """Every twentieth worker holds some pages of any prompt."""

    def __init__(self, links: list[WorkerLink]) -> None:
        self._held = {one.worker_id: Held.all(n % 60, n % 60) for n, one in enumerate(links[::20])}

    def held(self, _demand: Demand) -> dict[str, Held]:
        """Leading pages by worker."""
        return self._held


def links_of(owner: JobDispatcher, count: int) -> list[WorkerLink]:
    """Workers that have reported for the first time."""
    found = []
    for number, role in zip(range(count), itertools.cycle(ROLES), strict=False):
        endpoint = worker_pb2.KvEndpoint(agent_name=f"agent-{number}", transport="nixl")
        identity = worker_pb2.WorkerIdentity(
            worker_id=f"w{number:04}", epoch=1, role=role, model=MODEL, endpoint=endpoint
        )
        link = WorkerLink(identity, "router", owner, stale_after_s=60, attach_timeout_s=60)
        link._receive(worker_pb2.WorkResponse(attached=worker_pb2.Attached(worker=identity)))
        link._receive(worker_pb2.WorkResponse(load=load_of(number, count, 1)))
        found.append(link)
    return found


def load_of(number: int, count: int, progress: int, *, full: bool = False) -> worker_pb2.Load:
    """A report, with every worker as a peer."""
    return worker_pb2.Load(
        progress=progress,
        max_sequences=64,
        running_sequences=64 if full else number % 40,
        total_pages=1 << 15,
        free_pages=0 if full else (1 << 14) + number,
        prefill_credit_tokens=0 if full else 4096,
        queued_prefill_tokens=97 * number % 5000,
        prefill_tokens_per_s=45_000,
        peers=[
            worker_pb2.PeerHealth(agent_name=f"agent-{peer}", gigabytes_per_s=40 + peer % 7)
            for peer in range(count)
        ],
    )


def cost_ms(call: Callable[[], object], calls: int = CALLS) -> tuple[float, float]:
    """Median and largest."""
    found = []
    for _ in range(calls):
        began_s = time.thread_time()
        call()
        found.append(1e3 * (time.thread_time() - began_s))
    return statistics.median(found), max(found)


async def measure(count: int) -> dict[str, tuple[float, float]]:
    """Costs by name, ms."""
    settings = RouterSettings()
    dispatcher = JobDispatcher(settings)
    links = links_of(dispatcher, count)
    policy = Cost(Known(links))
    model = ServedModel.of(MODEL)
    keys: Any = np.arange(64, dtype=np.uint64)
    demand = Demand(model, 1024, 256, 1, holder="someone", keys=keys)
    failed, local = routing.Failed(), settings.local_prefill
    of = dispatcher._workers

    def chosen() -> object:
        return routing.choose(demand, of, policy, failed, local)

    assert chosen() is not None
    found = {"choose": cost_ms(chosen)}
    found["admit"] = cost_ms(lambda: routing.largest_pool_tokens(demand, of, local))
    progress = itertools.count(2)
    message = worker_pb2.WorkResponse(load=load_of(0, count, 0))
    peers = list(message.load.peers)
    del message.load.peers[:]

    def report(*, new: bool) -> None:
        message.load.progress = next(progress)
        message.load.same_peers = not new
        if new:
            del message.load.peers[:]
            message.load.peers.extend(peers)
            message.load.peers[count // 2].gigabytes_per_s += 1
        data = message.SerializeToString()
        began_s = time.thread_time()
        links[0]._receive(worker_pb2.WorkResponse.FromString(data))
        spent.append(1e3 * (time.thread_time() - began_s))

    for name, new in (("report", False), ("report, one peer new", True)):
        spent: list[float] = []
        for _ in range(CALLS):
            report(new=new)
        found[name] = statistics.median(spent), max(spent)
    for number, link in enumerate(links):
        load = load_of(number, count, 99, full=True)
        link._receive(worker_pb2.WorkResponse(load=load))
    assert chosen() is None
    found["choose, full"] = cost_ms(chosen)
    return found


def main() -> None:
    """A line for each number of workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 100, 1000])
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    for count in args.workers:
        for _ in range(args.repeats):
            found = asyncio.run(measure(count))
            report = (f"{name} {mid:.3f} (most {most:.2f})" for name, (mid, most) in found.items())
            print(f"{count:5} workers, ms: {', '.join(report)}", flush=True)


if __name__ == "__main__":
    main()
