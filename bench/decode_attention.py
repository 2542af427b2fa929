"""What decode attention takes on a GPU, by both divisions of the rows' contexts.

python -m bench.decode_attention [--kv bf16 fp8] [--few | --batch ROWSxTOKENS ...]
                                 [--tiles B,W,S ...] [--division M,L,B,W,S ...]
                                 [--sweep tiles|divisions] [--width N ...] [--json FILE]

A line for each batch, in us: the division for rows alike, that for rows that differ, the one that
their lengths choose, and its bytes a second. 32 query heads, 8 KV heads of 128, pages of 16 tokens,
bf16 or FP8 (whose bytes are those of K and V, without exponents). Eight calls over four layers are
captured in a graph; the median of five pairs of replays is shown. `--width` gives each row so
many new tokens. A spread below 0.9 is uniform
around the tokens, 0.9 is the sigma of a log-normal distribution. `--few` takes five batches alone,
`--batch` rows alike. `--tiles` adds the times with the chosen parts and other tiles, `--division`
those with other divisions (most parts, least tokens, tiles), `--sweep tiles` the fastest of many
tiles with the chosen parts, `--sweep divisions` that of many parts, too.
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
from triton.runtime.errors import OutOfResources

from engine.attention.parts import FP8, PLAIN, Division, Tiles, division, lengths_differ
from engine.cuda.decode_attention import decode_attention
from engine.cuda.kv.fp8_decode import decode_attention_fp8
from engine.pool.fp8_pool import Fp8Pool
from engine.pool.kv_pool import PlainPool
from engine.step.attention import AttentionSpec

KV_HEADS, GROUP, DIM, PAGE_TOKENS, LAYERS = 8, 4, 128, 16, 4
CALLS, REPLAYS = 8, 5
SPEC = AttentionSpec(DIM**-0.5)
LOG_NORMAL = 0.9
CASES = (
    (256, 384, 0.0), (256, 384, 0.5), (256, 384, 0.9), (256, 2176, 0.0), (256, 2176, 0.5),
    (200, 1000, 0.5), (128, 700, 0.0), (128, 700, 0.9), (96, 1100, 0.0), (64, 1152, 0.0),
    (64, 1152, 0.3), (64, 4000, 0.0), (48, 1100, 0.0), (48, 1100, 0.5), (40, 1500, 0.9),
    (32, 1100, 0.0), (32, 1100, 0.5), (24, 1100, 0.0), (16, 2000, 0.0), (16, 2000, 0.5),
    (12, 1100, 0.0), (9, 4000, 0.0), (9, 8000, 0.5), (8, 8000, 0.0), (1, 400, 0.0),
)  # fmt: skip
"""Rows, tokens, spread."""
FEW = ((256, 384, 0.0), (256, 2176, 0.0), (64, 1152, 0.0), (64, 4000, 0.0), (16, 8192, 0.0))
KINDS = {"bf16": (PlainPool, decode_attention), "fp8": (Fp8Pool, decode_attention_fp8)}
WRITTEN_AT_ONCE = 1 << 16


class Batch:
    """Rows with random KV."""

    def __init__(
        self, kind: str, rows: int, tokens: int, spread: float, generator: torch.Generator
    ) -> None:
        pool_type, self._attend = KINDS[kind]
        scale = torch.ones(rows)
        if spread >= LOG_NORMAL:
            scale = (spread * torch.randn(rows, generator=generator)).exp().clamp(max=8)
        elif spread:
            scale += spread * (2 * torch.rand(rows, generator=generator) - 1)
        self.lengths = (tokens * scale).int().clamp(min=16)
        pages = -(-self.lengths // PAGE_TOKENS)
        self._pool = pool_type(
            num_pages=int(pages.sum()) + 1, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM,
            page_size=PAGE_TOKENS, dtype=torch.bfloat16, device=torch.device("cuda"),
        )  # fmt: skip
        self._fill()
        places = torch.randperm(int(pages.sum()), generator=generator).int().split(pages.tolist())
        self._table = torch.nn.utils.rnn.pad_sequence(list(places), batch_first=True).cuda()
        self._contexts = self.lengths.cuda()
        self.widen(1)

    def widen(self, width: int) -> None:
        """From now on each row has so many new tokens."""
        shape = len(self.lengths) * width, KV_HEADS * GROUP, DIM
        self._q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def _fill(self) -> None:
        every = torch.arange(self._pool.num_pages * PAGE_TOKENS, device="cuda")
        for places in every.split(WRITTEN_AT_ONCE):
            k, v = torch.randn(2, len(places), KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            for layer in range(LAYERS):
                self._pool.write(layer, places // PAGE_TOKENS, places % PAGE_TOKENS, k, v)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a call reads."""
        size = self._pool.element.itemsize
        return 2 * size * int(self.lengths.sum()) * KV_HEADS * DIM

    def time_us(self, divided: Division, *, or_never: bool = False) -> float:
        """Median time of a call. Tiles that are too large raise an error, or take forever."""

        def calls() -> None:
            for call in range(CALLS):
                layer, contexts, table = call % LAYERS, self._contexts, self._table
                self._attend(self._q, self._pool, layer, contexts, table, SPEC, divided)

        try:
            return replayed_us(calls) / CALLS
        except OutOfResources:
            if or_never:
                return float("inf")
            raise


def replayed_us(work: Callable[[], object]) -> float:
    """Median time of some work in a graph."""
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


def tiles_of(chosen: Division) -> Iterator[Division]:
    """The chosen division with other tiles."""
    for tiles in product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5)):
        yield chosen._replace(tiles=Tiles(*tiles))


def tile(text: str) -> Tiles:
    """Tiles from the command line."""
    block, warps, stages = map(int, text.split(","))
    return Tiles(block, warps, stages)


def divided(text: str) -> Division:
    """A division from the command line."""
    most, least, tiles = text.split(",", 2)
    return Division(int(most), int(least), tile(tiles))


def alike(text: str) -> tuple[int, int, float]:
    """A batch of equal rows from the command line."""
    rows, tokens = map(int, text.split("x"))
    return rows, tokens, 0.0


def swept(rows: int) -> Iterator[Division]:
    """Divisions to choose from."""
    tiles = [Tiles(*one) for one in product((32, 64, 128), (2, 4), (3, 4))]
    yield from (Division(1, 1, one) for one in tiles)
    for one, most, least in product(tiles, (2, 4, 8, 16, 32), (64, 128, 256, 512, 1024)):
        if rows * KV_HEADS * most <= 1 << 15:
            yield Division(most, least, one)


def measured(batch: Batch, kind: str, width: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times of a batch, which are also printed."""
    rows = len(batch.lengths)
    divisions = [
        division(rows, KV_HEADS, differ=differ, tiles=FP8 if kind == "fp8" else PLAIN)
        for differ in (False, True)
    ]
    alike_us, different_us = map(batch.time_us, divisions)
    differ = lengths_differ(batch.lengths.numpy(), KV_HEADS)
    chosen_us = different_us if differ else alike_us
    line: dict[str, Any] = {"differ": differ, "alike_us": alike_us, "different_us": different_us}
    said = f"{kind} {rows:4d} rows of {int(batch.lengths.sum()) // rows:5d}, width {width}:"
    said += f" {alike_us:6.1f} {different_us:6.1f} us, {'different' if differ else 'alike'}"
    said += f", {batch.kv_bytes / chosen_us / 1e6:.2f} TB/s"
    others = [(one, divisions[differ]._replace(tiles=one)) for one in arguments.tiles]
    others += [((*one[:2], *one.tiles), one) for one in arguments.division]
    for name, other in others:
        us = batch.time_us(other, or_never=True)
        line[",".join(map(str, name))] = us
        said += f"; {','.join(map(str, name))} {us:.1f}"
    if arguments.sweep:
        tiles_alone = arguments.sweep == "tiles"
        several = tiles_of(divisions[differ]) if tiles_alone else swept(rows)
        best = min((batch.time_us(one, or_never=True), one) for one in several)
        line |= {"best_us": best[0], "best": best[1]}
        said += f"; best {best[0]:.1f} us {batch.kv_bytes / best[0] / 1e6:.2f} TB/s"
        said += f" {tuple(best[1])}"
    print(said, flush=True)
    return line


def main() -> None:
    """Times every batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv", nargs="+", choices=list(KINDS), default=["bf16"])
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--batch", nargs="+", default=[], type=alike, metavar="ROWSxTOKENS")
    parser.add_argument(
        "--division", nargs="+", default=[], type=divided, metavar="MOST,LEAST,BLOCK,WARPS,STAGES"
    )
    parser.add_argument("--tiles", nargs="+", default=[], type=tile, metavar="BLOCK,WARPS,STAGES")
    parser.add_argument("--width", type=int, nargs="+", default=[1])
    parser.add_argument("--sweep", choices=["tiles", "divisions"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    generator, found = torch.Generator().manual_seed(1), []
    cases = arguments.batch or (FEW if arguments.few else CASES)
    for kind, (rows, tokens, spread) in product(arguments.kv, cases):
        batch = Batch(kind, rows, tokens, spread, generator)
        for width in arguments.width:
            batch.widen(width)
            case = {"kv": kind, "rows": rows, "tokens": tokens, "spread": spread, "width": width}
            found.append(case | measured(batch, kind, width, arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
