"""What products of few rows in bf16 cost on one GPU: the kernel of ours by its cuts, and cuBLAS.

    python -m bench.few_rows [--rows N ...] [--seconds S] [--json FILE]

1. Other processes compile everything first, and try it against float64. A cut that fails is left
   out, and said.
2. For each weight of the 8B shape and number of rows: the best cuts, the engine's own (`*`), and
   cuBLAS. `floor` is the weight's bytes at what a copy between two buffers reaches here.
3. The products of all layers and the head, in ms: by the engine's own cuts, the best, and cuBLAS.

As in `bench.products`, a figure is the median of ten replays of a graph with more weights than a
cache holds.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from bench.products import CACHE_BYTES, SHAPES, graph_us
from engine.cuda.products.few_rows import Tiles, few_rows
from engine.cuda.products.sixteen_bits import tiles_of

WEIGHTS: Final = {**SHAPES, "head": (128256, 4096)}
TIMES: Final = {"qkv": 32, "o": 32, "gate-up": 32, "down": 32, "head": 1}
"""Products of a step."""
ROWS: Final = (2, 4, 8, 16, 32)
PROCESSES: Final = 14
MOST_ERROR: Final = 4e-3
LINES: Final = 4

Way = Tiles | None
"""None is cuBLAS."""


def ways_of(shape: str) -> Iterator[Way]:
    """What is tried."""
    yield None
    count = WEIGHTS[shape][0] // 64
    for parts, (bk, stages), ahead in product(
        (1, 2, 4, 8), ((64, 4), (64, 8), (128, 3), (128, 4), (256, 3)), (0, 256)
    ):
        if parts == 1 or count * parts <= 600:
            yield Tiles(64, bk, parts, stages, 4, ahead)
    for parts in (1, 2, 4):
        if parts == 1 or count // 2 * parts <= 600:
            yield Tiles(128, 64, parts, 5, 4, 0)
            yield Tiles(128, 128, parts, 3, 4, 0)


def run(way: Way, weight: Tensor, x: Tensor) -> Tensor:
    """[T, N] bf16."""
    if way is None:
        return functional.linear(x, weight)
    return few_rows(weight, None, x, None, None, torch.bfloat16, way)


def drawn(*shape: int) -> Tensor:
    """Random."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02


def tried(shape: str, rows: int, ways: list[Way]) -> list[tuple[Way, str]]:
    """Compiles and runs each way twice, in a process of its own. Says what is wrong, or nothing."""
    torch.manual_seed(0)
    outputs, inputs = WEIGHTS[shape]
    weight, x = drawn(min(outputs, 6144), inputs), drawn(rows, inputs)
    exact = x.double() @ weight.double().t()
    found = []
    for way in ways:
        try:
            first, again = run(way, weight, x), run(way, weight, x)
            error = float((first.double() - exact).norm() / exact.norm())
            same = torch.equal(first, again)
            found.append((way, "" if error < MOST_ERROR and same else f"error {error}, {same}"))
        except Exception as failed:  # The other ways are worth their figures.
            found.append((way, f"{type(failed).__name__}: {str(failed)[:200]}"))
    return found


def compiled(rows: tuple[int, ...], seconds: float) -> set[tuple[int, Way]]:
    """Ways that work with so many rows. Compiled code does not depend on the weight's size."""
    begin, works = time.perf_counter(), set()
    pool = ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"))
    every = list(dict.fromkeys(way for shape in WEIGHTS for way in ways_of(shape)))
    waiting = {
        pool.submit(tried, "qkv", m, every[part::4]): (m, part)
        for m, part in product(rows, range(4))
    }
    workers = list(pool._processes.values())
    for future, (m, _) in waiting.items():
        try:
            found = future.result(max(1.0, seconds - (time.perf_counter() - begin)))
        except Exception as failed:  # As above.
            print(f"{m} rows: {type(failed).__name__} {failed}", flush=True)
            continue
        works |= {(m, way) for way, wrong in found if not wrong}
        for way, wrong in found:
            if wrong:
                print(f"{m} rows, {way}: {wrong}", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()  # One may hang.
    print(f"compiled in {time.perf_counter() - begin:.0f} s: {len(works)} ways", flush=True)
    return works


def copy_rate() -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    us = graph_us([lambda: target.copy_(source)] * 4)
    return 2 * len(source) / us * 1e6


def swept(shape: str, rows: int, ways: list[Way], rate: float) -> dict[str, Any]:
    """Microseconds of the ways on one weight."""
    outputs, inputs = WEIGHTS[shape]
    size = 2 * outputs * inputs
    weights = [drawn(outputs, inputs) for _ in range(max(2, math.ceil(CACHE_BYTES / size)))]
    x, own, found = drawn(rows, inputs), tiles_of(outputs, inputs, rows), []
    for way in ways:
        us = graph_us([lambda w=w, way=way: run(way, w, x) for w in weights])  # type: ignore[misc]
        found.append((us, way))
    found.sort(key=lambda pair: pair[0])
    floor = size / rate * 1e6
    for place, (us, way) in enumerate(found):
        if place < LINES or way in (own, None):
            mark, name = "*" if way == own else " ", "cuBLAS" if way is None else str(way)
            print(
                f"{shape:>8} {rows:3d} rows {us:7.2f} us, floor x {us / floor:4.2f} {mark} {name}",
                flush=True,
            )
    times = {str(way): us for us, way in found}
    ours = [us for us, way in found if way is not None]
    return {
        "shape": shape, "rows": rows, "floor": floor, "ways": times, "cublas": times["None"],
        "own": times[str(own)], "best": ours[0] if ours else math.nan,
    }  # fmt: skip


def main() -> None:
    """Measures all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=120, help="for compiling")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    rate, name = copy_rate(), torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, copies {rate / 1e12:.2f} TB/s", flush=True)
    works = compiled(tuple(arguments.rows), arguments.seconds)
    found = []
    for rows, shape in product(arguments.rows, WEIGHTS):
        own = tiles_of(*WEIGHTS[shape], rows)
        ways = [way for way in dict.fromkeys((own, *ways_of(shape))) if (rows, way) in works]
        found.append(swept(shape, rows, ways, rate))
    print(f"{'rows':>5} {'floor':>7} {'own':>7} {'best':>7} {'cuBLAS':>7}  ms a step")
    for rows in arguments.rows:
        steps = [
            sum(TIMES[each["shape"]] * each[key] for each in found if each["rows"] == rows) / 1e3
            for key in ("floor", "own", "best", "cublas")
        ]
        print(f"{rows:5d} " + " ".join(f"{ms:7.3f}" for ms in steps))
    if arguments.json:
        about = {"device": name, "torch": torch.__version__, "bytes_s": rate, "figures": found}
        arguments.json.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
