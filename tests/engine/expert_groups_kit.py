"""Workers of an expert group, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_kit import build

from engine.engine import Engine
from engine.expert_groups.member import Member


@contextmanager
def grouped(path: Path, folder: Path, count: int, **options: Any) -> Iterator[list[Engine]]:
    """All workers of a group, with the same options."""

    def worker(rank: int) -> Engine:
        return build(path, expert_group=f"{folder}?rank={rank}&ranks={count}", **options)

    with ThreadPoolExecutor(count) as threads:
        engines = list(threads.map(worker, range(count)))
    try:
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def member(folder: Path, rank: int, **alike: Any) -> Member:
    """One of two that come to meet, and serve nothing."""
    found = Member({"rank": rank, "ranks": 2} | alike, folder, lambda _: None)
    found.start()
    return found
