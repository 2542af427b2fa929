"""What the constants of kernels gain on a GPU.

python -m bench.constants [--only NAME ...] [--json FILE]

Each constant has other values for a while, and what it decides runs with each of them, in a graph.
A line has a work's times in us, the constant's own value first. Works have the sizes of the 8B
shape, or latents of DeepSeek. `wide` are other tiles of heads with 256 and 512 numbers, the chosen
ones first. Constants that were judged are not here any more; `bench/README.md` has their figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple
from unittest import mock

import torch

from bench import latents as of_latents
from bench.harness import table, write_json
from bench.kernels import CALLS, LAYERS, DecodeRows, replayed_us
from engine.attention import latents, parts
from engine.cuda.kv import latent_decode, latent_prompt
from engine.cuda.products import fp8, rounding, unrounded_row
from engine.model.precision.rounding import Rounding

Work = Callable[[], object]
Loads = Iterator[tuple[str, Work]]
COPIES: Final = 8
"""Weights of one product that take turns, so that no cache has them."""
FP8_WEIGHTS: Final = ((4096, 4096), (6144, 4096))
"""Outputs and inputs of the 8B shape's products that round their row themselves."""


def latent_rows() -> Loads:
    """Decode attention over latents."""
    for heads, rows, tokens, width in ((128, 32, 4096, 1), (16, 64, 1152, 1), (16, 64, 1152, 4)):
        batch = of_latents.Batch(heads, rows, tokens, width)

        q = batch.latents.absorbed(batch.q)

        def work(b: of_latents.Batch = batch, q: Any = q, h: int = heads, w: int = width) -> None:
            b.attend(q, latents.divided(b.rows, h, w, differ=False))

        yield f"{rows} rows of {tokens}, {heads} heads, {width} new", work


def latent_prompts() -> Loads:
    """Pieces of 512 tokens behind 4,096, absorbed."""
    for heads in (16, 128):
        batch = of_latents.Batch(heads, 1, 4608, 512)
        q, starts = batch.latents.absorbed(batch.q), torch.tensor([0, 512], dtype=torch.int32)
        rows = starts.cuda(), 512, batch.contexts, batch.table, batch.spec

        def work(q: Any = q, pool: Any = batch.pool, rows: Any = rows) -> None:
            for call in range(CALLS):
                latent_prompt.prompt_latents(q, pool, call % LAYERS, *rows)

        yield f"{heads} heads", work


def _fp8_weight(outputs: int, inputs: int) -> tuple[list[Any], Any]:
    values = [
        torch.randn(outputs, inputs, device="cuda").to(torch.float8_e4m3fn) for _ in range(COPIES)
    ]
    return values, torch.rand(outputs, device="cuda")


def unrounded_rows() -> Loads:
    """Products of one row in FP8 that round it themselves."""
    for outputs, inputs in FP8_WEIGHTS:
        values, scales = _fp8_weight(outputs, inputs)
        x = torch.randn(1, inputs, device="cuda").bfloat16()

        def work(values: Any = values, scales: Any = scales, x: Any = x) -> None:
            for each in values:
                if (cut := unrounded_row.cut_of(each, 1)) is not None:
                    unrounded_row.product(each, scales, x, Rounding(), None, torch.bfloat16, cut)
                else:
                    taken = rounding.rounded(x, Rounding())
                    fp8.fp8_linear(each, scales, taken, None, torch.bfloat16)

        yield f"{outputs} x {inputs}", work


class Constant(NamedTuple):
    """A constant, its value and others, and the works that it decides."""

    module: ModuleType
    name: str
    values: tuple[int, ...]
    loads: Callable[[], Loads]


CONSTANTS: Final = (
    Constant(latents, "MOST_QUERIES", (64, 16, 32, 128), latent_rows),
    Constant(latent_prompt, "MOST_QUERIES", (64, 16, 32, 128), latent_prompts),
    Constant(latent_decode, "QUERIES_OF_A_WARP", (8, 4, 16, 32), latent_rows),
    Constant(unrounded_row, "_PROGRAMS", (264, 132, 528, 1056), unrounded_rows),
)


def measure(only: Sequence[str]) -> list[dict[str, Any]]:
    """Prints a table for each constant, and returns the same figures."""
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and there is none")
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for constant in CONSTANTS:
            name = f"{constant.module.__name__.rpartition('.')[2]}.{constant.name}"
            if only and constant.name not in only:
                continue
            assert getattr(constant.module, constant.name) == constant.values[0], name
            rows = [_row(constant, load, work) for load, work in constant.loads()]
            _say(name, constant.values, rows)
            found += [{"constant": name, "load": load, "us": us} for load, us in rows]
            torch.cuda.empty_cache()
        if not only or "wide" in only:
            found += _wide_heads()
    return found


def _row(constant: Constant, load: str, work: Work) -> tuple[str, dict[int, float]]:
    times = {}
    for value in constant.values:
        with mock.patch.object(constant.module, constant.name, value):
            times[value] = replayed_us(work) / CALLS
    return load, times


def _wide_heads() -> list[dict[str, Any]]:
    """Other tiles of wide heads."""
    found = []
    for dim, chosen in ((256, parts.WIDE), (512, parts.WIDEST)):
        for rows, tokens in ((1, 4000), (64, 1152), (256, 400)):
            batch = DecodeRows([tokens] * rows, dim, (16, 8) if dim == 256 else (16, 2))
            usual = batch.division(chosen)
            others = [usual.tiles] + [
                parts.Tiles(block, warps, stages)
                for block in (16, 32, 64) for warps in (2, 4, 8) for stages in (2, 3)
            ]  # fmt: skip
            times = {}
            for tiles in others:
                divided = usual._replace(tiles=tiles)
                us = replayed_us(partial(batch.attend, divided)) / CALLS
                times[",".join(map(str, tiles))] = us
            best = sorted(times, key=lambda each: times[each])[:3]
            load = f"heads of {dim}, {rows} rows of {tokens}"
            shown = [f"{each} {times[each]:.1f}" for each in (",".join(map(str, others[0])), *best)]
            print(f"{load}: chosen {shown[0]} us; best {'; '.join(shown[1:])}", flush=True)
            found.append({"constant": "wide heads", "load": load, "us": times})
    return found


def _say(name: str, values: Sequence[int], rows: list[tuple[str, dict[int, float]]]) -> None:
    heads = map(str, values)
    lines: list[Sequence[object]] = [[name, *heads]]
    lines += [[load, *(f"{us[value]:.2f}" for value in values)] for load, us in rows]
    print(table(lines) + "\n", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    write_json(arguments.json, measure(arguments.only))
