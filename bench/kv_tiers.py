"""What the tiers below the KV pool cost and bring, on the machine at hand.

python -m bench.kv_tiers link [--gib 8] [--page-kib 2048]
    copies by the lanes' mover against plain copies of pinned memory, each way and both at once
python -m bench.kv_tiers engine MODEL [--host-gib 64] [--kv-gib 16] [--dummy]
    steps of 64 rows beside saves of 4 GB/s; 8,000 tokens from the host tier; 2,000 swapped
python -m bench.kv_tiers disk FOLDER [--gib 8] [--page-kib 2048]
    a disk store's rates, by its child process
python -m bench.kv_tiers steps [--runs 5]
    steps of a loop that computes nothing, without tiers, with them, and over stores that hang or
    are killed; runs in turns

On one H200: `link`, then `engine` with an 8B model, then `disk` on a local NVMe. `steps` needs no
GPU. All print medians of the runs that they name.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.bounds import Bounds
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop.executor import NullExecutor
from engine.loop.step_loop import StepLoop
from engine.pages.blocks import BlockManager
from engine.sampling import Sampler
from engine.schedule.preemption import preempt
from engine.schedule.scheduler import Scheduler
from engine.tiers.arena import HostArena
from engine.tiers.build import StoreConfig, build_tiers
from engine.tiers.lanes import Copy
from engine.tiers.movers import PageMover, mover_for
from engine.types import (
    Event,
    NewTokens,
    Request,
    RequestFailed,
    SamplingParams,
    SequenceEnded,
    StopRules,
)
from telemetry import failpoints

GIB, KIB = 1 << 30, 1 << 10
RUNS = 5
SAVED_BYTES_PER_S = 4e9
ROWS = 64
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Client:
    """One request, and when its tokens came."""

    request: Request
    at_s: list[float] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class Clients:
    """Makes requests of random tokens, no two alike."""

    def __init__(self, submit: Callable[..., None], vocab: int) -> None:
        self._submit, self._vocab = submit, vocab
        self._rng = np.random.default_rng(1)
        self._count = 0
        self._open: dict[bytes, Client] = {}

    def _sink(self, events: Sequence[Event]) -> None:
        """Takes the events of all requests, as a router's stream does."""
        for event in events:
            if isinstance(event, NewTokens):
                now = time.perf_counter()
                for request_id in event.request_ids:
                    client = self._open[request_id]
                    client.at_s.append(now)
                    if len(client.at_s) == 1:
                        client.begun.set()
            elif isinstance(event, SequenceEnded):
                self._open.pop(event.request_id).ended.set()
            elif isinstance(event, RequestFailed):
                raise RuntimeError(f"a request failed: {event.reason}")

    def prompt(self, tokens: int) -> np.ndarray:
        """Random tokens."""
        return self._rng.integers(0, self._vocab, tokens).astype(np.int32)

    def send(self, prompt: np.ndarray, max_tokens: int) -> Client:
        """Submits a request."""
        self._count += 1
        stop = StopRules(max_tokens, ignore_eos=True)
        client = Client(Request(self._count.to_bytes(16, "big"), prompt, GREEDY, stop))
        self._open[client.request.id] = client
        self._submit(client.request, self._sink)
        return client

    def run(self, prompt: np.ndarray, max_tokens: int = 1) -> float:
        """Runs a request. Returns its time to first token, seconds."""
        began = time.perf_counter()
        client = self.send(prompt, max_tokens)
        if not client.ended.wait(300):
            raise RuntimeError("a request did not end")
        return client.at_s[0] - began


# -- link -----------------------------------------------------------------------------------------


def link(gib: float, page_kib: int) -> None:
    """Rates of the mover and of plain copies."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    page_bytes, count = page_kib * KIB, int(gib * GIB) // (page_kib * KIB)
    pool = torch.zeros((count, page_bytes), dtype=torch.uint8, device=device)
    plain = torch.zeros((count, page_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    arena = HostArena(count * page_bytes, page_bytes, device)
    mover = mover_for(pool, arena.slots)
    runs = np.arange(count, dtype=np.int32)
    apart = np.random.default_rng(0).permutation(count).astype(np.int32)
    report = {
        "plain to host": lambda: _timed(lambda: plain.copy_(pool, non_blocking=True), device),
        "plain to device": lambda: _timed(lambda: pool.copy_(plain, non_blocking=True), device),
        "save, one run": lambda: _timed(lambda: mover.save(runs, runs), device),
        "load, one run": lambda: _timed(lambda: mover.load(runs, runs), device),
        "save, pages apart": lambda: _timed(lambda: mover.save(apart, runs), device),
        "load, pages apart": lambda: _timed(lambda: mover.load(runs, apart), device),
        "both ways at once": lambda: 0.5 * _timed(lambda: _both(mover, runs), device),
    }
    for name, run in report.items():
        run()
        seconds = statistics.median(run() for _ in range(RUNS))
        print(f"{name}: {count * page_bytes / seconds / 1e9:.1f} GB/s")


def _timed(copy: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    copy()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _both(mover: PageMover, runs: np.ndarray) -> None:
    half = len(runs) // 2
    with ThreadPoolExecutor(2) as threads:
        saves = threads.submit(mover.save, runs, runs)
        loads = threads.submit(mover.load, np.roll(runs, half), np.roll(runs, half))
        saves.result(), loads.result()


# -- engine ---------------------------------------------------------------------------------------


def engine(model: str, host_gib: float, kv_gib: float, load_format: str) -> None:
    """A whole engine with a host tier."""
    built = Engine.build(
        EngineConfig(
            model=model,
            load_format=load_format,
            kv_memory_bytes=int(kv_gib * GIB),
            kv_host_bytes=int(host_gib * GIB),
            max_sequences=ROWS + 1,
        )
    )
    steps: list[float] = []
    built.start(lambda seconds, rows: steps.append(seconds) if rows >= ROWS else None)
    clients = Clients(built.submit, built.model.vocab_size)
    try:
        for tokens in (8000, 8000):
            clients.run(clients.prompt(min(tokens, built.model.max_context_tokens - 64)))
        _from_host(built, clients)
        _swapped(built, clients)
        _beside_saves(built, clients, steps)
    finally:
        built.stop()


def _from_host(built: Engine, clients: Clients) -> None:
    tokens = min(8000, built.model.max_context_tokens - 64)
    computed, loaded = [], []
    for _ in range(RUNS):
        prompt = clients.prompt(tokens)
        computed.append(clients.run(prompt))
        _evict_all(built)
        loaded.append(clients.run(prompt))
    tiers = built.load().tiers
    print(
        f"{tokens} tokens, first token: computed {1e3 * statistics.median(computed):.1f} ms,"
        f" from the host tier {1e3 * statistics.median(loaded):.1f} ms"
        f" ({tiers.loaded_tokens if tiers else {}})"
    )


def _evict_all(built: Engine) -> None:
    """Saves and evicts every cached page."""

    def evict(scheduler: Scheduler) -> None:
        scheduler.blocks.release(scheduler.blocks.allocate_apart(scheduler.blocks.available))

    def save(scheduler: Scheduler) -> None:
        tiers = scheduler.tiers
        loans = scheduler.blocks.lend(64)
        tiers._saves._save(loans, held=False)  # type: ignore[attr-defined]

    while (load := built.load()).evictable_pages:
        unsaved = [0]

        def look(scheduler: Scheduler, unsaved: list[int] = unsaved) -> None:
            blocks = scheduler.blocks
            unsaved[0] = blocks.free + blocks.evictable - blocks.ready

        _on_loop(built, look)
        if load.tiers is None or not unsaved[0]:
            break
        _on_loop(built, save)
        time.sleep(0.002)
    _on_loop(built, evict)


def _on_loop(built: Engine, command: Callable[[Scheduler], None]) -> None:
    done = threading.Event()

    def run(scheduler: Scheduler) -> None:
        command(scheduler)
        done.set()

    built._loop.post(run)
    if not done.wait(60):
        raise RuntimeError("the step loop stands still")


def _swapped(built: Engine, clients: Clients) -> None:
    tokens = min(2000, built.model.max_context_tokens // 2)
    gaps = []
    for _ in range(RUNS):
        client = clients.send(clients.prompt(tokens), 200)
        client.begun.wait(60)
        began = [0.0]

        def strike(
            scheduler: Scheduler, client: Client = client, began: list[float] = began
        ) -> None:
            active = scheduler.requests[client.request.id]
            preempt(scheduler, active.sequences[0])
            began[0] = time.perf_counter()

        _on_loop(built, strike)
        client.ended.wait(60)
        gaps.append(next(at for at in client.at_s if at > began[0] + 1e-4) - began[0])
    print(
        f"{tokens} tokens preempted: {1e3 * statistics.median(gaps):.1f} ms to the next token,"
        " with the step in flight; the pages were still in the pool"
    )


def _beside_saves(built: Engine, clients: Clients, steps: list[float]) -> None:
    figures: dict[str, list[list[float]]] = {"alone": [], "saving": []}
    for _ in range(RUNS):
        for name, rate in (("alone", 0.0), ("saving", SAVED_BYTES_PER_S)):
            rows = [clients.send(clients.prompt(64), 300) for _ in range(ROWS)]
            for row in rows:
                row.begun.wait(60)
            steps.clear()
            with _saving(built, rate):
                for row in rows:
                    row.ended.wait(120)
            figures[name].append(sorted(steps))
    for name, runs in figures.items():
        p50 = statistics.median(run[len(run) // 2] for run in runs)
        p99 = statistics.median(run[int(0.99 * len(run))] for run in runs)
        print(f"{ROWS} rows, {name}: step p50 {1e3 * p50:.3f} ms, p99 {1e3 * p99:.3f} ms")


@contextmanager
def _saving(built: Engine, bytes_per_s: float) -> Iterator[None]:
    """Copies pages to slots that nobody uses, at this rate."""
    tiers = built._loop._scheduler.tiers
    slots = np.zeros(0, np.int32)

    def take(scheduler: Scheduler) -> None:
        nonlocal slots
        slots = tiers._host.allocate(64)  # type: ignore[attr-defined]

    def give_back(scheduler: Scheduler) -> None:
        tiers._host.release(slots)  # type: ignore[attr-defined]

    _on_loop(built, take)
    over = threading.Event()

    def copy() -> None:
        batch = Copy(pages=np.arange(1, 65, dtype=np.int32), slots=slots)
        size = 64 * built.pool.page_bytes
        due = time.perf_counter()
        while bytes_per_s and not over.wait(max(0.0, due - time.perf_counter())):
            tiers._lanes.saves.move(batch)  # type: ignore[attr-defined]
            due += size / bytes_per_s

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _on_loop(built, give_back)


# -- steps ----------------------------------------------------------------------------------------


def steps(runs: int) -> None:
    """Durations of steps that compute nothing, while prompts come and go."""
    kinds = ("off", "host", "disk", "disk hangs", "disk is killed")
    figures: dict[str, list[list[tuple[float, float]]]] = {kind: [] for kind in kinds}
    for _ in range(runs):
        for kind in kinds:
            figures[kind].append(_null_steps(kind))
    for kind, measured in figures.items():
        words = []
        for column, name in enumerate(("by the clock", "of the loop's CPU time")):
            ordered = [sorted(row[column] for row in run) for run in measured]
            p50, p99 = (
                1e3 * statistics.median(run[int(share * len(run))] for run in ordered)
                for share in (0.5, 0.99)
            )
            words.append(f"p50 {p50:.3f} ms, p99 {p99:.3f} {name}")
        print(f"{kind}: {'; '.join(words)}")


def _null_steps(kind: str) -> list[tuple[float, float]]:
    """For each step with all rows its seconds: by the clock, and of the loop's thread."""
    points = {"disk hangs": "store.store=hang@20", "disk is killed": "store.store=kill@20"}
    failpoints.arm(points.get(kind, ""))
    durations: list[tuple[float, float]] = []
    used_s = 0.0

    def on_step(seconds: float, rows: int) -> None:
        nonlocal used_s
        before, used_s = used_s, time.thread_time()
        if rows >= ROWS:
            durations.append((seconds, used_s - before))

    with tempfile.TemporaryDirectory() as folder:
        loop = _null_loop(kind, folder)
        failpoints.arm("")
        loop.start(on_step)
        clients = Clients(loop.submit, 1000)
        rows = [clients.send(clients.prompt(16), 3000) for _ in range(ROWS)]
        shared = [clients.prompt(512) for _ in range(40)]
        number = 0
        while not rows[0].ended.is_set():
            number += 1
            again = np.concatenate([shared[number * 7 % 40], clients.prompt(32)])
            clients.run(again)
            time.sleep(0.002)
        loop.stop()
    return durations


def _null_loop(kind: str, folder: str) -> StepLoop:
    pages, page_bytes = 14_000, 16 * KIB
    bounds = Bounds(
        max_sequences=ROWS + 8, max_step_tokens=2048, max_context_tokens=8192, page_watermark=1.0
    )
    blocks = BlockManager(pages)
    pool = torch.zeros((pages, page_bytes), dtype=torch.uint8)
    stores = StoreConfig((f"disk:{folder}?gib=0.5",) if kind.startswith("disk") else (), "", "f")
    host = 0 if kind == "off" else 600 * page_bytes
    tiers = build_tiers(host, pool, blocks, "lru", bounds.page_size, stores)
    sampler = Sampler(bounds.max_sequences, 1000, "cpu", [])
    return StepLoop(Scheduler(bounds, blocks, sampler, tiers=tiers), NullExecutor())


# -- disk -----------------------------------------------------------------------------------------


def disk(folder: str, gib: float, page_kib: int) -> None:
    """Rates of a disk store's child, in objects of 256 tokens and questions of 8 objects."""
    import queue

    from engine.tiers.stores.messages import LOAD, STORE, Opening
    from engine.tiers.stores.process import Job, StoreProcess

    page_bytes, done = page_kib * KIB, queue.SimpleQueue()  # type: ignore[var-annotated]
    arena = HostArena(129 * page_bytes, page_bytes, torch.device("cpu"))
    arena.slots.random_(0, 256)
    opening = Opening(
        f"disk:{folder}?gib={gib}", arena.fd, 129, arena.slot_bytes, "f" * 32, (0, 8), 16
    )
    process = StoreProcess(opening, done)
    rounds = int(gib * GIB / process.object_bytes) // 8
    for verb in (STORE, LOAD):
        began = time.perf_counter()
        for number in range(rounds):
            keys = [(8 * number + i).to_bytes(32, "big") for i in range(8)]
            process.ask(Job(verb, keys, np.split(np.arange(1, 129, dtype=np.int32), 8)))
            _, job = done.get(timeout=60)
            assert all(job.good), "an object did not go or come"
        rate = 8 * rounds * process.object_bytes / (time.perf_counter() - began)
        print(f"{verb}: {rate / 1e9:.2f} GB/s over {rounds} questions of 8 objects")
    process.stop()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="costs of tiers below the KV pool")
    parser.add_argument("what", choices=["link", "engine", "disk", "steps"])
    parser.add_argument("where", nargs="?", default="")
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--page-kib", type=int, default=2048)
    parser.add_argument("--host-gib", type=float, default=64)
    parser.add_argument("--kv-gib", type=float, default=16)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--dummy", action="store_true")
    options = parser.parse_args()
    if options.what == "link":
        link(options.gib, options.page_kib)
    elif options.what == "engine":
        load_format = "dummy" if options.dummy else "auto"
        engine(options.where, options.host_gib, options.kv_gib, load_format)
    elif options.what == "disk":
        disk(options.where, options.gib, options.page_kib)
    else:
        steps(options.runs)


if __name__ == "__main__":
    main()
