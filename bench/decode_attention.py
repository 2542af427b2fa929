"""What decode attention takes on a GPU, by both divisions of the rows' contexts.

python -m bench.decode_attention [--sweep] [--json FILE]

A line for each batch, in us: the division for rows alike, that for rows that differ, the one that
their lengths choose, and its bytes a second. 32 query heads, 8 KV heads of 128, pages of 16 tokens,
bf16. Eight calls over four layers are captured in a graph; the median of five pairs of replays is
shown. A spread below 0.9 is uniform around the tokens, 0.9 is the sigma of a log-normal
distribution. `--sweep` adds the fastest of many divisions.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from engine.attention.parts import Division, Tiles, division, lengths_differ
from engine.cuda.decode_attention import decode_attention
from engine.pages.kv_pool import KvPool

KV_HEADS, GROUP, DIM, PAGE_TOKENS, LAYERS = 8, 4, 128, 16, 4
CALLS, REPLAYS = 8, 5
LOG_NORMAL = 0.9
CASES = (
    (256, 384, 0.0), (256, 384, 0.5), (256, 384, 0.9), (256, 2176, 0.0), (256, 2176, 0.5),
    (200, 1000, 0.5), (128, 700, 0.0), (128, 700, 0.9), (96, 1100, 0.0), (64, 1152, 0.0),
    (64, 1152, 0.3), (64, 4000, 0.0), (48, 1100, 0.0), (48, 1100, 0.5), (40, 1500, 0.9),
    (32, 1100, 0.0), (32, 1100, 0.5), (24, 1100, 0.0), (16, 2000, 0.0), (16, 2000, 0.5),
    (12, 1100, 0.0), (9, 4000, 0.0), (9, 8000, 0.5), (8, 8000, 0.0), (1, 400, 0.0),
)  # fmt: skip
"""Rows, tokens, spread."""


class Batch:
    """Rows with random KV."""

    def __init__(self, rows: int, tokens: int, spread: float, generator: torch.Generator) -> None:
        scale = torch.ones(rows)
        if spread >= LOG_NORMAL:
            scale = (spread * torch.randn(rows, generator=generator)).exp().clamp(max=8)
        elif spread:
            scale += spread * (2 * torch.rand(rows, generator=generator) - 1)
        self.lengths = (tokens * scale).int().clamp(min=16)
        pages = -(-self.lengths // PAGE_TOKENS)
        self._pool = KvPool(
            num_pages=int(pages.sum()) + 1, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM,
            page_size=PAGE_TOKENS, dtype=torch.bfloat16, device=torch.device("cuda"),
        )  # fmt: skip
        self._pool.tensor.normal_()
        places = torch.randperm(int(pages.sum()), generator=generator).int().split(pages.tolist())
        self._table = torch.nn.utils.rnn.pad_sequence(list(places), batch_first=True).cuda()
        self._contexts = self.lengths.cuda()
        self._q = torch.randn(rows, KV_HEADS * GROUP, DIM, device="cuda", dtype=torch.bfloat16)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a call reads."""
        return 2 * 2 * int(self.lengths.sum()) * KV_HEADS * DIM

    def time_us(self, divided: Division) -> float:
        """Median time of a call."""

        def calls() -> None:
            for call in range(CALLS):
                layer, contexts, table = call % LAYERS, self._contexts, self._table
                decode_attention(self._q, self._pool, layer, contexts, table, None, divided)

        return _replayed_us(calls) / CALLS


def _replayed_us(work: Callable[[], None]) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * float(begin.elapsed_time(end)) / 2)
    return float(statistics.median(times))


def swept(rows: int) -> Iterator[Division]:
    """Divisions to choose from."""
    tiles = [Tiles(*one) for one in product((32, 64, 128), (2, 4), (3, 4))]
    yield from (Division(1, 1, one) for one in tiles)
    for one, most, least in product(tiles, (2, 4, 8, 16, 32), (64, 128, 256, 512, 1024)):
        if rows * KV_HEADS * most <= 1 << 15:
            yield Division(most, least, one)


def main() -> None:
    """Times every batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    generator, found = torch.Generator().manual_seed(1), []
    for rows, tokens, spread in CASES:
        batch = Batch(rows, tokens, spread, generator)
        alike, different = (
            batch.time_us(division(rows, KV_HEADS, differ=differ)) for differ in (False, True)
        )
        differ = lengths_differ(batch.lengths.numpy(), KV_HEADS)
        chosen = different if differ else alike
        line: dict[str, Any] = {"rows": rows, "tokens": tokens, "spread": spread, "differ": differ}
        line |= {"alike_us": alike, "different_us": different}
        said = f"{rows:4d} rows of {tokens:5d}, spread {spread}: {alike:6.1f} {different:6.1f} us"
        said += f", {'different' if differ else 'alike'}, {batch.kv_bytes / chosen / 1e6:.2f} TB/s"
        if arguments.sweep:
            best = min((batch.time_us(one), one) for one in swept(rows))
            line |= {"best_us": best[0], "best": best[1]}
            said += f"; best {best[0]:.1f} us {tuple(best[1])}"
        print(said, flush=True)
        found.append(line)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
