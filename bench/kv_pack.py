"""Gathering scattered pages into a staging buffer and back, on one GPU: what NCCL's channels pay.

python -m bench.kv_pack [--page-mib 2] [--piece-mib 64] [--pool-mib 4096] [--repeats 30]
                        [--device cuda] [--json FILE]

    index       index_select and index_copy_ by words of 8 bytes, as `kv_transfer/nccl/channels.py`
    does foreach     one fused copy of all pages
    each        a copy a page
    triton N    a kernel of N programs that share the pages out: with few, most of the GPU's
                processors are left to others, such as NCCL's kernels (GPU alone)

GB/s of pages, each counted once (it is read and written), medians; `issue`: how long the CPU is
busy with one piece, which must stay below what the wire takes for it (180 us for 64 MiB). Each way
is checked byte for byte before it is timed, on fresh random pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PROGRAMS = (8, 16, 32, 64)
BLOCK_WORDS = 2048
WARM_UPS = 3


class Pages(NamedTuple):
    """Pages of a piece. A channel has their ids on the host in any case."""

    ids: Tensor
    on_host: list[int]


Copy = Callable[[Tensor, Tensor, Pages], None]
"""(pool, staged, pages): the pages into `staged`, or `staged` into the pages."""


class Way(NamedTuple):
    """One way to do it."""

    gather: Copy
    scatter: Copy


def _index_gather(pool: Tensor, staged: Tensor, pages: Pages) -> None:
    torch.index_select(pool, 0, pages.ids, out=staged)


def _index_scatter(pool: Tensor, staged: Tensor, pages: Pages) -> None:
    pool.index_copy_(0, pages.ids, staged)


def _foreach_gather(pool: Tensor, staged: Tensor, pages: Pages) -> None:
    torch._foreach_copy_(list(staged), [pool[page] for page in pages.on_host])


def _foreach_scatter(pool: Tensor, staged: Tensor, pages: Pages) -> None:
    torch._foreach_copy_([pool[page] for page in pages.on_host], list(staged))


def _each_gather(pool: Tensor, staged: Tensor, pages: Pages) -> None:
    for row, page in zip(staged, pages.on_host, strict=True):
        row.copy_(pool[page])


def _each_scatter(pool: Tensor, staged: Tensor, pages: Pages) -> None:
    for row, page in zip(staged, pages.on_host, strict=True):
        pool[page].copy_(row)


def ways(device: str) -> dict[str, Way]:
    """By name."""
    found = {
        "index": Way(_index_gather, _index_scatter),
        "foreach": Way(_foreach_gather, _foreach_scatter),
        "each": Way(_each_gather, _each_scatter),
    }
    if device == "cuda":
        found |= {f"triton {programs}": _triton(programs) for programs in PROGRAMS}
    return found


def _triton(programs: int) -> Way:
    from bench.kv_pack_kernel import copy_pages

    def launch(pool: Tensor, staged: Tensor, pages: Pages, is_gather: bool) -> None:
        words = pool.shape[1]
        copy_pages[(programs,)](
            pool, staged, pages.ids, len(pages.ids), words, is_gather, BLOCK_WORDS, num_warps=8
        )

    return Way(
        lambda pool, staged, pages: launch(pool, staged, pages, True),
        lambda pool, staged, pages: launch(pool, staged, pages, False),
    )


def check(way: Way, pool: Tensor, staged: Tensor, pages: Pages) -> None:
    """Asserts that both directions move every word of these pages and no other."""
    pool.random_()
    before = pool.clone()
    staged.zero_()
    way.gather(pool, staged, pages)
    assert torch.equal(staged, before[pages.ids]), "gathered wrongly"
    staged.random_()
    way.scatter(pool, staged, pages)
    before[pages.ids] = staged
    assert torch.equal(pool, before), "scattered wrongly"


def timed(copy: Copy, pool: Tensor, staged: Tensor, many: list[Pages]) -> tuple[float, float]:
    """Medians: seconds until it is done, seconds of the CPU."""
    done, issued = [], []
    for pages in many:
        if pool.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        copy(pool, staged, pages)
        issued.append(time.perf_counter() - begin)
        if pool.is_cuda:
            torch.cuda.synchronize()
        done.append(time.perf_counter() - begin)
    return statistics.median(done[WARM_UPS:]), statistics.median(issued[WARM_UPS:])


def _drawn(num_pages: int, count: int, device: torch.device) -> Pages:
    ids = torch.randperm(num_pages)[:count]
    return Pages(ids.to(device), ids.tolist())


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a way."""
    words = int(arguments.page_mib * (1 << 20)) // 8
    pages = int(arguments.piece_mib / arguments.page_mib)
    num_pages = int(arguments.pool_mib / arguments.page_mib)
    pool = torch.zeros(num_pages, words, dtype=torch.int64, device=arguments.device)
    staged = torch.zeros(pages, words, dtype=torch.int64, device=arguments.device)
    many = [_drawn(num_pages, pages, pool.device) for _ in range(arguments.repeats + WARM_UPS)]
    moved = pages * words * 8
    rows = []
    for name, way in ways(arguments.device).items():
        check(way, pool, staged, many[0])
        row: dict[str, Any] = {"way": name}
        for direction, copy in way._asdict().items():
            done_s, issued_s = timed(copy, pool, staged, many)
            row[direction] = {"gigabytes_per_s": moved / done_s / 1e9, "issue_us": 1e6 * issued_s}
        rows.append(row)
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table."""
    print(f"{'':10} {'gather':>12} {'issue':>10} {'scatter':>12} {'issue':>10}")
    for row in rows:
        cells = [
            f"{row[way]['gigabytes_per_s']:7.1f} GB/s {row[way]['issue_us']:7.0f} us"
            for way in ("gather", "scatter")
        ]
        print(f"{row['way']:10}", *cells)


def main() -> None:
    """Measures, writes, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page-mib", type=float, default=2)
    parser.add_argument("--piece-mib", type=float, default=64)
    parser.add_argument("--pool-mib", type=float, default=4096)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    show(rows)


if __name__ == "__main__":
    main()
