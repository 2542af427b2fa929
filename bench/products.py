"""What each product of a weight with activations costs on one GPU, beside its floor.

    python -m bench.products [--ways NAME ...] [--shapes NAME ...] [--rows N ...] [--json FILE]

The weights are those of one layer of the 8B shape. Each is used in a CUDA graph, with as many
copies in turn as no cache holds; the figure is the median of ten replays. The activations are
rounded before, because the kernels before a product round them where FP8 runs.

Ways: `bf16`; `fp8-rows` (a scale for each row and output channel) and `fp8-blocks` (1 x 128 and
128 x 128), both `torch.nn.functional.scaled_mm`; `humming-int4` (groups of 128, bf16 activations)
and `humming-fp8` (FP8 activations), if `humming-kernels` is installed.

Floor: the larger of the weight's bytes at 4.03 TB/s, and of the operations at what the chip
sustains (653 TFLOP/s in bf16, 1,308 in FP8), measured on H200s. `error` is the norm of the
difference from float64's product of the same bf16 weight and activations, relative.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

SHAPES: Final = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate-up": (28672, 4096),
    "down": (4096, 14336),
}
"""Output and input channels."""
ROWS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
BYTES_S: Final = 4.03e12
BF16_FLOPS: Final = 653e12
FP8_FLOPS: Final = 1308e12
CACHE_BYTES: Final = 256 << 20
"""More than the L2 cache of any GPU holds."""
FP8_MOST: Final = 448.0
BLOCK: Final = 128

Product = Callable[[], Tensor]
"""[M, N]"""
Way = Callable[[Tensor], Callable[[Tensor], Product]]
"""Takes a weight, [N, K] bf16; then activations, [M, K] bf16."""


@dataclass(frozen=True)
class Figure:
    """One product, measured."""

    shape: str
    way: str
    rows: int
    us: float
    floor_us: float
    tbytes_s: float
    tflops: float
    error: float


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale as e4m3."""
    return (x.float() / scale).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)


def bf16(weight: Tensor) -> Callable[[Tensor], Product]:
    """The product that bf16 models use."""
    return lambda x: lambda: functional.linear(x, weight)


def fp8_rows(weight: Tensor) -> Callable[[Tensor], Product]:
    """A scale for each row of activations and each output channel."""
    scales = (weight.float().abs().amax(1, keepdim=True) / FP8_MOST).clamp_min(1e-12)
    values, recipe = rounded(weight, scales).t(), functional.ScalingType.RowWise
    columns = scales.t().contiguous()

    def of(x: Tensor) -> Product:
        own = (x.float().abs().amax(1, keepdim=True) / FP8_MOST).clamp_min(1e-12)
        x8 = rounded(x, own)
        return lambda: functional.scaled_mm(
            x8, values, own, recipe, columns, recipe, use_fast_accum=True
        )

    return of


def fp8_blocks(weight: Tensor) -> Callable[[Tensor], Product]:
    """A scale for each 128 channels of a row, and for each 128 x 128 of the weight."""
    n, k = weight.shape
    blocks = weight.float().view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / FP8_MOST).clamp_min(1e-12)
    values = rounded(blocks, scales[:, None, :, None]).view(n, k).t()
    of_weight = functional.ScalingType.BlockWise128x128

    def of(x: Tensor) -> Product:
        parts = x.float().view(len(x), k // BLOCK, BLOCK)
        own = (parts.abs().amax(2) / FP8_MOST).clamp_min(1e-12)
        x8 = rounded(parts, own[:, :, None]).view(len(x), k)
        outer = torch.empty_strided(own.shape, (1, len(x)), device=x.device).copy_(own)
        return lambda: functional.scaled_mm(
            x8, values, outer, functional.ScalingType.BlockWise1x128, scales.t(), of_weight
        )

    return of


def humming(weights: dict[str, Any], inputs: dict[str, Any]) -> Way:
    """A layer of humming-kernels, which rounds activations by itself."""

    def way(weight: Tensor) -> Callable[[Tensor], Product]:
        n, k = weight.shape
        layer = importlib.import_module("humming.layer").HummingLayer(
            shape_n=n,
            shape_k=k,
            weight_config=dict(weights),
            input_config=dict(inputs),
            torch_dtype=torch.bfloat16,
        )
        layer = layer.cuda()
        layer.load_from_unquantized(weight)
        layer.transform()
        return lambda x: lambda: layer(x)

    return way


WAYS: Final[dict[str, tuple[Way, float, float]]] = {
    "bf16": (bf16, 2, BF16_FLOPS),
    "fp8-rows": (fp8_rows, 1, FP8_FLOPS),
    "fp8-blocks": (fp8_blocks, 1, FP8_FLOPS),
    "humming-int4": (humming({"dtype": "int4", "group_size": 128}, {}), 0.5, BF16_FLOPS),
    "humming-fp8": (humming({"dtype": "float8e4m3"}, {"dtype": "float8e4m3"}), 1, FP8_FLOPS),
}
"""With the bytes of a weight, and the operations a second."""


def graph_us(products: list[Product], replays: int = 10) -> float:
    """Microseconds of one product, all of them in turn in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for product in products[:2]:
            product()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product()
    times: list[float] = []
    for replay in range(replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(begin.elapsed_time(end) * 1e3 / len(products))
    return statistics.median(times)


def measure(shape: str, name: str, rows: tuple[int, ...]) -> list[Figure]:
    """One way on one weight with each number of rows."""
    way, size, flops = WAYS[name]
    n, k = SHAPES[shape]
    copies = max(2, math.ceil(CACHE_BYTES / (size * n * k)))
    begin = time.perf_counter()
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    made = [way(weight) for weight in weights]
    weight = weights[0]
    del weights
    torch.cuda.synchronize()
    print(f"{shape} {name}: {copies} weights in {time.perf_counter() - begin:.1f} s", flush=True)
    figures = []
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        exact = x[:64].double() @ weight.double().t()
        try:
            found = made[0](x)()[:64].double()
        except (RuntimeError, ValueError) as refused:  # The other numbers of rows may be taken.
            print(f"{shape} {name} {m} rows: {str(refused)[:200]}", flush=True)
            continue
        error = ((found - exact).norm() / exact.norm()).item()
        us = graph_us([each(x) for each in made])
        floor_us = 1e6 * max(size * n * k / BYTES_S, 2 * m * n * k / flops)
        rates = size * n * k / us / 1e6, 2 * m * n * k / us / 1e6
        figures.append(Figure(shape, name, m, us, floor_us, *rates, error))
        print(
            f"{shape:>8} {name:>13} {m:6d} rows {us:9.1f} us, floor {floor_us:8.1f}"
            f" ({us / floor_us:5.2f} x) {rates[0]:6.2f} TB/s {rates[1]:7.1f} TFLOP/s"
            f" error {error:.4f}",
            flush=True,
        )
    return figures


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}")
    figures: list[Figure] = []
    for name in arguments.ways:
        for shape in arguments.shapes:
            try:
                figures += measure(shape, name, tuple(arguments.rows))
            except Exception as error:  # The others are worth their figures.
                print(f"{shape} {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            torch.cuda.empty_cache()
            if arguments.json:
                rows = [asdict(figure) for figure in figures]
                found = {"device": device, "torch": torch.__version__, "figures": rows}
                arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
