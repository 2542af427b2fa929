"""How products with experts are best cut, on the GPU at hand.

python -m bench.expert_tiles [--shapes NAME ...] [--precisions NAME ...] [--tokens N ...]
                             [--shown 5] [--processes 12] [--compile] [--json FILE]

For each product of a layer and each number of tokens: what `tiles_of` chooses, and the `--shown`
fastest of many tiles, in us and TB/s over the experts that are read. One row in tiles is a kernel
for one row, beside which the other kernel is measured. Tokens draw their experts at random.
Eight calls over four layers are captured in a graph; the median of five replays is shown. Tiles
that take over 500 us a call are replayed once. Kernels are compiled first, by several processes;
`--compile` does nothing else, and `--processes 0` leaves it out.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.experts import CASES, PRECISIONS, SHAPES
from bench.harness import write_json
from engine.cuda.experts import four_bits, four_bits_row
from engine.cuda.experts.cutting import Tiles
from engine.cuda.experts.products import product, tiles_of
from engine.cuda.experts.routing import Order, sort
from engine.cuda.products.rounding import rounded
from engine.model.config import ExpertsConfig
from engine.model.decoder import Model
from engine.model.experts.config import Gate
from engine.model.experts.layer import Experts
from engine.model.experts.stacked import Stacked
from engine.model.families import read_config
from engine.model.precision.base import Kind
from engine.model.precision.choice import Precision
from engine.model.precision.formats import read_format
from engine.model.precision.rounding import Rounded

LAYERS, CALLS, REPLAYS = 4, 8, 5
TOKENS = (1, 64, 256)
FEW_WORDS = 1024
"""The head is not measured."""
MANY = 512
"""Tokens from which on tiles for prompts are tried."""
SLOW_US = 500
FEW_TILES = [
    Tiles(outputs, inputs, 16, warps, stages)
    for outputs, inputs, warps, stages in (
        (16, 256, 4, 3), (16, 512, 4, 2), (16, 128, 2, 5), (16, 256, 2, 4), (32, 128, 4, 3),
        (32, 128, 4, 5), (32, 256, 4, 3), (32, 256, 8, 3), (32, 128, 2, 5), (64, 64, 4, 3),
        (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 5), (64, 256, 4, 3), (64, 128, 8, 4),
        (128, 64, 4, 4), (128, 128, 8, 3), (128, 128, 4, 3),
    )
]  # fmt: skip
ONE_ROW_TILES = [
    (1, 1, 2), (1, 1, 4), (2, 1, 2), (2, 1, 4), (4, 1, 2), (4, 1, 4), (8, 1, 4), (8, 1, 8),
    (16, 1, 4), (16, 1, 8),
]  # fmt: skip
"""Outputs, rows and warps of one row in 16 bits or FP8, whose weights come in one step."""
MANY_TILES = [
    Tiles(*each)
    for each in (
        (64, 128, 64, 4, 3), (64, 64, 64, 4, 4), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4),
        (128, 64, 128, 8, 3), (128, 64, 128, 8, 4), (128, 128, 128, 8, 3),
    )
]  # fmt: skip

FOUR_BITS_FEW = [
    (16, 64, 1, 5), (16, 128, 1, 4), (32, 32, 2, 6), (32, 64, 2, 5), (32, 64, 2, 3),
    (32, 128, 2, 3), (64, 64, 2, 4), (64, 64, 4, 4), (64, 128, 4, 3),
]  # fmt: skip
"""Outputs, bytes, warps and stages of INT4 and MXFP4, where an expert has a row or two."""
FOUR_BITS_MANY = [
    (32, 64, 2, 5), (32, 128, 2, 3), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3),
    (128, 64, 8, 4),
]  # fmt: skip
"""Where it has more."""
FOUR_BITS_ROW = [
    (2, 512, 1), (4, 512, 1), (8, 512, 1), (16, 512, 1), (8, 512, 2), (16, 512, 2), (32, 512, 4),
    (4, 1024, 1), (4, 1024, 2), (8, 1024, 2), (2, 2048, 4), (4, 2048, 4), (8, 2048, 4),
]  # fmt: skip
"""Outputs, bytes and warps of one row, which has a kernel of its own without stages."""


class Work(NamedTuple):
    """One product of a layer."""

    name: str
    gate: Gate | None
    weights: list[Stacked]
    """Of several layers, which do not all fit into a cache."""


class Rows(NamedTuple):
    """The input of a product."""

    plain: Tensor
    read: Tensor | Rounded
    """As tensor cores take it."""


def works_of(shape: str, precision: str, layers: int) -> tuple[list[Work], ExpertsConfig]:
    """Both products of a shape, with random weights, and its experts."""
    folder = SHAPES / shape
    config, stated = read_config(folder), json.loads((folder / "config.json").read_text())
    device, form = torch.device("cuda"), read_format(stated, folder)
    having = [one for one in config.layers if isinstance(one.feed_forward, ExpertsConfig)]
    config = replace(config, layers=tuple(having[:layers]), vocab_size=FEW_WORDS)
    options = PRECISIONS[precision]
    model = Model(
        config, torch.bfloat16, device, Precision(device, torch.bfloat16, form, **options)
    )
    experts = [one for one in model.modules() if isinstance(one, Experts)]
    own = experts[0].own
    works = []
    for name, gate in (("gate_up", own.gate), ("down", None)):
        weights = [getattr(one, name) for one in experts]
        for one in weights:
            _draw(one)
        works.append(Work(name, gate, weights))
    return works, own


def _draw(weights: Stacked) -> None:
    if weights.kind is None:
        weights.values.data.normal_(0, 0.02)
        return
    weights.values.data.view(torch.uint8).random_(0, 120)
    assert weights.scales is not None
    scales = weights.scales.data
    if scales.is_floating_point():
        scales.fill_(0.01)
    else:
        scales.random_(0, 120)


def inputs_of(work: Work, own: ExpertsConfig, tokens: int) -> tuple[Rows, Order, float]:
    """Rows, the order of their pairs, and how many experts they take."""
    routing = own.routing
    scores = torch.rand(tokens, routing.experts, device="cuda")
    chosen = scores.topk(routing.chosen, dim=-1).indices.int()
    order = sort(chosen, routing.experts)
    weights = work.weights[0]
    rows = tokens if work.gate else tokens * routing.chosen
    x = torch.randn(rows, weights.inputs, device="cuda", dtype=torch.bfloat16)
    read = x if weights.input is None else rounded(x, weights.input)
    return Rows(x, read), order, chosen.unique().numel()


def run(work: Work, weights: Stacked, x: Rows, order: Order, tiles: Tiles) -> Tensor:
    """One call. What is cut for one row rounds it."""
    taken = x.plain if tiles.rows == 1 else x.read
    return product(
        taken, weights, order, gate=work.gate, by_token=work.gate is not None, tiles=tiles
    )


def time_us(work: Work, x: Rows, order: Order, tiles: Tiles) -> float:
    """Of a call; infinite if the tiles do not fit."""
    try:
        run(work, work.weights[0], x, order, tiles)
    except OutOfResources:
        return float("inf")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            run(work, work.weights[number % len(work.weights)], x, order, tiles)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for _ in range(REPLAYS + 1):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * float(begin.elapsed_time(end)) / CALLS)
        if times[0] > SLOW_US:
            return times[0]
    return statistics.median(times[1:])


def candidates(work: Work, tokens: int, own: ExpertsConfig) -> list[Tiles]:
    """Tiles that are tried."""
    each = tokens * own.routing.chosen / own.routing.experts
    if work.weights[0].kind in (Kind.INT4, Kind.MXFP4):
        usual = four_bits.tiles_of(max(1, each)).rows
        cuts, rows = (FOUR_BITS_FEW, {usual}) if each < 1 else (FOUR_BITS_MANY, {usual, usual // 2})
        found = [Tiles(*cut[:2], at_once, *cut[2:]) for at_once in sorted(rows) for cut in cuts]
        if tokens == 1 and four_bits_row.takes(work.weights[0]):
            found += [Tiles(*cut[:2], 1, *cut[2:], 1) for cut in FOUR_BITS_ROW]
        return found
    if tokens >= MANY:
        return MANY_TILES
    if tokens == 1:
        whole = triton.next_power_of_2(work.weights[0].inputs)
        alone = [Tiles(outputs, whole, *others) for outputs, *others in ONE_ROW_TILES]
        return FEW_TILES + alone
    return FEW_TILES + ([tiles._replace(rows=32) for tiles in FEW_TILES] if each >= 8 else [])


def cells(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Shapes and precisions that are asked for."""
    for shape, precision in CASES:
        if shape in arguments.shapes and precision in arguments.precisions:
            yield shape, precision


def compile_share(number: int, of: int, arguments: argparse.Namespace) -> None:
    """Compiles each `of`-th kernel, from `number` on."""
    for shape, precision in cells(arguments):
        works, own = works_of(shape, precision, 1)
        every = [
            (work, tokens, tiles)
            for work in works
            for tokens in arguments.tokens
            for tiles in candidates(work, tokens, own)
        ]
        for work, tokens, tiles in every[number::of]:
            x, order, _ = inputs_of(work, own, tokens)
            try:
                run(work, work.weights[0], x, order, tiles)
            except OutOfResources:
                continue
        torch.cuda.synchronize()


def measure(shape: str, precision: str, tokens: Sequence[int], shown: int) -> list[dict[str, Any]]:
    """All tiles of a shape in a precision. Prints the fastest."""
    works, own = works_of(shape, precision, LAYERS)
    found = []
    for work, count in itertools.product(works, tokens):
        x, order, read = inputs_of(work, own, count)
        weights = work.weights[0]
        size = sum(t.numel() * t.element_size() for t in weights.parameters())
        each = size / own.routing.experts
        times = {tiles: time_us(work, x, order, tiles) for tiles in candidates(work, count, own)}
        pairs = count * own.routing.chosen
        usual = tiles_of(weights, count, pairs)
        times[usual] = time_us(work, x, order, usual)
        best = sorted(times, key=times.__getitem__)[:shown]
        rate = read * each / times[best[0]] / 1e6
        print(f"{shape} {precision} {work.name} {count} tokens, {read} experts, {rate:.2f} TB/s:")
        print(f"    chosen {tuple(usual)} {times[usual]:.1f} us", flush=True)
        for tiles in best:
            print(f"           {tuple(tiles)} {times[tiles]:.1f}", flush=True)
        found += [
            {
                "shape": shape, "precision": precision, "product": work.name,
                "outputs": weights.outputs, "tokens": count, "tiles": tiles, "us": time,
            }
            for tiles, time in times.items()
        ]  # fmt: skip
    return found


def main() -> None:
    """Compiles and measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shapes = sorted({shape for shape, _ in CASES})
    parser.add_argument("--shapes", nargs="+", default=shapes, choices=shapes)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--shown", type=int, default=5)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    share = [(number, arguments.processes, arguments) for number in range(arguments.processes)]
    compiling = [context.Process(target=compile_share, args=each) for each in share]
    for process in compiling:
        process.start()
    for process in compiling:
        process.join()
    if arguments.compile:
        return
    found = []
    for shape, precision in cells(arguments):
        found += measure(shape, precision, arguments.tokens, arguments.shown)
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
