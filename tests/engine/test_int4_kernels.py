"""Products of INT4 weights by `humming-kernels`, against float64."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from int4_kit import BF16, CUDA, drawn, method_of
from torch import Tensor, nn

from engine.model.precision import humming
from engine.model.precision.int4 import Int4, compile_all, dequantised, int4_obstacle, quantised

pytestmark = pytest.mark.gpu
ROWS = 300
ROUNDING = 8e-3
"""Of the weight to bf16, of the result, and of up to ten parts of the result, added in bf16: eight
parts give 0.0043. A zero point that is one too high gives 0.2."""
KINDS = [(768, 1024, group, zero) for group in (0, 32, 64, 128) for zero in (False, True)]
PADDED = [(576, 576, 64, True), (96, 128, 0, False)]
"""Weights whose rows are filled up to a multiple of 128."""


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts from now on what is compiled, and what is looked for in the folder of kernels."""
    from humming.jit import compiler

    found: list[str] = []
    for kind in (compiler.NVRTCCompiler, compiler.NVCCCompiler):
        for name in ("_compile", "compile"):
            inner = getattr(kind, name)

            def spied(*args: object, inner=inner, name=name, **more: object) -> object:
                found.append(name)
                return inner(*args, **more)

            monkeypatch.setattr(kind, name, spied)
    return found


@pytest.fixture(scope="module")
def on_gpu() -> dict[tuple[int, int, int, bool], tuple[Int4, Tensor]]:
    """Finished methods with their kernels, and their weights in float64."""
    if obstacle := int4_obstacle(CUDA):
        pytest.skip(obstacle)
    found = {}
    for n, k, group, zero in KINDS + PADDED:
        first = drawn(n // 2, k, group, zero, seed=1)
        second = drawn(n - n // 2, k, group, zero, seed=2)
        method = method_of([first, second], k, group, CUDA)
        method.finish()
        weight = torch.cat((dequantised(first), dequantised(second))).double()
        found[n, k, group, zero] = method, weight.to(CUDA)
    told: list[tuple[str, int, int]] = []
    compile_all(
        nn.ModuleList(method for method, _ in found.values()), ROWS, lambda *what: told.append(what)
    )
    assert told
    assert told[-1][1] == told[-1][2] == len(told)
    return found


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("kind", KINDS + PADDED, ids=str)
def test_products_equal_those_of_the_dequantised_weight(on_gpu, kind) -> None:
    method, weight = on_gpu[kind]
    generator = torch.Generator(CUDA).manual_seed(3)
    bias = torch.randn(len(weight), generator=generator, device=CUDA, dtype=BF16)
    for rows in (1, 2, 7, 8, 9, 16, 17, 31, 40, 64, 100, 128, 129, 200, 255, 256, 300):
        x = torch.randn(rows, method.inputs, generator=generator, device=CUDA, dtype=BF16)
        want = x.double() @ weight.T
        got = method.product(x, None)
        assert (got.shape, got.dtype) == (want.shape, BF16)
        assert relative_error(got, want) < ROUNDING, rows
        assert relative_error(method.product(x, bias), want + bias.double()) < ROUNDING, rows
    assert not bool(method.locks.any())


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_float_weight_and_other_dtypes(on_gpu, dtype) -> None:
    weight = torch.randn(256, 512).to(dtype) * 0.02
    method = method_of([weight], 512, 128, CUDA, dtype)
    method.finish()
    compile_all(method, 16)
    x = torch.randn(5, 512, device=CUDA, dtype=dtype)
    want = x.double() @ dequantised(quantised(weight, 128, dtype)).double().to(CUDA).T
    assert relative_error(method.product(x, None), want) < ROUNDING


def test_zero_points_that_are_all_eight_are_left_out(on_gpu) -> None:
    part = drawn(256, 512, 128, True)
    part = part._replace(zero_points=torch.full_like(part.zero_points, 8))
    method = method_of([part], 512, 128, CUDA)
    method.finish()
    assert method.zero_points is None


def test_nothing_is_compiled_while_serving(on_gpu, monkeypatch) -> None:
    found = compilations(monkeypatch)
    for method, _ in on_gpu.values():
        for rows in (*range(1, ROWS + 1), 1000):
            method.product(torch.zeros(rows, method.inputs, device=CUDA, dtype=BF16), None)
    torch.cuda.synchronize()
    assert found == []


@pytest.mark.parametrize("rows", [1, 32, 300])
def test_graphs_replay_products(on_gpu, monkeypatch, rows) -> None:
    found = compilations(monkeypatch)
    kinds = [kind for kind in KINDS if kind[2] in (0, 128)]
    x = torch.zeros(rows, 1024, device=CUDA, dtype=BF16)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        got = [on_gpu[kind][0].product(x, None) for kind in kinds]
        graph.capture_end()
    for seed in range(3):
        torch.cuda.synchronize()
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        for kind, out in zip(kinds, got, strict=True):
            assert relative_error(out, x.double() @ on_gpu[kind][1].T) < ROUNDING, kind
    assert found == []


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the library look for its kernels anew, as a new process does."""
    from humming.kernel.humming import HummingKernel

    monkeypatch.setattr(HummingKernel, "_instances", {})
    monkeypatch.setattr(HummingKernel, "_str2kernel_cache", {})


def test_a_second_start_finds_the_kernels_on_disk(on_gpu, monkeypatch) -> None:
    found = compilations(monkeypatch)
    forget(monkeypatch)
    method, _ = on_gpu[KINDS[0]]
    compile_all(method, ROWS)
    assert set(found) == {"compile"}  # looked for, and found


def test_kernels_are_compiled_without_nvcc(on_gpu, monkeypatch, tmp_path) -> None:
    from humming.utils import cuda
    from humming.utils import jit as folders

    try:
        cuda.filter_cuda_paths(required_headers=humming.HEADERS, source="pypi")
    except RuntimeError as error:
        pytest.skip(f"humming-kernels[cu13] is not installed by pip: {error}")
    from_pip = [found for found in cuda.find_all_cuda_paths() if found["source"] == "pypi"]
    monkeypatch.setattr(
        cuda, "find_all_cuda_paths", lambda: [{**found, "binaries": {}} for found in from_pip]
    )
    monkeypatch.setattr(folders, "get_humming_cache_dir", lambda: f"{tmp_path}/")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    forget(monkeypatch)
    found = compilations(monkeypatch)
    assert int4_obstacle(CUDA) == ""
    method, weight = on_gpu[KINDS[-1]]
    before = method.table
    try:
        compile_all(method, 8)
        x = torch.randn(3, method.inputs, device=CUDA, dtype=BF16)
        assert relative_error(method.product(x, None), x.double() @ weight.T) < ROUNDING
    finally:
        method.table = before
    assert "_compile" in found
    assert any(tmp_path.glob("*/kernel.cubin"))
