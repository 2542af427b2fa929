"""A disk store's rates by its child process: objects of 256 tokens, in questions of eight.

python -m bench.disk_store FOLDER [--gib 8] [--page-kib 2048] [--seconds 30] [--json FILE]

Writes first, then reads what was written; each direction ends after so many seconds. Of interest is
a local NVMe of a GPU machine. No GPU is needed.
"""

from __future__ import annotations

import argparse
import os
import queue
import time
from pathlib import Path

import numpy as np
import torch

from bench.harness import write_json
from engine.tiers.arena import HostArena
from engine.tiers.stores.messages import LOAD, STORE, Opening
from engine.tiers.stores.process import Job, StoreProcess

GIB = 1 << 30
PAGES, OBJECTS = 128, 8
"""Size of a question. An object is 16 pages."""


def rates(folder: str, gib: float, page_kib: int, most_s: float) -> dict[str, float]:
    """Bytes a second of both directions."""
    page_bytes = page_kib << 10
    done: queue.SimpleQueue[tuple[StoreProcess, Job]] = queue.SimpleQueue()
    arena = HostArena((PAGES + 1) * page_bytes, page_bytes, torch.device("cpu"))
    arena.slots.random_(0, 256)
    opening = Opening(
        f"disk:{folder}?gib={gib}", [arena.fd], PAGES + 1, arena.slot_bytes, "f" * 32,
        [(0, OBJECTS)], PAGES // OBJECTS,
    )  # fmt: skip
    process, found = StoreProcess(opening, done), {}
    most = int(gib * GIB / process.object_bytes) // OBJECTS
    slots = np.split(np.arange(1, PAGES + 1, dtype=np.int32), OBJECTS)
    for verb in (STORE, LOAD):
        rounds, began = 0, time.perf_counter()
        while rounds < most and time.perf_counter() - began < most_s:
            keys = [(OBJECTS * rounds + i).to_bytes(32, "big") for i in range(OBJECTS)]
            process.ask(Job(verb, keys, slots))
            _, job = done.get(timeout=60)
            assert all(job.good), "an object did not go or come"
            rounds += 1
        moved = OBJECTS * rounds * process.object_bytes
        found[str(verb)] = moved / (time.perf_counter() - began)
        print(f"{verb}: {found[str(verb)] / 1e9:.2f} GB/s over {rounds} questions", flush=True)
        most = rounds  # No more are there.
    process.stop()
    return found


def way(folder: str) -> str:
    """Whether the file system reads and writes past its cache, as the store asks it to."""
    try:
        os.close(os.open(Path(folder) / "pages", os.O_RDWR | os.O_DIRECT))
    except OSError:
        return "through the page cache"
    return "direct"


def main() -> None:
    """Measures one folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--page-kib", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = rates(given.folder, given.gib, given.page_kib, given.seconds)
    print(f"{given.folder}: {way(given.folder)}")
    write_json(given.json, found)


if __name__ == "__main__":
    main()
