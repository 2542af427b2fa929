"""What the tiers below the KV pool cost and bring, on the machine at hand.

python -m bench.kv_tiers link [--gib 8] [--page-kib 2048] [--runs 5]
    copies by the lanes' mover against plain copies of pinned memory, each way and both at once
python -m bench.kv_tiers engine MODEL [--host-gib 16] [--kv-gib 16] [--dummy] [--runs 5]
    8,000 and 2,000 tokens from the host tier; a sequence of 2,000 swapped in; steps of 64 rows
    beside saves of 4 GB/s
python -m bench.kv_tiers disk FOLDER [--gib 8] [--page-kib 2048] [--seconds 30]
    a disk store's rates, by its child process; each direction ends after so many seconds
python -m bench.kv_tiers steps [--runs 5] [--fresh]
    steps of a loop that computes nothing, without tiers, with them, and over stores that hang or
    are killed; runs in turns. Prompts share prefixes, which are loaded; `--fresh`: pages are only
    saved

On one GPU: `link`, then `engine` with an 8B model, then `disk` on a local NVMe. `steps` needs no
GPU. All print medians of the runs that they name.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from bench.tier_engine import GIB, ROWS, Clients, measure
from engine.bounds import Bounds
from engine.config import LoadFormat
from engine.loop.step_loop import StepLoop
from engine.pages.blocks import BlockManager
from engine.sampling import Sampler
from engine.schedule.scheduler import Scheduler
from engine.step.executor import NullExecutor
from engine.tiers.arena import HostArena
from engine.tiers.build import StoreConfig, build_tiers
from engine.tiers.movers import PageMover, mover_for
from faults import failpoints

KIB = 1 << 10
RUNS = 5
PROMPT_STEPS = 8


# -- link -----------------------------------------------------------------------------------------


def link(gib: float, page_kib: int, runs: int) -> None:
    """Rates of the mover and of plain copies."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    page_bytes, count = page_kib * KIB, int(gib * GIB) // (page_kib * KIB)
    pool = torch.zeros((count, page_bytes), dtype=torch.uint8, device=device)
    plain = torch.zeros((count, page_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    arena = HostArena(count * page_bytes, page_bytes, device)
    mover = mover_for(pool, arena.slots)
    places = np.arange(count, dtype=np.int32)
    apart = np.random.default_rng(0).permutation(count).astype(np.int32)
    report = {
        "plain to host": lambda: _timed(lambda: plain.copy_(pool, non_blocking=True), device),
        "plain to device": lambda: _timed(lambda: pool.copy_(plain, non_blocking=True), device),
        "save, one run": lambda: _timed(lambda: mover.save(places, places), device),
        "load, one run": lambda: _timed(lambda: mover.load(places, places), device),
        "save, pages apart": lambda: _timed(lambda: mover.save(apart, places), device),
        "load, pages apart": lambda: _timed(lambda: mover.load(places, apart), device),
        "both ways at once": lambda: 0.5 * _timed(lambda: _both(mover, places), device),
    }
    rates: dict[str, float] = {}
    for name, run in report.items():
        run()
        seconds = statistics.median(run() for _ in range(runs))
        rates[name] = count * page_bytes / seconds / 1e9
        share = ""
        if name[:4] in ("save", "load"):
            plain_way = "plain to host" if name.startswith("save") else "plain to device"
            share = f", {rates[name] / rates[plain_way]:.0%} of plain"
        print(f"{name}: {rates[name]:.1f} GB/s{share}", flush=True)


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


# -- steps ----------------------------------------------------------------------------------------


def steps(runs: int, fresh: bool) -> None:
    """Durations of steps that compute nothing, while prompts come and go."""
    kinds = ("off", "host", "disk", "disk hangs", "disk is killed")
    figures: dict[str, list[list[tuple[float, float]]]] = {kind: [] for kind in kinds}
    for _ in range(runs):
        for kind in kinds:
            figures[kind].append(_null_steps(kind, fresh))
    for kind, measured in figures.items():
        words = []
        for column, name in enumerate(("by the clock", "of the loop's CPU time")):
            ordered = [sorted(row[column] for row in run) for run in measured]
            p50, p99 = (
                1e3 * statistics.median(run[int(share * len(run))] for run in ordered)
                for share in (0.5, 0.99)
            )
            words.append(f"p50 {p50:.3f} ms, p99 {p99:.3f} {name}")
        print(f"{kind}: {'; '.join(words)}", flush=True)


def _null_steps(kind: str, fresh: bool) -> list[tuple[float, float]]:
    """For each step with all rows its seconds: by the clock, and of the loop's thread. A prompt
    comes with every eighth step, so that all kinds have the same share of steps with prompts."""
    points = {"disk hangs": "store.store=hang@20", "disk is killed": "store.store=kill@20"}
    failpoints.arm(points.get(kind, ""))
    durations: list[tuple[float, float]] = []
    used_s, due = 0.0, threading.Semaphore(0)

    def on_step(seconds: float, rows: int) -> None:
        nonlocal used_s
        before, used_s = used_s, time.thread_time()
        if rows >= ROWS:
            durations.append((seconds, used_s - before))
            if len(durations) % PROMPT_STEPS == 0:
                due.release()

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
            before = clients.prompt(512) if fresh else shared[number * 7 % 40]
            if due.acquire(timeout=0.1):
                clients.run(np.concatenate([before, clients.prompt(32)]))
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
    tiers = build_tiers(host, [pool], [blocks], "lru", bounds.page_size, stores)
    sampler = Sampler(bounds.max_sequences, 1000, "cpu", [])
    return StepLoop(Scheduler(bounds, blocks, sampler, tiers=tiers), NullExecutor())


# -- disk -----------------------------------------------------------------------------------------


def disk(folder: str, gib: float, page_kib: int, most_s: float) -> None:
    """Rates of a disk store's child, in objects of 256 tokens and questions of 8 objects."""
    import queue

    from engine.tiers.stores.messages import LOAD, STORE, Opening
    from engine.tiers.stores.process import Job, StoreProcess

    page_bytes, done = page_kib * KIB, queue.SimpleQueue()  # type: ignore[var-annotated]
    arena = HostArena(129 * page_bytes, page_bytes, torch.device("cpu"))
    arena.slots.random_(0, 256)
    opening = Opening(
        f"disk:{folder}?gib={gib}", [arena.fd], 129, arena.slot_bytes, "f" * 32, [(0, 8)], 16
    )
    process = StoreProcess(opening, done)
    print(f"{folder}: {_way(folder)}", flush=True)
    most = int(gib * GIB / process.object_bytes) // 8
    for verb in (STORE, LOAD):
        rounds, began = 0, time.perf_counter()
        while rounds < most and time.perf_counter() - began < most_s:
            keys = [(8 * rounds + i).to_bytes(32, "big") for i in range(8)]
            process.ask(Job(verb, keys, np.split(np.arange(1, 129, dtype=np.int32), 8)))
            _, job = done.get(timeout=60)
            assert all(job.good), "an object did not go or come"
            rounds += 1
        rate = 8 * rounds * process.object_bytes / (time.perf_counter() - began)
        print(f"{verb}: {rate / 1e9:.2f} GB/s over {rounds} questions of 8 objects", flush=True)
        most = rounds  # No more are there.
    process.stop()


def _way(folder: str) -> str:
    """Whether the file system reads and writes past its cache, as the store asks it to."""
    try:
        os.close(os.open(Path(folder) / "pages", os.O_RDWR | os.O_DIRECT))
    except OSError:
        return "through the page cache"
    return "direct"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="costs of tiers below the KV pool")
    parser.add_argument("what", choices=["link", "engine", "disk", "steps"])
    parser.add_argument("where", nargs="?", default="")
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--page-kib", type=int, default=2048)
    parser.add_argument("--host-gib", type=float, default=16)
    parser.add_argument("--kv-gib", type=float, default=16)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--dummy", action="store_true")
    options = parser.parse_args()
    if options.what in ("engine", "disk") and not options.where:
        parser.error(f"{options.what} needs a model or a folder")
    if options.what == "link":
        link(options.gib, options.page_kib, options.runs)
    elif options.what == "engine":
        load_format: LoadFormat = "dummy" if options.dummy else "auto"
        measure(options.where, options.host_gib, options.kv_gib, load_format, options.runs)
    elif options.what == "disk":
        disk(options.where, options.gib, options.page_kib, options.seconds)
    else:
        steps(options.runs, options.fresh)


if __name__ == "__main__":
    main()
