"""Rounding to FP8, its kernels and its products, against the reference and float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fp8_checks as checks
import pytest
import torch

from engine.model.precision.rounding import (
    LEAST_SCALE,
    restored,
    round_groups,
    round_rows,
    round_static,
)


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


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, checks.__file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [check.__name__ for check in checks.CHECKS]


@pytest.mark.gpu
@pytest.mark.parametrize("check", checks.CHECKS)
def test_kernels(check):
    check()


@pytest.mark.gpu
def test_a_gpu_and_a_cpu_round_alike():
    from engine.cuda.rounding import rounded

    for how in checks.kinds():
        x = checks.draw(64, 14336).bfloat16()
        on_cpu = how._replace(scale=None if how.scale is None else how.scale.cpu())(x.cpu())
        got = rounded(x, how)
        assert torch.equal(got.scales.cpu(), on_cpu.scales)
        assert torch.equal(got.values.view(torch.uint8).cpu(), on_cpu.values.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 64, 65, 128, 203])
def test_linears_of_any_number_of_rows(rows):
    from engine.cuda.fp8_products import fp8_block_linear, fp8_linear
    from engine.cuda.rounding import rounded

    bias = checks.draw(512).bfloat16()
    weight, x = round_rows(checks.draw(512, 2048)), checks.draw(rows, 2048, seed=1).bfloat16()
    by_rows = round_rows(x)
    want = restored(by_rows).double() @ restored(weight).double().t() + bias.double()
    got = fp8_linear(weight.values, weight.scales.view(-1), *by_rows, bias, torch.bfloat16)
    assert checks.relative_error(got, want) < 4e-3
    values, scales, plain = checks.blocks(512, 2048)
    by_groups = rounded(x, checks.Rounding(group=128))
    want = restored(by_groups).double() @ plain.double().t() + bias.double()
    got = fp8_block_linear(values, scales, *by_groups, bias, torch.bfloat16)
    assert checks.relative_error(got, want) < 4e-3


@pytest.mark.gpu
def test_products_in_a_graph_that_is_replayed():
    """Launched early, in parts: their counters and workspaces are free again each time."""
    from engine.cuda.fp8_products import Tiles, few_rows
    from engine.cuda.rounding import rounded

    weights = [round_rows(checks.draw(1024, 1024, seed=i) / 32) for i in range(8)]
    start = checks.draw(16, 1024).bfloat16()
    tiles = Tiles(128, 128, 4, 4, 4, 1024)

    def chain(early: bool) -> torch.Tensor:
        x = start
        for weight in weights:
            given = rounded(x, checks.Rounding(), pdl=early)
            cut = tiles if early else tiles._replace(ahead=0)
            scales = weight.scales.view(-1)
            x = few_rows(weight.values, scales, *given, None, torch.bfloat16, cut)
        return x

    want = chain(False).clone()
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(50):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)
