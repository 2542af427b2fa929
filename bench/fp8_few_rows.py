"""How products of few rows in FP8 are best cut on one GPU, and what a layer of them costs.

    python -m bench.fp8_few_rows [--rows N ...] [--seconds S] [--json FILE]

1. Other processes compile everything first, and try it. A way that fails is left out.
2. For each weight of the 8B shape and number of rows: the ways near the engine's own, and
   `scaled_mm`. `*` marks the engine's choice.
3. All products and roundings of a layer in their order, by the engine's code, without attention.
4. Kernels that round.

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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench.products import BYTES_S, CACHE_BYTES, SHAPES, graph_us
from engine.cuda import feed_forward, joining, kernels
from engine.cuda.products import CudaProducts, fp8, one_row, rounding, unrounded_row
from engine.cuda.products.few_rows import Tiles, few_rows
from engine.cuda.products.one_row import Cut
from engine.model.linear import Build, Linear, RmsNorm
from engine.model.precision.base import Part
from engine.model.precision.fp8 import Fp8Blocks, Fp8Channels, scaled_rows
from engine.model.precision.rounding import Rounded, Rounding, restored, round_rows
from engine.model.region import Region
from engine.model.shard import Shard
from engine.step.collective import Alone

ROWS: Final = (1, 16, 64, 128)
PROCESSES: Final = 12
MOST_ERROR: Final = 4e-3
"""Of bf16, and of sums within tensor cores."""
CUTS: Final = (Cut(1024, 4), Cut(2048, 4), Cut(2048, 2), Cut(4096, 4), Cut(4096, 8))
"""Of one row. A row is cut by the first that divides it, here and in the engine."""
METHODS: Final = {"channels": Fp8Channels, "blocks": Fp8Blocks}
VALUES_OF_A_WARP: Final = (256, 128)
LAYERS: Final = 3
HIDDEN: Final = 4096
WIDE: Final = 14336

Weight = tuple[Tensor, Tensor]
"""[N, K] e4m3 and [N] float32."""
Cutting = Cut | Tiles | None
"""None is `scaled_mm`."""
Layer = dict[str, Linear]


class Way(NamedTuple):
    """A kernel, and how it cuts a product."""

    cutting: Cutting
    early: bool = True

    def __call__(self, weight: Weight, x: Rounded) -> Tensor:
        """[T, N] bf16."""
        if self.cutting is None:
            return scaled_rows(*weight, x, None, torch.bfloat16)
        if isinstance(self.cutting, Tiles):
            return few_rows(*weight, *x, None, torch.bfloat16, self.cutting)
        with patch.object(one_row, "early", lambda: self.early):
            return one_row.fp8_one_row(*weight, x, None, torch.bfloat16, self.cutting)

    def __str__(self) -> str:
        if self.cutting is None:
            return "scaled_mm"
        fields = " ".join(f"{k} {v}" for k, v in self.cutting._asdict().items())
        early = f", early {self.early}" if isinstance(self.cutting, Cut) else ""
        return f"{fields}{early}"


def own_of(shape: str, rows: int) -> Cutting:
    """The engine's choice."""
    outputs, inputs = SHAPES[shape]
    if rows == 1:
        return one_row.cut_of(torch.empty(1, inputs, dtype=torch.float8_e4m3fn))
    return fp8.tiles_of(outputs, inputs, rows)


def ways_of(shape: str, rows: int) -> Iterator[Way]:
    """What is tried: the engine's choice and its neighbours, launched early and not."""
    yield Way(None)
    if rows == 1:
        cuts = [cut for cut in CUTS if SHAPES[shape][1] % cut.block == 0]
        yield from (Way(cut, early) for cut, early in product(cuts, (True, False)))
        return
    count = SHAPES[shape][0] // 64
    tiles = {Tiles(64, 256, parts, stages, 4, 512) for parts, stages in product((1, 2, 4), (3, 4))}
    tiles = {cut for cut in tiles if count * cut.parts <= 264 or cut.parts == 1}
    tiles.add(Tiles(64, 128, max(1, 132 // count), 6, 4, 512))
    if count > 132:
        tiles |= {Tiles(128, 256, 1, stages, 4, 512) for stages in (3, 4) if rows <= 64}
    own = own_of(shape, rows)
    if isinstance(own, Tiles):
        tiles |= {own, own._replace(ahead=0), own._replace(ahead=1024)}
    yield from (Way(cut) for cut in tiles)


def weight_of(shape: str) -> Weight:
    """Random, rounded by channels."""
    values = torch.randn(SHAPES[shape], device="cuda", dtype=torch.bfloat16) * 0.02
    rounded = round_rows(values)
    return rounded.values, rounded.scales.view(-1)


def activations(rows: int, inputs: int) -> Rounded:
    """Random, rounded by rows."""
    return round_rows(torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16))


def tried(shape: str, rows: int, ways: list[Way]) -> dict[Way, str]:
    """Compiles and runs each way twice, in a process of its own. Says what is wrong, or nothing."""
    torch.manual_seed(0)
    weight, x = weight_of(shape), activations(rows, SHAPES[shape][1])
    exact = restored(x).double() @ restored(Rounded(weight[0], weight[1][:, None])).double().t()
    found: dict[Way, str] = {}
    for way in ways:
        try:
            first, again = way(weight, x), way(weight, x)
            error = float((first.double() - exact).norm() / exact.norm())
            same = torch.equal(first, again)
            found[way] = "" if error < MOST_ERROR and same else f"error {error:.4f}, again: {same}"
        except Exception as failed:  # The other ways are worth their figures.
            found[way] = f"{type(failed).__name__}: {str(failed)[:200]}"
    return found


def warmed(rows: int, method: str) -> dict[Way, str]:
    """Compiles what a layer runs."""
    layer = layer_of(method)
    for _, patched in variants(rows, {}):
        with patched():
            run_layer(layer, state_of(rows, layer))
    for values in VALUES_OF_A_WARP[1:]:
        with patch.object(rounding, "_VALUES_OF_A_WARP", values):
            run_layer(layer, state_of(rows, layer))
    return {}


def compiled(rows: tuple[int, ...], seconds: float) -> dict[tuple[str, int], list[Way]]:
    """What works, for each shape and number of rows."""
    begin = time.perf_counter()
    works: dict[tuple[str, int], list[Way]] = {case: [] for case in product(SHAPES, rows)}
    pool = ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"))
    waiting: dict[Any, tuple[str, int]] = {}
    for m, method in product(rows, METHODS):
        waiting[pool.submit(warmed, m, method)] = method, m
    for shape, m in works:
        waiting[pool.submit(tried, shape, m, list(ways_of(shape, m)))] = shape, m
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


def swept(shape: str, rows: int, ways: list[Way]) -> list[tuple[float, Way]]:
    """Microseconds of the ways, the best first."""
    outputs, inputs = SHAPES[shape]
    weights = [weight_of(shape) for _ in range(math.ceil(CACHE_BYTES / (outputs * inputs)) + 1)]
    x, own, found = activations(rows, inputs), own_of(shape, rows), []
    for way in ways:
        try:
            us = graph_us([lambda w=w, way=way: way(w, x) for w in weights])  # type: ignore[misc]
        except Exception as failed:  # As above.
            print(f"{shape} {rows} {way}: {str(failed)[:200]}", flush=True)
            continue
        found.append((us, way))
    found.sort(key=lambda pair: pair[0])
    for place, (us, way) in enumerate(found):
        if place < 6 or way.cutting in (own, None):
            rate, times = outputs * inputs / us / 1e6, us * BYTES_S / 1e6 / (outputs * inputs)
            line = f"{us:7.2f} us {rate:5.2f} TB/s, floor x {times:4.2f}"
            mark = "*" if way.cutting == own else " "
            print(f"{shape:>8} {rows:4d} rows {line} {mark} {way}", flush=True)
    return found


def layer_of(method: str) -> Layer:
    """The products of a layer of the 8B shape, with random weights."""
    layer = {}
    for shape, (outputs, inputs) in SHAPES.items():
        options = {"static_input": False} if method == "channels" else {}
        own = METHODS[method](
            outputs, inputs, torch.bfloat16, torch.device("cuda"), on_gpu=True, **options
        )
        own.fill(0, torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02)
        own.finish(CudaProducts())
        precision: Any = SimpleNamespace(method=lambda *_, own=own: own)
        parts = [Part("", Region.whole(outputs, inputs))]
        layer[shape] = Linear(parts, False, _build(precision))
    return layer


def _build(precision: Any) -> Build:
    return Build(torch.bfloat16, torch.device("cuda"), precision, Shard(), Alone())


class State(NamedTuple):
    """What goes into a layer."""

    x: Tensor | Rounded
    residual: Tensor
    norm: RmsNorm
    """For all places."""


def state_of(rows: int, layer: Layer) -> State:
    """Random."""
    norm = RmsNorm(HIDDEN, 1e-5, _build(None))
    norm.weight.fill_(1)
    residual = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    return State(
        joining.entered(residual, joining.Join(None, norm, layer["qkv"].method.input, 1.0)),
        residual,
        norm,
    )


def run_layer(layer: Layer, state: State) -> Any:
    """A layer as the engine runs it. Attention returns its queries."""
    x, residual, norm = state
    how = {shape: linear.method.input for shape, linear in layer.items()}
    qkv = layer["qkv"](x)
    attended = qkv.view(-1)[: residual.numel()].view_as(residual)
    out = layer["o"](attended)
    x = joining.joined(residual, out, joining.Join(None, norm, how["gate-up"], 1.0))
    out = layer["down"](feed_forward.gated(x, layer["gate-up"], how["down"]))
    return joining.joined(residual, out, joining.Join(None, norm, how["qkv"], 1.0))


Patched = Callable[[], Any]


@contextmanager
def replaced(*places: tuple[object, str, object]) -> Iterator[None]:
    """Names of modules with other values."""
    with ExitStack() as stack:
        for module, name, value in places:
            stack.enter_context(patch.object(module, name, value))
        yield


def variants(rows: int, best: dict[tuple[int, int], Tiles | None]) -> Iterator[tuple[str, Patched]]:
    """The engine's code as it is, and changed in one respect. `best`: tiles by weight."""
    yield "the engine", replaced
    modules, tiles_of = (kernels, one_row, rounding, unrounded_row), fp8.tiles_of
    late: list[tuple[object, str, object]] = [(each, "early", lambda: False) for each in modules]

    def plain(*shape: int) -> Tiles | None:
        tiles = tiles_of(*shape)
        return tiles and tiles._replace(ahead=0)

    yield "nothing early", lambda: replaced((fp8, "tiles_of", plain), *late)
    if rows == 1:
        for cut in CUTS[1:]:
            one = (one_row, "_CUTS", (cut, CUTS[0]))
            yield f"one row by {cut}", partial(replaced, one)
        none = (CudaProducts, "fp8_gated", lambda *_: None)
        yield "gate and up apart", lambda: replaced(none)
        return
    if rows <= rounding._FEW_ROWS:
        yield "silu in one kernel", lambda: replaced((rounding, "_FEW_ROWS", 0))
    yield "scaled_mm", lambda: replaced((fp8, "tiles_of", lambda *_, **__: None))
    if best:
        taken = (fp8, "tiles_of", lambda n, k, _, **__: best[n, k])
        yield "the best of the sweep", lambda: replaced(taken)


def layer_us(rows: int, layers: list[Layer]) -> float:
    """Microseconds of a layer."""
    state = state_of(rows, layers[0])
    return graph_us([lambda layer=layer: run_layer(layer, state) for layer in layers * 3])  # type: ignore[misc]


def layers_us(rows: int, best: dict[tuple[int, int], Tiles | None]) -> dict[str, float]:
    """Microseconds of a layer, by method and variant."""
    found = {}
    for method in METHODS:
        layers = [layer_of(method) for _ in range(LAYERS)]
        for name, patched in variants(rows, best if method == "channels" else {}):
            try:
                with patched():
                    us = found[f"{method}, {name}"] = layer_us(rows, layers)
            except Exception as failed:  # As above.
                print(f"layer {rows} {method} {name}: {str(failed)[:200]}", flush=True)
                continue
            line = f"{us:7.2f} us, 32 layers {us * 32 / 1e3:.3f} ms"
            print(f"layer {rows:4d} rows {line}  {method}, {name}", flush=True)
    return found


def rounding_costs(rows: int) -> list[dict[str, Any]]:
    """Microseconds of the kernels that round, one after the other."""
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    residual, gain = torch.randn_like(x), torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(rows, 2 * WIDE, device="cuda", dtype=torch.bfloat16)
    wide = gate_up.view(-1)[: rows * WIDE].view(rows, WIDE)
    kinds = {"rows": Rounding(), "groups": Rounding(group=128)}
    found = []
    for values, (kind, how) in product(VALUES_OF_A_WARP, kinds.items()):
        run: dict[str, Any] = {
            "norm": lambda how=how: rounding.add_rms_norm_rounded(residual, x, gain, 1e-5, how),
            "silu": lambda how=how: rounding.silu_mul_rounded(gate_up, how),
            "round": lambda how=how: rounding.rounded(x, how),
            "round wide": lambda how=how: rounding.rounded(wide, how),
        }
        with patch.object(rounding, "_VALUES_OF_A_WARP", values):
            times = {name: graph_us([kernel] * 50) for name, kernel in run.items()}
        found.append({"rows": rows, "kind": kind, "values": values, **times})
        line = ", ".join(f"{name} {us:5.2f}" for name, us in times.items())
        print(f"{rows:4d} rows {kind:>6}, {values} values of a warp: {line} us", flush=True)
    return found


def main() -> None:
    """Measures all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=60, help="for compiling")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}", flush=True)
    works = compiled(tuple(arguments.rows), arguments.seconds)
    result: dict[str, Any] = {"device": name, "products": [], "layers": {}, "rounding": []}
    for rows in arguments.rows:
        found = {shape: swept(shape, rows, works[shape, rows]) for shape in SHAPES}
        result["products"] += [
            {"shape": shape, "rows": rows, "us": us, "way": str(way)}
            for shape, ways in found.items()
            for us, way in ways
        ]
        cuttings = {SHAPES[shape]: ways[0][1].cutting for shape, ways in found.items() if ways}
        best = {shape: None if isinstance(cut, Cut) else cut for shape, cut in cuttings.items()}
        try:
            result["layers"][rows] = layers_us(rows, best)
            result["rounding"] += rounding_costs(rows)
        except Exception as failed:  # As above.
            print(f"{rows} rows: {type(failed).__name__} {str(failed)[:300]}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
