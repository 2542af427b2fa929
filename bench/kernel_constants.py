"""What the constants of kernels gain on a GPU: `python -m bench.constants --gpu`.

    python -m bench.constants --gpu [--only NAME ...] [--json FILE]

Each constant has other values for a while, and what it decides runs with each of them, in a graph.
A line has a work's times in us, the constant's own value first. Works have the sizes of the 8B
shape, lengths of the Azure conversation trace and log-normal ones (mean 1,100 tokens), latents of
DeepSeek. `wide heads` are other tiles of heads with 256 and 512 numbers, the chosen ones first. It
takes about four minutes on an H100, most of them compiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
import torch

from bench import latents as of_latents
from bench.harness import table
from bench.kernels import CALLS, LAYERS, DecodeRows, replayed_us
from console.loadgen.trace_files import read_trace
from engine.attention import latents, parts
from engine.cuda.kernels import rms_norm
from engine.cuda.kv import latent_decode, latent_prompt
from engine.cuda.products import few_rows, fp8, rounding, single_row, unrounded_row
from engine.model.precision.rounding import Rounding

Work = Callable[[], object]
Loads = Iterator[tuple[str, Work]]
NEVER: Final = 1 << 30
COPIES: Final = 8
"""Weights of one product that take turns, so that no cache has them."""
FP8_WEIGHTS: Final = ((4096, 4096), (6144, 4096), (4096, 14336))
"""Outputs and inputs of the 8B shape's narrow products."""


def _lengths(kind: str, rows: int) -> list[int]:
    rng = np.random.default_rng(1)
    if kind == "azure":
        trace = read_trace("azure-conversation")
        picked = rng.integers(len(trace), size=rows)
        return [max(16, trace[i].prompt_tokens) for i in picked]
    drawn = rng.lognormal(math.log(1100) - 0.405, 0.9, rows)
    return [int(each) for each in drawn.clip(16, 8192)]


def uneven_rows() -> Loads:
    """Decode attention over rows of uneven lengths."""
    for kind in ("azure", "lognormal"):
        for rows in (96, 128, 256):
            batch = DecodeRows(_lengths(kind, rows))
            yield f"{kind}, {rows} rows", batch.attend_as_chosen


def latent_rows() -> Loads:
    """Decode attention over latents."""
    for heads, rows, tokens, width in ((128, 32, 4096, 1), (16, 64, 1152, 1), (16, 64, 1152, 4)):
        batch = of_latents.Batch(heads, rows, tokens, width)

        q = batch.latents.absorbed(batch.q)

        def work(b: of_latents.Batch = batch, q: Any = q, h: int = heads, w: int = width) -> None:
            items = latents.blocks_of(h, w)
            b.attend(q, parts.division(b.rows, items, differ=False, tiles=latents.TILES))

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


def fp8_rows() -> Loads:
    """Products of few rows in FP8, cut along the input."""
    for outputs, inputs in FP8_WEIGHTS:
        values, scales = _fp8_weight(outputs, inputs)
        for rows in (16, 64, 128):
            x = rounding.rounded(torch.randn(rows, inputs, device="cuda").bfloat16(), Rounding())

            def work(values: Any = values, scales: Any = scales, x: Any = x) -> None:
                for each in values:
                    fp8.fp8_linear(each, scales, x, None, torch.bfloat16)

            yield f"{outputs} x {inputs}, {rows} rows", work


def rounded_rows() -> Loads:
    """Few rows that are rounded by a kernel of their own."""
    for rows in (1, 8, 64):
        for size in (4096, 14336):
            x = torch.randn(rows, size, device="cuda").bfloat16()

            def work(x: Any = x) -> None:
                for _ in range(CALLS):
                    rounding.rounded(x, Rounding())

            yield f"{rows} rows of {size}", work


def unrounded_rows() -> Loads:
    """Products of one row in FP8 that round it themselves."""
    for outputs, inputs in FP8_WEIGHTS[:2]:
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


def narrow_products() -> Loads:
    """A norm, then a product of its row with a narrow weight, such as a model's router."""
    for outputs in (128, 256, 1024):
        weights = [torch.randn(outputs, 4096, device="cuda").bfloat16() for _ in range(COPIES)]
        x, gain = torch.randn(1, 4096, device="cuda").bfloat16(), torch.rand(4096).bfloat16().cuda()

        def work(weights: Any = weights, x: Any = x, gain: Any = gain) -> None:
            for each in weights:
                single_row.linear(rms_norm(x, gain, 1e-6), each)

        yield f"{outputs} outputs", work


class Constant(NamedTuple):
    """A constant, its value and others, and the works that it decides."""

    module: ModuleType
    name: str
    values: tuple[int, ...]
    loads: Callable[[], Loads]


CONSTANTS: Final = (
    Constant(parts, "MOST_LEAST_TOKENS", (512, 64, 128, 256, 1024, 2048), uneven_rows),
    Constant(latents, "MOST_QUERIES", (64, 16, 32, 128), latent_rows),
    Constant(latent_prompt, "MOST_QUERIES", (64, 16, 32, 128), latent_prompts),
    Constant(latent_decode, "QUERIES_OF_A_WARP", (8, 4, 16, 32), latent_rows),
    Constant(few_rows, "_REGISTERS_OF_SUMS", (128, 32, 64, 256), fp8_rows),
    Constant(rounding, "_PROGRAMS", (264, 66, 132, 528, 1056), rounded_rows),
    Constant(unrounded_row, "_PROGRAMS", (264, 132, 528, 1056), unrounded_rows),
    Constant(single_row, "_FEW_PROGRAMS", (264, 0, NEVER), narrow_products),
)


def measure(only: Sequence[str]) -> list[dict[str, Any]]:
    """Prints a table for each constant, and returns what they say."""
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
    heads = ["never" if value == NEVER else str(value) for value in values]
    lines: list[Sequence[object]] = [[name, *heads]]
    lines += [[load, *(f"{us[value]:.2f}" for value in values)] for load, us in rows]
    print(table(lines) + "\n", flush=True)
