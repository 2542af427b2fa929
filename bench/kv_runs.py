"""Into how many runs of neighbouring pages a prompt falls, once a server has run for a while.

python -m bench.kv_runs [--pages 20480] [--requests 3000]

A prefill and a decode worker's pool (20,480 pages of 2 MiB are 40 GiB) and requests one after
another, `live` of which are decoded at a time; nothing computed. All that they leave stays in the
prefix cache until it is evicted. Prints, by age of the server, how many descriptors a page takes: a
push merges pages that lie side by side at both ends.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np

from engine.pages.blocks import BlockManager
from engine.types import PageIds


class Load(NamedTuple):
    """Pages of a request, and how many requests are decoded at a time."""

    name: str
    prompt: int
    output: int
    live: int
    spread: float = 0.0
    """Sigma of the logarithm of `prompt`."""


LOADS = (
    Load("8000 + 200 tokens", 500, 12, 5),
    Load("1024 + 256 tokens", 64, 16, 40),
    Load("1120 (spread) + 224 tokens", 70, 14, 60, 1.0),
)
SPANS = ((0, 40), (100, 300), (-500, -1))


def descriptors(source: PageIds, target: PageIds) -> int:
    """Runs of pages that lie side by side at both ends."""
    return 1 + int(((np.diff(source) != 1) | (np.diff(target) != 1)).sum())


def keys(count: int, *name: int) -> list[bytes]:
    """That nobody else has."""
    return [b"%r %d" % (name, index) for index in range(count)]


def serve(load: Load, num_pages: int, requests: int) -> tuple[list[float], float, int]:
    """Descriptors a page, of each request; microseconds of an allocation for a prompt, median;
    pages of the decode worker's pool that are free at the end."""
    rng = np.random.default_rng(0)
    prefill, decode = BlockManager(num_pages), BlockManager(num_pages)
    live: list[PageIds] = []
    found, took_s = [], []
    for number in range(requests):
        size = max(1, round(load.prompt * rng.lognormal(0, load.spread)))
        began = time.perf_counter()
        source, target = prefill.allocate(size), decode.allocate(size)
        took_s.append((time.perf_counter() - began) / 2)
        found.append(descriptors(source, target) / size)
        prefill.publish(source, keys(size, number))
        prefill.release(source)
        live.append(target)
        if len(live) < load.live:
            continue
        for _ in range(load.output):  # They take turns to grow.
            grown = decode.allocate_apart(len(live))
            live = [np.append(pages, page) for pages, page in zip(live, grown, strict=True)]
        for index, pages in enumerate(live):
            decode.publish(pages, keys(len(pages), number, index))
            decode.release(pages)
        live = []
    return found, 1e6 * float(np.median(took_s)), decode.free


def main() -> None:
    """Prints a line a load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pages", type=int, default=20480)
    parser.add_argument("--requests", type=int, default=3000)
    arguments = parser.parse_args()
    for load in LOADS:
        found, allocation_us, free = serve(load, arguments.pages, arguments.requests)
        cells = [f"{first}..{last} {np.mean(found[first:last]):.3f}" for first, last in SPANS]
        print(f"{load.name:27} descriptors a page, requests {', '.join(cells)};", end=" ")
        print(f"{allocation_us:.0f} us an allocation, {free} pages free at the end", flush=True)


if __name__ == "__main__":
    main()
