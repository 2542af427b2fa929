"""How products of few rows in FP8 are best cut on one GPU, and what rounding activations costs.

    python -m bench.fp8_few_rows [--rows N ...] [--seconds S] [--json FILE]

1. Other processes compile every way of cutting first, and try it. A way that fails is left out.
2. For each weight of the 8B shape and number of rows: the best ways, beside `scaled_mm`; then the
   best of them launched while the kernel before still runs, with weights asked for ahead.
3. Kernels that round.
4. All products and roundings of a layer in their order, without attention.

As in `bench.products`, a figure is the median of ten replays of a graph with more weights than a
cache holds. `error` is relative to float64's product of the same rounded values.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from bench.fp8_one_row import one_row
from bench.products import BYTES_S, CACHE_BYTES, SHAPES, graph_us
from engine.cuda import rounding
from engine.cuda.fp8_products import Tiles, few_rows, fp8_linear
from engine.cuda.fp8_products import _scaled_rows as scaled_rows
from engine.model.precision.rounding import Rounded, Rounding, restored, round_rows

ROWS: Final = (1, 16, 64, 128)
PROCESSORS: Final = 132
MOST_SHARED_BYTES: Final = 220_000
AHEAD: Final = (512, 4096)
PROCESSES: Final = 12
MOST_ERROR: Final = 4e-3
"""Of bf16, and of sums within tensor cores."""
KINDS: Final = {"rows": Rounding(), "groups": Rounding(group=128)}
WARPS: Final = ((512, 16), (256, 32))
"""Values of a warp, and the most warps."""
LAYERS: Final = 3
HIDDEN: Final = 4096
WIDE: Final = 14336

Weight = tuple[Tensor, Tensor]
"""[N, K] e4m3 and [N] float32."""
Linear = Callable[[str, Weight, Rounded], Tensor]


class Way(NamedTuple):
    """A kernel and its tiles."""

    kernel: str
    tiles: Tiles

    def __call__(self, weight: Weight, x: Rounded) -> Tensor:
        """[T, N] bf16."""
        run = one_row if self.kernel == "one_row" else few_rows
        return run(*weight, *x, None, torch.bfloat16, self.tiles)

    def __str__(self) -> str:
        t = self.tiles
        loads = "tma" if t.described else "ptr"
        cut = f"{t.outputs}x{t.inputs} parts {t.parts} stages {t.stages} warps {t.warps}"
        return f"{self.kernel} {cut} {loads} ahead {t.ahead}"


def parts_of(outputs: int, inputs: int, width: int, step: int) -> list[int]:
    """Numbers of parts for one, two and four programs a processor, or about that."""
    tiles, most = math.ceil(outputs / width), max(1, inputs // step // 2)
    return sorted({max(1, min(16, most, p * PROCESSORS // tiles)) for p in (1, 2, 4)})


def ways_of(shape: str, rows: int) -> Iterator[Way]:
    """All ways that are tried."""
    outputs, inputs = SHAPES[shape]
    padded = max(16, rows)
    for width, step, stages in product((64, 128, 256), (128, 256), (3, 4, 6)):
        shared = stages * step * (width + padded)
        if shared > MOST_SHARED_BYTES or (width == 256 and (rows < 64 or step > 128)):
            continue
        warps = 8 if width * padded >= 128 * 128 else 4
        for parts in parts_of(outputs, inputs, width, step):
            if shared < 60_000 and stages == 3:
                continue  # Too few bytes on their way.
            yield Way("few_rows", Tiles(width, step, parts, stages, warps))
            if stages == 4 and step == 128 and width < 256:
                yield Way("few_rows", Tiles(width, step, parts, stages, warps, described=False))
    if rows == 1:
        for width, step, warps in product((1, 2, 4, 8), (512, 1024, 2048), (2, 4)):
            if width * step <= 8192:
                yield Way("one_row", Tiles(width, step, 1, 1, warps))


def ahead_of(way: Way) -> Iterator[Way]:
    """The same way, launched early."""
    for ahead in AHEAD[:1] if way.kernel == "one_row" else AHEAD:
        yield way._replace(tiles=way.tiles._replace(ahead=ahead))


def weight_of(shape: str) -> Weight:
    """Random, rounded by channels."""
    values = torch.randn(SHAPES[shape], device="cuda", dtype=torch.bfloat16) * 0.02
    rounded = round_rows(values)
    return rounded.values, rounded.scales.view(-1)


def activations(rows: int, inputs: int) -> Rounded:
    """Random, rounded by rows."""
    return round_rows(torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16))


def error_of(out: Tensor, weight: Weight, x: Rounded) -> float:
    """Relative to float64."""
    exact = restored(x).double() @ restored(Rounded(weight[0], weight[1][:, None])).double().t()
    return float((out.double() - exact).norm() / exact.norm())


def tried(shape: str, rows: int, ways: list[Way]) -> dict[Way, str]:
    """Compiles and runs each way twice, in a process of its own. Says what is wrong, or nothing."""
    torch.manual_seed(0)
    weight, x = weight_of(shape), activations(rows, SHAPES[shape][1])
    found: dict[Way, str] = {}
    for way in ways:
        try:
            first, again = way(weight, x), way(weight, x)
            error = error_of(first, weight, x)
            same = torch.equal(first, again)
            found[way] = "" if error < MOST_ERROR and same else f"error {error:.4f}, again: {same}"
        except Exception as failed:  # The other ways are worth their figures.
            found[way] = f"{type(failed).__name__}: {str(failed)[:200]}"
    return found


def compiled(rows: tuple[int, ...], seconds: float) -> dict[tuple[str, int], list[Way]]:
    """What works, for each shape and number of rows."""
    begin = time.perf_counter()
    works: dict[tuple[str, int], list[Way]] = {}
    pool = ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"))
    waiting = {}
    for shape, m in product(SHAPES, rows):
        ways = list(ways_of(shape, m))
        ways += chain(*map(ahead_of, ways))
        for share in (ways[::3], ways[1::3], ways[2::3]):
            waiting[pool.submit(tried, shape, m, share)] = shape, m
    workers = list(pool._processes.values())
    for future, case in waiting.items():
        left = max(1.0, seconds - (time.perf_counter() - begin))
        try:
            found = future.result(timeout=left)
        except Exception as failed:  # As above.
            print(f"{case}: {type(failed).__name__} {failed}", flush=True)
            continue
        works.setdefault(case, []).extend(way for way, wrong in found.items() if not wrong)
        for way, wrong in found.items():
            if wrong:
                print(f"{case} {way}: {wrong}", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()  # One may hang.
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    return works


def swept(shape: str, rows: int, ways: list[Way]) -> list[tuple[float, Way | None]]:
    """Microseconds of the ways, the best first; None is `scaled_mm`."""
    outputs, inputs = SHAPES[shape]
    weights = [weight_of(shape) for _ in range(math.ceil(CACHE_BYTES / (outputs * inputs)) + 1)]
    x = activations(rows, inputs)

    def us(run: Callable[[Weight], Tensor]) -> float:
        return graph_us([lambda w=w: run(w) for w in weights])  # type: ignore[misc]

    def time_of(way: Way) -> float:
        try:
            return us(lambda w: way(w, x))
        except Exception as failed:  # As above.
            print(f"{shape} {rows} {way}: {str(failed)[:200]}", flush=True)
            return math.inf

    plain = sorted((time_of(way), way) for way in ways if not way.tiles.ahead)
    early = [after for _, way in plain[:3] for after in ahead_of(way)]
    one = [way for _, way in plain if way.kernel == "one_row"][:2]
    early += [after for way in one for after in ahead_of(way)]
    found: list[tuple[float, Way | None]] = [*plain, *((time_of(way), way) for way in early)]
    found.append((us(lambda w: scaled_rows(*w, *x, None, torch.bfloat16)), None))
    found.sort(key=lambda pair: pair[0])
    return found


def show(shape: str, rows: int, found: list[tuple[float, Way | None]]) -> None:
    """The best ways, the best of each kind, and `scaled_mm`."""
    outputs, inputs = SHAPES[shape]
    kinds = set()
    for place, (us, way) in enumerate(found):
        kind = "scaled_mm" if way is None else f"{way.kernel} {way.tiles.ahead > 0} "
        kind += "" if way is None else str(way.tiles.described)
        if place < 5 or kind not in kinds:
            rate = outputs * inputs / us / 1e6
            times = us * BYTES_S / 1e6 / (outputs * inputs)
            line = f"{us:7.2f} us {rate:5.2f} TB/s, floor x {times:4.2f}"
            print(f"{shape:>8} {rows:4d} rows {line}  {way or 'scaled_mm'}", flush=True)
        kinds.add(kind)


def rounding_costs(rows: int) -> list[dict[str, Any]]:
    """Microseconds of the kernels that round, one after the other."""
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    residual, gain = torch.randn_like(x), torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(rows, 2 * WIDE, device="cuda", dtype=torch.bfloat16)
    kinds = {**KINDS, "static": Rounding(torch.full((1,), 0.01, device="cuda"))}
    found = []
    for (values, most), (kind, how), pdl in product(WARPS, kinds.items(), (False, True)):
        if pdl and kind != "rows":
            continue
        rounding._VALUES_OF_A_WARP, rounding._MOST_WARPS = values, most  # type: ignore[misc]
        kernels = {
            "norm": lambda how=how, pdl=pdl: rounding.add_rms_norm_rounded(
                residual, x, gain, 1e-5, how, pdl=pdl
            ),
            "silu": lambda how=how, pdl=pdl: rounding.silu_mul_rounded(gate_up, how, pdl=pdl),
            "round": lambda how=how, pdl=pdl: rounding.rounded(x, how, pdl=pdl),
        }
        times = {name: graph_us([kernel] * 50) for name, kernel in kernels.items()}  # type: ignore[list-item]
        found.append(
            {"rows": rows, "values": values, "warps": most, "kind": kind, "pdl": pdl, **times}
        )
        line = " ".join(f"{name} {us:5.2f}" for name, us in times.items())
        print(f"{rows:4d} rows {kind:>6} {values:4d} x {most:2d} pdl {pdl!s:>5}: {line} us")
    rounding._VALUES_OF_A_WARP, rounding._MOST_WARPS = WARPS[0]  # type: ignore[misc]
    return found


def layer_us(rows: int, linear: Linear, *, pdl: bool, layers: list[dict[str, Weight]]) -> float:
    """Microseconds of a layer's products and roundings. What attention does is left out."""
    residual = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    gain = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    how = Rounding()

    def run(layer: dict[str, Weight]) -> Tensor:
        rounded = rounding.rounded(residual, how, pdl=pdl)
        qkv = linear("qkv", layer["qkv"], rounded)
        attended = qkv.view(-1)[: rows * HIDDEN].view(rows, HIDDEN)
        x = linear("o", layer["o"], rounding.rounded(attended, how, pdl=pdl))
        rounded = rounding.add_rms_norm_rounded(residual, x, gain, 1e-5, how, pdl=pdl)
        x = linear("gate-up", layer["gate-up"], rounded)
        x = linear("down", layer["down"], rounding.silu_mul_rounded(x, how, pdl=pdl))
        return rounding.add_rms_norm_rounded(residual, x, gain, 1e-5, how, pdl=pdl).values

    return graph_us([lambda layer=layer: run(layer) for layer in layers * 3])  # type: ignore[misc]


def layers_us(rows: int, best: dict[str, dict[str, Way]]) -> dict[str, float]:
    """Of every combination: the engine's choice, the best ways, `scaled_mm`."""
    layers = [{shape: weight_of(shape) for shape in SHAPES} for _ in range(LAYERS)]
    linears: dict[str, tuple[Linear, bool]] = {
        "scaled_mm": (lambda _, w, x: scaled_rows(*w, *x, None, torch.bfloat16), False),
        "fp8_linear": (lambda _, w, x: fp8_linear(*w, *x, None, torch.bfloat16), False),
    }
    for name, ways in best.items():
        linears[name] = lambda shape, w, x, ways=ways: ways[shape](w, x), "early" in name  # type: ignore[misc]
        linears[f"{name}, roundings too"] = linears[name][0], True
    found = {}
    for name, (linear, pdl) in linears.items():
        try:
            found[name] = layer_us(rows, linear, pdl=pdl, layers=layers)
        except Exception as failed:  # As above.
            print(f"layer {rows} {name}: {str(failed)[:200]}", flush=True)
            continue
        ms = found[name] * 32 / 1e3
        print(f"layer {rows:4d} rows {found[name]:7.2f} us, 32 layers {ms:.3f} ms  {name}")
    return found


def best_of(found: dict[str, list[tuple[float, Way | None]]]) -> dict[str, dict[str, Way]]:
    """Plain and early ways of each shape, the best."""
    kinds: dict[str, Callable[[Way], bool]] = {
        "best plain": lambda way: way.tiles.ahead == 0,
        "best early": lambda way: way.tiles.ahead > 0,
        "best early few_rows": lambda way: way.tiles.ahead > 0 and way.kernel == "few_rows",
    }
    return {
        name: {shape: next(w for _, w in ways if w and fits(w)) for shape, ways in found.items()}
        for name, fits in kinds.items()
    }


def main() -> None:
    """Measures all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=150, help="for compiling")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    works = compiled(tuple(arguments.rows), arguments.seconds)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "products": [], "layers": {}}
    for rows in arguments.rows:
        found = {shape: swept(shape, rows, works.get((shape, rows), [])) for shape in SHAPES}
        for shape, ways in found.items():
            show(shape, rows, ways)
            result["products"] += [
                {"shape": shape, "rows": rows, "us": us, "way": way and [way.kernel, *way.tiles]}
                for us, way in ways
            ]
        try:
            result["layers"][rows] = layers_us(rows, best_of(found))
            result.setdefault("rounding", []).extend(rounding_costs(rows))
        except Exception as failed:  # As above.
            print(f"{rows} rows: {type(failed).__name__} {str(failed)[:300]}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
