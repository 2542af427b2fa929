"""How requests spread over cells, by consistent hashing with a bound on each cell's load.

    python -m bench.cells [--cells 16] [--requests 200000] [--factor 1.25]

A simulation without any process: each request has a prefix, drawn by Zipf's law, and stays for as
long as others come (the load of a cell is the requests that it has now). It goes to the first cell
on the ring behind its prefix's hash that has less than `factor` times the mean. `home` is the share
that found the first one, where the prefix is cached; `full` the largest load over the mean. Then a
cell is lost: `moved` is the share of prefixes of the other cells that get another home.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import random
from collections import Counter, deque

POINTS = 128
"""Points of each cell on the ring."""
UNDER_WAY = 4000
"""Requests at once."""
PREFIXES = 20_000
SKEW = 1.05


def place(text: str) -> int:
    """A point of the ring."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Ring:
    """The points of all cells."""

    def __init__(self, cells: int) -> None:
        points = [
            (place(f"{cell}/{point}"), cell) for cell in range(cells) for point in range(POINTS)
        ]
        self._points = sorted(points)
        self._at = [at for at, _ in self._points]

    def cells(self, key: str) -> list[int]:
        """All cells in the order in which a key tries them."""
        first = bisect.bisect(self._at, place(key))
        turned = self._points[first:] + self._points[:first]
        return list(dict.fromkeys(cell for _, cell in turned))


def run(cells: int, requests: int, factor: float) -> tuple[float, float, float]:
    """Home, full and moved; see the module."""
    draw, ring = random.Random(1), Ring(cells)
    weights = [1 / rank**SKEW for rank in range(1, PREFIXES + 1)]
    orders = {f"p{rank}": ring.cells(f"p{rank}") for rank in range(PREFIXES)}
    load: Counter[int] = Counter()
    under_way: deque[int] = deque()
    at_home, fullest = 0, 0.0
    for name in draw.choices(list(orders), weights, k=requests):
        if len(under_way) == UNDER_WAY:
            load[under_way.popleft()] -= 1
        most = factor * (len(under_way) + 1) / cells
        chosen = next(cell for cell in orders[name] if load[cell] < most)
        at_home += chosen == orders[name][0]
        load[chosen] += 1
        under_way.append(chosen)
        if len(under_way) == UNDER_WAY:
            fullest = max(fullest, load[chosen] * cells / UNDER_WAY)
    lost = 0
    kept = [order for order in orders.values() if order[0] != lost]
    moved = sum(next(cell for cell in order if cell != lost) != order[0] for order in kept)
    return at_home / requests, fullest, moved / len(kept)


def main() -> None:
    """A line for each factor."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--factor", type=float, nargs="+", default=[1.1, 1.25, 1.5])
    args = parser.parse_args()
    for cells in args.cells:
        for factor in args.factor:
            home, full, moved = run(cells, args.requests, factor)
            print(f"{cells} cells, {factor}: home {home:.1%}, full {full:.2f}, moved {moved:.1%}")


if __name__ == "__main__":
    main()
