"""What must hold of the FP8 kernels: on a GPU, and in Triton's interpreter, which is this module's
`main`. The interpreter drops the carry of a mantissa in conversions to FP8, truncates its
subnormals, and has neither FP8's NaN nor PTX. So a GPU alone shows some values and early launches.
A product that rounds is given PyTorch's conversions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.model.precision.rounding import (
    Rounded,
    Rounding,
    restored,
    round_groups,
    round_rows,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
EARLY = 0 if INTERPRETED else 512
SHAPES = [(208, 592, 17), (128, 512, 1)]
"""Outputs, inputs, rows."""
if not INTERPRETED:
    SHAPES += [(256, 1024, 3), (4096, 4096, 1), (6144, 14336, 64), (28672, 4096, 33)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32)


def kinds() -> list[Rounding]:
    return [Rounding(), Rounding(scale=torch.tensor([0.01], device=DEVICE)), Rounding(group=128)]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def assert_same(got: Rounded, want: Rounded) -> None:
    """In every bit."""
    assert torch.equal(got.scales, want.scales)
    assert alike(got, want).all()


def assert_nearly_same(got: Rounded, want: Rounded) -> None:
    """Up to the order of a sum before, which may round a value to the other side."""
    assert torch.allclose(got.scales, want.scales, rtol=1e-2)
    assert alike(got, want).float().mean() > 0.99


def alike(got: Rounded, want: Rounded) -> Tensor:
    """[T, K]: the values are the same."""
    assert got.values.is_contiguous()
    ours, theirs = got.values.float(), want.values.float()
    if INTERPRETED:
        carried = (theirs.abs().frexp().mantissa == 0.5) | (theirs.abs() < 2**-6)
        ours = torch.where(carried, theirs, ours)
    return ours == theirs


def check_rounding_of_any_rows() -> None:
    from engine.cuda.products.rounding import rounded

    for how in kinds():
        for rows, size in ((1, 4096), (5, 1408), (2, 14336), (65, 2816)):
            x = draw(rows, size).mul(3).to(DTYPE)
            x[-1, :700] = 0
            x[0, 7] = 1000
            assert_same(rounded(x, how), how(x))


def check_rounding_keeps_what_is_not_finite() -> None:
    if INTERPRETED:
        return
    from engine.cuda.products.rounding import rounded

    for bad in (float("nan"), float("inf")):
        for how in kinds():
            x = draw(2, 256).to(DTYPE)
            x[1, 3] = bad
            got = restored(rounded(x, how))
            assert got[0].isfinite().all()
            assert how.scale is not None or not got[1].isfinite().all()
            assert bad == float("inf") or got[1, 3].isnan()


def check_norms() -> None:
    from engine.cuda.kernels import add_rms_norm, rms_norm
    from engine.cuda.products.rounding import add_rms_norm_rounded, rms_norm_rounded

    x, residual = draw(3, 1408).to(DTYPE), draw(3, 1408, seed=1).to(DTYPE)
    gain = draw(1408).to(DTYPE)
    for how in kinds():
        assert_nearly_same(rms_norm_rounded(x, gain, 1e-5, how), how(rms_norm(x, gain, 1e-5)))
        ours, theirs = residual.clone(), residual.clone()
        got = add_rms_norm_rounded(ours, x, gain, 1e-5, how)
        assert_nearly_same(got, how(add_rms_norm(theirs, x.clone(), gain, 1e-5)))
        assert torch.equal(ours, theirs)


def check_silu() -> None:
    from engine.cuda.kernels import silu_mul
    from engine.cuda.products.rounding import silu_mul_rounded

    for how, rows in product(kinds(), (3, 65)):
        gate_up = draw(rows, 2 * 1408).to(DTYPE)
        assert_nearly_same(silu_mul_rounded(gate_up, how), how(silu_mul(gate_up)))


def check_few_rows() -> None:
    """Tails of both dimensions, tiles in parts, and the same sum every time."""
    from engine.cuda.products.few_rows import Tiles, few_rows

    ways = [
        Tiles(128, 128, 1, 4, 4),
        Tiles(64, 128, 3, 4, 4, EARLY),
        Tiles(64, 256, 2, 3, 4, EARLY),
    ]
    for outputs, inputs, rows in SHAPES:
        weight, x = round_rows(draw(outputs, inputs)), round_rows(draw(rows, inputs, seed=1))
        bias = draw(outputs)
        want = restored(x).double() @ restored(weight).double().t() + bias.double()
        for tiles in ways:
            given = (weight.values, weight.scales.view(-1), *x, bias, torch.float32, tiles)
            got = few_rows(*given)
            assert relative_error(got, want) < 1e-3
            assert torch.equal(got, few_rows(*given))


def check_few_rows_of_16_bits() -> None:
    from engine.cuda.products.few_rows import Tiles, few_rows

    ways = [Tiles(128, 64, 1, 4, 4), Tiles(64, 128, 4, 4, 4, EARLY), Tiles(64, 128, 2, 3, 4)]
    for outputs, inputs, rows in SHAPES:
        weight, x = draw(outputs, inputs).to(DTYPE), draw(rows, inputs, seed=1).to(DTYPE)
        bias = draw(outputs).to(DTYPE)
        want = x.double() @ weight.double().t() + bias.double()
        for tiles in ways:
            given = (weight, None, x, None, bias, torch.float32, tiles)
            got = few_rows(*given)
            assert relative_error(got, want) < (1e-5 if INTERPRETED else 1e-4)
            assert torch.equal(got, few_rows(*given))


def one_row_cases() -> Iterator[tuple[Tensor, Tensor, Rounded, Tensor]]:
    """Values, scales, a row, and the weight that the values stand for."""
    weight, x = round_rows(draw(100, 1024)), round_rows(draw(1, 1024, seed=1))
    yield weight.values, weight.scales.view(-1), x, restored(weight)
    values, scales, plain = blocks(256, 1536)
    yield values, scales, round_groups(draw(1, 1536, seed=1)), plain


def check_one_row() -> None:
    from engine.cuda.products.one_row import Cut, fp8_one_row

    for values, scales, x, weight in one_row_cases():
        bias = draw(len(values))
        want = restored(x).double() @ weight.double().t() + bias.double()
        for bias_too in (False, True):
            given = (bias if bias_too else None, torch.float32, Cut(512))
            got = fp8_one_row(values, scales, x, *given)
            assert relative_error(got, want if bias_too else want - bias) < 1e-5


def check_a_row_that_is_not_rounded() -> None:
    """As if it were rounded before, up to the order of a sum. Rows of the weight in part of a
    program, and inputs that are no power of two."""
    from engine.cuda.products.unrounded_row import Cut, cut_of
    from engine.cuda.products.unrounded_row import product as product_of_row

    by_channel, (in_blocks, scales, _) = round_rows(draw(500, 640)), blocks(512, 640)
    bias = draw(512)
    for how in kinds():
        values, given = (by_channel.values, by_channel.scales.view(-1))
        if how.group is not None:
            values, given = in_blocks, scales
        weight = restored(Rounded(values, scales_by_row(given)))
        x = draw(1, 640, seed=1).to(DTYPE)
        x[0, 7] = 9
        want = restored(how(x)).double() @ weight.double().t()
        cut = cut_of(values, 1)
        assert cut == Cut(2, 1024)
        for own, bias_too in product((cut, Cut(8, 1024)), (False, True)):
            added = bias[: len(values)] if bias_too else None
            with rounding_as_a_gpu_does():
                got = product_of_row(values, given, x, how, added, torch.float32, own)
            assert relative_error(got, want if added is None else want + added) < 1e-5, how


def check_two_products_of_a_row() -> None:
    """One in FP8 and one in 16 bits behind it, in one kernel."""
    from engine.cuda.products.one_row import cut_of, fp8_one_row, with_another

    by_channel, (in_blocks, scales, _) = round_rows(draw(256, 1024)), blocks(256, 1024)
    other = draw(5, 1024, seed=2).to(DTYPE)
    for how in (Rounding(keeps=True), Rounding(group=128, keeps=True)):
        values, given = in_blocks, scales
        if how.group is None:
            values, given = by_channel.values, by_channel.scales.view(-1)
        x = how(draw(1, 1024, seed=1).to(DTYPE))
        cut = cut_of(x.values)
        assert cut is not None
        first, second = with_another(values, given, x, other, cut)
        assert torch.equal(first, fp8_one_row(values, given, x, None, DTYPE, cut))
        assert x.plain is not None
        want = x.plain.double() @ other.double().t()
        assert relative_error(second, want) < (1e-5 if INTERPRETED else 5e-3)


def rounding_as_a_gpu_does() -> AbstractContextManager[object]:
    if not INTERPRETED:
        return nullcontext()
    from interpreted_kernels import convert_as_a_gpu_does
    from triton.runtime import interpreter

    return patch.object(interpreter, "_convert_float", convert_as_a_gpu_does)


def scales_by_row(scales: Tensor) -> Tensor:
    """[N, 1], or [N, K / 128]."""
    return scales[:, None] if scales.dim() == 1 else scales.repeat_interleave(128, 0)


def check_which_rows_are_rounded_by_products() -> None:
    """One, with few outputs and inputs."""
    from engine.cuda.products.unrounded_row import Cut, cut_of

    def of(outputs: int, inputs: int, rows: int = 1) -> Cut | None:
        return cut_of(torch.empty(outputs, inputs, device="meta"), rows)

    assert of(2048, 4096) == Cut(8, 4096)
    assert of(2048, 2880) == Cut(8, 4096)
    assert of(4096, 2048) == Cut(16, 2048)
    assert of(256, 2048) == Cut(1, 2048)
    assert of(2048, 4096, rows=2) is None
    assert of(4096, 4096) is None
    assert of(4096, 14336) is None


def check_one_row_gated() -> None:
    from engine.cuda.products.one_row import Cut, fp8_gated

    for values, scales, x, weight in one_row_cases():
        gate, up = (restored(x).double() @ weight.double().t()).chunk(2, 1)
        got = fp8_gated(values, scales, x, torch.float32, Cut(512))
        assert relative_error(got, silu(gate) * up) < 1e-5


def blocks(outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values and scales of a weight with scales by blocks, and what it stands for."""
    cut = draw(outputs, inputs).view(outputs // 128, 128, inputs // 128, 128)
    scales = cut.abs().amax((1, 3)) / 448
    values = (cut / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    weight = (values.float() * scales[:, None, :, None]).view(outputs, inputs)
    return values.view(outputs, inputs), scales, weight


CHECKS = [found for name, found in sorted(globals().items()) if name.startswith("check_")]

if __name__ == "__main__":
    for check in CHECKS:
        check()
        print(check.__name__)
