"""Rounding to FP8, its kernels and its products, against the reference and float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import fp8_checks as checks
import pytest
import torch
from torch import Tensor

from engine.model.linear import Build, Linear, RmsNorm
from engine.model.precision.base import WeightSlice
from engine.model.precision.fp8 import Fp8Blocks, Fp8Channels
from engine.model.precision.rounding import (
    LEAST_SCALE,
    restored,
    round_groups,
    round_rows,
    round_static,
)
from engine.model.region import Region
from engine.model.shard import Shard
from engine.step.collective import Alone


def test_the_largest_of_a_row_is_exact_and_others_are_near():
    x = torch.randn(7, 256, dtype=torch.bfloat16) * torch.logspace(-3, 3, 7)[:, None].bfloat16()
    rounded = round_rows(x)
    back = restored(rounded)
    most = x.float().abs().argmax(1, keepdim=True)
    assert torch.allclose(back.gather(1, most), x.float().gather(1, most), rtol=1e-6)
    step = x.float().abs().clamp_min(2**-6 * rounded.scales) / 8
    assert ((back - x.float()).abs() <= step / 2 * 1.001).all()


def test_ties_go_to_the_even_number():
    scale = torch.tensor([2.0])
    x = torch.tensor([[2 * 1.0625, 2 * 1.1875, -2 * 1.0625]])
    assert restored(round_static(x, scale)).tolist() == [[2.0, 2.5, -2.0]]


def test_zeros_stay_zeros():
    rounded = round_rows(torch.zeros(2, 128))
    assert (rounded.scales == LEAST_SCALE).all()
    assert not restored(rounded).any()


def test_a_given_scale_saturates():
    rounded = round_static(torch.tensor([[1e6, -1e6, 1.0]]), torch.tensor([0.5]))
    assert restored(rounded).tolist() == [[224.0, -224.0, 1.0]]
    assert rounded.scales.tolist() == [[0.5]]


def test_groups_are_rows_of_their_own():
    x = torch.randn(3, 512) * torch.tensor([1.0, 100, 0.01, 1]).repeat_interleave(128)
    rounded, alone = round_groups(x), round_rows(x.view(12, 128))
    assert torch.equal(rounded.values.float().view(12, 128), alone.values.float())
    assert torch.equal(rounded.scales.reshape(12, 1), alone.scales)
    with pytest.raises(ValueError, match="rows of 100 values cannot be cut into groups of 128"):
        round_groups(torch.randn(3, 100))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_hidden(bad):
    x = torch.randn(2, 128)
    x[1, 5] = bad
    back = restored(round_rows(x))
    assert back[0].isfinite().all()
    assert back[1, 5].isnan()


def test_tiles_fit_a_processor_and_are_few(monkeypatch):
    """Each compiles for a second when a worker starts."""
    pytest.importorskip("triton")
    from engine.cuda.products import fp8

    monkeypatch.setattr(fp8, "early", lambda: True)
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 1024), (16, 16)]
    found = set()
    for (outputs, inputs), rows in product(shapes, range(2, fp8.FEW_ROWS + 1)):
        tiles = fp8.tiles_of(outputs, inputs, rows)
        if tiles is None:
            continue
        padded = max(16, 1 << (rows - 1).bit_length())
        assert tiles.stages * tiles.inputs * (tiles.outputs + padded) <= 220 << 10
        assert tiles.parts * tiles.inputs <= max(inputs, tiles.inputs)
        found.add((padded, tiles))
    assert 4 <= len(found) <= 12
    assert fp8.tiles_of(4096, 4096, fp8.FEW_ROWS + 1) is None


@pytest.mark.gpu
@pytest.mark.parametrize("check", checks.CHECKS)
def test_kernels(check):
    check()


@pytest.mark.gpu
def test_a_gpu_and_a_cpu_round_alike():
    from engine.cuda.products.rounding import rounded

    for how in checks.kinds():
        x = checks.draw(64, 14336).bfloat16()
        on_cpu = how._replace(scale=None if how.scale is None else how.scale.cpu())(x.cpu())
        got = rounded(x, how)
        assert torch.equal(got.scales.cpu(), on_cpu.scales)
        assert torch.equal(got.values.view(torch.uint8).cpu(), on_cpu.values.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 64, 65, 128, 203])
@pytest.mark.parametrize("outputs", [512, 20480])
def test_linears_of_any_number_of_rows(outputs, rows):
    from engine.cuda.products.fp8 import fp8_block_linear, fp8_linear
    from engine.cuda.products.rounding import rounded

    bias = checks.draw(outputs).bfloat16()
    weight, x = round_rows(checks.draw(outputs, 2048)), checks.draw(rows, 2048, seed=1).bfloat16()
    by_rows = round_rows(x)
    want = restored(by_rows).double() @ restored(weight).double().t() + bias.double()
    got = fp8_linear(weight.values, weight.scales.view(-1), by_rows, bias, torch.bfloat16)
    assert checks.relative_error(got, want) < 4e-3
    values, scales, plain = checks.blocks(outputs, 2048)
    by_groups = rounded(x, checks.Rounding(group=128))
    want = restored(by_groups).double() @ plain.double().t() + bias.double()
    got = fp8_block_linear(values, scales, by_groups, bias, torch.bfloat16)
    assert checks.relative_error(got, want) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 33, 128])
@pytest.mark.parametrize("inputs", [128, 640, 1920])
def test_blocks_of_any_number_of_inputs(inputs, rows):
    """cuBLAS reads scales of four blocks of inputs at once."""
    from engine.cuda.products.fp8 import fp8_block_linear
    from engine.cuda.products.rounding import rounded

    values, scales, plain = checks.blocks(512, inputs)
    x = checks.draw(rows, inputs, seed=1).bfloat16()
    by_groups = rounded(x, checks.Rounding(group=128))
    want = restored(by_groups).double() @ plain.double().t()
    got = fp8_block_linear(values, scales, by_groups, None, torch.bfloat16)
    assert checks.relative_error(got, want) < 4e-3


class Block:
    """Norm, gate and up, down: of 512 channels, and 1536 between them."""

    def __init__(self, method: type[Fp8Channels | Fp8Blocks]) -> None:
        self.up, self.down = (fp8_weight(method, *shape) for shape in ((3072, 512), (512, 1536)))
        self.norm = RmsNorm(512, 1e-5, build_of(None))
        self.norm.weight.copy_(checks.draw(512))

    def __call__(self, residual: Tensor, x: Tensor) -> Tensor:
        """Adds x to the residual, and returns what is added next."""
        from engine.cuda.feed_forward import gated
        from engine.cuda.joining import Join, joined

        normed = joined(residual, x, Join(None, self.norm, lambda: self.up.reads, 1.0))
        return self.down(gated(normed, self.up, self.down.method.input))


def fp8_weight(method: type[Fp8Channels | Fp8Blocks], outputs: int, inputs: int) -> Linear:
    from engine.cuda.products import CudaProducts

    options = {"static_input": False} if method is Fp8Channels else {}
    own = method(outputs, inputs, torch.bfloat16, checks.DEVICE, on_gpu=True, **options)
    own.fill(0, checks.draw(outputs, inputs) / inputs**0.5)
    own.finish(CudaProducts())
    precision = SimpleNamespace(method=lambda *_: own)
    return Linear([WeightSlice("", Region.whole(outputs, inputs))], False, build_of(precision))


def build_of(precision) -> Build:
    return Build(torch.bfloat16, checks.DEVICE, precision, Shard(), Alone())


@pytest.mark.gpu
@pytest.mark.parametrize("method", [Fp8Channels, Fp8Blocks])
@pytest.mark.parametrize("rows", [1, 16, 40, 64, 100, 200])
def test_a_long_chain_in_a_graph_equals_kernels_one_by_one(rows, method, monkeypatch):
    """Launched early, their counters and workspaces are free again each time."""
    layers = [Block(method) for _ in range(5)] * 20
    start = checks.draw(rows, 512).bfloat16()

    def chain() -> Tensor:
        residual, x = start.clone(), start
        for layer in layers:
            x = layer(residual, x)
        return torch.cat((residual, x))

    want = one_by_one(chain, monkeypatch)
    assert want.isfinite().all()
    assert torch.equal(chain(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(20):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def one_by_one(chain: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The chain's result when no kernel starts before the one before has ended."""
    from engine.cuda import kernels
    from engine.cuda.products import fp8, one_row, rounding, unrounded_row

    tiles_of = fp8.tiles_of

    def plain(*shape: int) -> object:
        tiles = tiles_of(*shape)
        return tiles and tiles._replace(ahead=0)

    with monkeypatch.context() as patched:
        patched.setattr(fp8, "tiles_of", plain)
        for module in (kernels, one_row, rounding, unrounded_row):
            patched.setattr(module, "early", lambda: False)
        return chain()
