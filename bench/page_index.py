"""What it costs to know who holds which pages: CPU, time, memory.

python -m bench.page_index [--keys 1000000] [--repeats 5]

Figures of the router, and of the worker that tells it:

    a key           the router's CPU time for an event: message parsed, index changed. The index has
                    all keys; messages have 250 events, half of pages that come, half that go
    snapshot        a worker in a process of its own tells of all keys over a real stream
    held            longest CPU time of a message's handler in the router, and of a sweep's turn
    match           who holds the 750 pages of a prompt of 12,000 tokens, four workers
    hash            keys of that prompt, on a tokenizing thread
    memory          of the router's index, of the worker's record
    step loop       what a page that gets a key costs the step loop more, once a router asked
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
import numpy as np

from baton.grpc_options import server_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from engine.pages.blocks import BlockManager
from engine.pages.prefix import tell_pages
from prefixes.codec import MOST_EVENTS, Events
from prefixes.index import GONE, POOL, SHARDS
from prefixes.keys import prompt_short_keys, short_keys
from prefixes.log import PageLog
from router.jobs import Demand, ServedModel
from router.workers.holdings import WorkerPages
from router.workers.link import LinkState, Loss, WorkerLink
from serving.garbage import set_apart
from worker_base.outbox import Outbox
from worker_base.page_reports import PageReports

MODEL = ServedModel("m", "r", "", 1 << 17, 1000, (), 16)
INFO = worker_pb2.ModelInfo(name="m", revision="r", fingerprint="f", prefix_cache=True)


def drawn(count: int, seed: int = 0) -> list[bytes]:
    """Keys of pages."""
    data = np.random.default_rng(seed).bytes(32 * count)
    return [data[at : at + 32] for at in range(0, len(data), 32)]


def identity(name: str, address: str = "") -> worker_pb2.WorkerIdentity:
    """A worker's."""
    return worker_pb2.WorkerIdentity(
        worker_id=name,
        epoch=7,
        address=address,
        role=worker_pb2.WORKER_ROLE_PREFILL,
        model=INFO,
        endpoint=worker_pb2.KvEndpoint(agent_name=f"{name}@7", transport="null"),
    )


class Servicer(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that does nothing but to tell of its pages."""

    def __init__(self, keys: list[bytes]) -> None:
        self.reports = PageReports(lambda tell: tell(POOL, keys))
        self.identity = identity("far")

    async def Work(self, requests: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Serves one router."""
        outbox = Outbox(lambda: None)

        async def read() -> None:
            async for request in requests:
                if request.HasField("pages_wanted"):
                    self.reports.wanted(request.pages_wanted, outbox)

        async def report() -> None:
            progress = 0
            while True:
                progress += 1
                sequence = self.reports.sequence
                outbox.report(
                    worker_pb2.Load(progress=progress, page_sequence=sequence), lambda _: True
                )
                await asyncio.sleep(0.1)

        await context.write(
            worker_pb2.WorkResponse(attached=worker_pb2.Attached(worker=self.identity))
        )
        parts = [asyncio.create_task(part) for part in (read(), report())]
        try:
            while (message := await outbox.get()) is not None:
                await context.write(message)
        finally:
            for part in parts:
                part.cancel()


def serve(keys: int, pipe: Connection) -> None:
    """A worker's process. It has told its record of all keys before a router comes."""

    async def main() -> None:
        servicer, server = Servicer(drawn(keys)), grpc.aio.server(options=server_options())
        before = resident()
        servicer.reports.wanted(worker_pb2.PagesWanted(), nobody := Outbox(lambda: None))
        servicer.reports.end_stream(nobody)
        while servicer.reports.sequence < keys:
            servicer.reports.turn()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send((port, resident() - before))
        await servicer.reports.report_forever()

    asyncio.run(main())


class Owner:
    """The router's part that owns the link. It times each message of pages."""

    def __init__(self) -> None:
        self.pages = WorkerPages()
        self.attached_s = self.told_s = 0.0
        self.cpu_s: list[float] = []

    def attached(self, link: WorkerLink) -> None:
        """Asks the worker."""
        self.attached_s = time.perf_counter()
        self.pages.attached(link)

    def loaded(self, link: WorkerLink) -> None:
        """See `WorkerPages`."""
        self.pages.loaded(link)

    def received(self, link: WorkerLink, message: worker_pb2.WorkResponse) -> None:
        """Takes a message of pages."""
        began_s = time.thread_time()
        self.pages.received(link, message)
        self.cpu_s.append(time.thread_time() - began_s)
        self.told_s = time.perf_counter()

    def lost(self, link: WorkerLink, loss: Loss, was: LinkState) -> None:
        """See `WorkerPages`."""
        self.pages.lost(link)


async def snapshot(keys: int) -> dict[str, float]:
    """A snapshot over a stream."""
    ours, theirs = mp.Pipe()
    worker = mp.get_context("spawn").Process(target=serve, args=(keys, theirs), daemon=True)
    worker.start()
    try:
        port, worker_bytes = await asyncio.to_thread(ours.recv)
        owner, before = Owner(), resident()
        far = identity("far", f"127.0.0.1:{port}")
        link = WorkerLink(far, "router", owner, stale_after_s=60, attach_timeout_s=60)
        running = asyncio.create_task(link.run())
        while owner.pages.load().keys.get(("far", "pool"), 0) < keys:
            await asyncio.sleep(0.05)
        router_bytes = resident() - before
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    finally:
        worker.terminate()
        worker.join()
    return {
        "snapshot, s": owner.told_s - owner.attached_s,
        "snapshot, s of the router's CPU": sum(owner.cpu_s),
        "held by a snapshot's part, ms": 1e3 * max(owner.cpu_s),
        "router, bytes a key": router_bytes / keys,
        "worker, bytes a key": worker_bytes / keys,
    }


class Silent:
    """A link that nobody reads."""

    def __init__(self, name: str) -> None:
        self.worker_id = name
        self.identity = identity(name)

    def send(self, message: worker_pb2.WorkRequest) -> None:
        """Drops it."""


def messages(keys: list[bytes], kinds: bytes, first: int, size: int) -> list[bytes]:
    """Events, as bytes of the wire."""
    shorts, found = short_keys(keys).astype("<u8"), []
    for at in range(0, len(keys), size):
        events = Events(first + at, shorts[at : at + size].tobytes(), kinds[at : at + size])
        message = worker_pb2.PageEvents(
            first_sequence=events.first, keys=events.keys, kinds=events.kinds
        )
        found.append(worker_pb2.WorkResponse(page_events=message).SerializeToString())
    return found


def begin(pages: WorkerPages, name: str) -> Any:
    """A worker that has told that it holds nothing."""
    link: Any = Silent(name)
    pages.attached(link)
    part = worker_pb2.PageSnapshot(sequence=0, first_shard=0, end_shard=SHARDS)
    pages.received(link, worker_pb2.WorkResponse(page_snapshot=part))
    return link


def hear(pages: WorkerPages, link: Any, said: list[bytes]) -> list[float]:
    """CPU seconds of each message."""
    spent = []
    for data in said:
        began_s = time.thread_time()
        pages.received(link, worker_pb2.WorkResponse.FromString(data))
        spent.append(time.thread_time() - began_s)
    return spent


async def index(keys: int) -> dict[str, float]:
    """The router's figures, without a stream."""
    pages, held = WorkerPages(), drawn(keys)
    links = [begin(pages, f"w{number}") for number in range(4)]
    said = messages(held, bytes((POOL,)) * keys, 1, MOST_EVENTS)
    set_apart()  # As in a router that is ready: else collections would walk over all that is here.
    growth = hear(pages, links[0], said)
    changed = drawn(50_000, seed=1)
    mixed = [key for pair in zip(changed, held, strict=False) for key in pair]
    kinds = bytes((POOL, POOL | GONE)) * len(changed)
    spent = hear(pages, links[0], messages(mixed, kinds, keys + 1, 250))
    prompt = held[-750:]
    for link, count in zip(links[1:], (700, 300, 10), strict=True):
        hear(pages, link, messages(prompt[:count], bytes((POOL,)) * count, 1, MOST_EVENTS))
    demand = Demand(MODEL, 12_001, 1, 1, keys=short_keys(prompt))
    assert pages.held(demand)["w0"].pool_pages == 750
    ids = np.random.default_rng(2).integers(0, 1000, 12_001).astype(np.uint32)
    sweeping: Any = next(iter(pages._families.values())).pages
    sweeping.leave("w0")
    sweeps: list[float] = []
    while timed(sweeping.sweep, sweeps):
        pass
    pages.close()
    return {
        "a key, us": 1e6 * sum(spent) / len(mixed),
        "held by growth, ms": 1e3 * max(growth),
        "held by a sweep, ms": 1e3 * max(sweeps),
        "match, ms": 1e3 * median_of(lambda: pages.held(demand)),
        "hash, ms": 1e3 * median_of(lambda: prompt_short_keys(ids, 16, "fp8", b"acme")),
    }


def timed(work: Callable[[], Any], spent: list[float]) -> Any:
    """Its result. Adds its CPU seconds."""
    began_s = time.thread_time()
    result = work()
    spent.append(time.thread_time() - began_s)
    return result


def median_of(work: Callable[[], Any], count: int = 200) -> float:
    """CPU seconds."""
    spent: list[float] = []
    for _ in range(count):
        timed(work, spent)
    return statistics.median(spent)


def step_loop(*, told: bool, pages: int = 100_000) -> float:
    """CPU seconds of a page that gets a key."""
    blocks, queue = BlockManager(pages + 1), list[object]()
    if told:
        tell_pages(blocks, POOL, lambda kind, keys: queue.append((kind, keys)))
    ids, keys = blocks.allocate(pages).tolist(), drawn(pages)
    spent: list[float] = []
    timed(lambda: blocks.adopt(ids, keys, range(pages)), spent)
    return spent[0] / pages


def log_cost(keys: list[bytes]) -> float:
    """CPU seconds of the worker's event loop for an event."""
    log, spent = PageLog(), list[float]()
    for at in range(0, len(keys), 250):
        some = keys[at : at + 250]
        timed(partial(log.write, some, bytes((POOL,)) * len(some)), spent)
        timed(lambda: log.events(log.end - 250), spent)
    return sum(spent) / len(keys)


def resident() -> int:
    """Bytes of memory that this process has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def once(keys: int) -> dict[str, float]:
    """All figures of one run."""
    found = asyncio.run(snapshot(keys)) | asyncio.run(index(keys))
    return found | {
        "worker's event loop, us an event": 1e6 * log_cost(drawn(100_000)),
        "step loop, us a page": 1e6 * step_loop(told=False),
        "step loop, us a page that is told": 1e6 * step_loop(told=True),
    }


def main() -> None:
    """Prints the medians of all figures, least and most beside them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    context = mp.get_context("spawn")  # A process for each run: memory is counted from nothing.
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        runs = list(pool.map(once, [options.keys] * options.repeats))
    for name in runs[0]:
        found = [run[name] for run in runs]
        print(f"{name:34} {statistics.median(found):9.3f}  ({min(found):.3f} - {max(found):.3f})")


if __name__ == "__main__":
    main()
