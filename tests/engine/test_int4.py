"""INT4 weights: what they mean, how a fused one is filled, which kernels are compiled.

The library `humming-kernels` runs on GPUs alone. Here a stand-in shows which kernels it is asked
for; whether they multiply rightly is shown by `test_int4_kernels`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Iterator

import pytest
import torch
from int4_kit import BF16, CPU, CUDA, drawn, method_of
from torch import Tensor, nn

from engine.model.config import ModelError
from engine.model.precision import humming
from engine.model.precision.base import Quantised
from engine.model.precision.int4 import (
    Int4,
    compile_all,
    dequantised,
    int4_obstacle,
    pack_pairs,
    quantised,
    takes,
)


def unpacked(packed: Tensor) -> Tensor:
    """The reverse of `pack_pairs`, by arithmetic."""
    return torch.stack((packed % 16, packed // 16), 2).flatten(1)


def kept(method: Int4) -> Tensor:
    """The weight that an unfinished method holds."""
    part = Quantised(unpacked(method.values), method.scales.float(), method.zero_points)
    return dequantised(part)


@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("zero_points", [False, True])
def test_dequantised_is_value_minus_zero_point_times_scale(group: int, zero_points: bool) -> None:
    part = drawn(24, 256, group, zero_points)
    width = group or 256
    scales = part.scales.double().repeat_interleave(width, 1)
    zeros = torch.full(part.scales.shape, 8) if part.zero_points is None else part.zero_points
    want = (part.values.double() - zeros.double().repeat_interleave(width, 1)) * scales
    got = dequantised(part)
    assert got.dtype == torch.float32
    assert torch.equal(got.double(), want)  # four bits times eight: float32 has room


@pytest.mark.parametrize("group", [0, 32, 128])
def test_rounding_errs_by_half_a_scale_at_most(group: int) -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    part = quantised(weight, group, BF16)
    width = group or 256
    assert part.scales.shape == (16, 256 // width)
    assert torch.equal(part.scales, part.scales.to(BF16).float())
    error = (dequantised(part) - weight).abs()
    # The scale itself may be rounded down by 2 ** -9, so the largest value lies past 7 scales.
    most = part.scales.repeat_interleave(width, 1) * (0.5 + 7 * 2**-9)
    assert bool((error <= most).all())
    assert torch.equal(dequantised(part)[3], torch.zeros(256))


def test_pairs_are_packed_the_first_one_low() -> None:
    values = torch.tensor([[1, 2, 15, 0], [0, 9, 8, 7]], dtype=torch.uint8)
    assert pack_pairs(values).tolist() == [[0x21, 0x0F], [0x90, 0x78]]
    assert torch.equal(unpacked(pack_pairs(values)), values)


def test_zero_points_are_packed_by_eight_rows() -> None:
    zeros = torch.randint(0, 16, (32, 3), dtype=torch.uint8)
    packed = humming.packed_by_rows(zeros)
    assert (packed.shape, packed.dtype) == ((4, 3), torch.int32)
    for row in range(32):
        nibbles = (packed[row // 8] >> 4 * (row % 8)) & 15
        assert torch.equal(nibbles.to(torch.uint8), zeros[row])


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("zero_points", [(False, False, False), (True,) * 3, (False, True, False)])
def test_a_fused_weight_is_filled_part_by_part(
    group: int, zero_points: tuple[bool, bool, bool]
) -> None:
    parts = [
        drawn(n, 128, group, zero, seed=seed)
        for seed, (n, zero) in enumerate(zip((64, 24, 8), zero_points, strict=True))
    ]
    method = method_of([*parts], 128, group)
    assert torch.equal(kept(method), torch.cat([dequantised(part) for part in parts]))
    assert (method.zero_points is None) == (not any(zero_points))
    size = method.values.nbytes + method.scales.nbytes
    assert size == 96 * 128 // 2 + 2 * 96 * (128 // (group or 128))


def test_a_float_part_is_rounded() -> None:
    weight = torch.randn(32, 128).to(BF16)
    method = method_of([drawn(16, 128, 64, False), weight], 128, 64)
    assert torch.equal(kept(method)[16:], dequantised(quantised(weight, 64, BF16)))


def test_scales_are_rounded_to_the_dtype_of_the_model() -> None:
    part = drawn(8, 64, 32, False, torch.float16)
    method = method_of([part], 64, 32)
    assert torch.equal(method.scales, part.scales.to(BF16))


@pytest.mark.parametrize(
    ("shape", "group", "dtype", "taken"),
    [
        ((6144, 4096), 128, BF16, True),
        ((6144, 4096), 0, torch.float16, True),
        ((576, 576), 64, BF16, True),
        ((6144, 4096), 128, torch.float32, False),
        ((6144, 4096), 16, BF16, False),
        ((6144, 4096), 4096, BF16, False),
        ((576, 576), 128, BF16, False),
        ((6144, 4100), 0, BF16, False),
        ((6150, 4096), 128, BF16, False),
    ],
)
def test_which_weights_the_kernels_take(
    shape: tuple[int, int], group: int, dtype: torch.dtype, taken: bool
) -> None:
    assert takes(shape, group, dtype) is taken


def test_why_a_device_cannot_run_int4(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NVIDIA GPUs" in int4_obstacle(CPU)
    monkeypatch.setattr(humming, "find_spec", lambda name: None)
    want = "INT4 needs humming-kernels: pip install 'humming-kernels[cu13]', the extra int4"
    assert int4_obstacle(CUDA) == want
    monkeypatch.setattr(humming, "find_spec", lambda name: name)
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    assert int4_obstacle(CUDA) == "INT4 needs torch 2.11 or newer, and this is 2.9.1+cu130"
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    assert int4_obstacle(CUDA).endswith("8.0 or newer, and T4 has 7.5")


def test_why_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    class Files:
        def get_nvrtc_library_path(self) -> str:
            return "/cuda/lib/libnvrtc.so.13"

        def filter_cuda_paths(self, required_headers: list[str]) -> dict[str, list[str]]:
            if not (tmp_path / required_headers[0]).exists():
                raise RuntimeError("No suitable CUDA 13 environment found.")
            return {"include_paths": [str(tmp_path), str(tmp_path / "cccl")]}

    monkeypatch.setattr(humming, "_module", lambda name: Files())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert humming._toolkit_obstacle().startswith("No suitable CUDA 13 environment found.; pip")
    for header in ("cuda_runtime.h", "crt/host_defines.h", "cccl/cuda/std/cstdint"):
        path = tmp_path / header
        assert humming._toolkit_obstacle() != ""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert humming._toolkit_obstacle() == ""


def test_products_are_refused_before_their_kernels_are_there() -> None:
    method = method_of([drawn(32, 64, 32, False)], 64, 32)
    with pytest.raises(RuntimeError, match="compile_all"):
        method.product(torch.zeros(1, 64, dtype=BF16), None)


def test_a_model_without_int4_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming, "_module", lambda name: pytest.fail(f"imported {name}"))
    compile_all(nn.Linear(4, 4), 8)


class Library:
    """A stand-in for the library: which kernels it is asked for, and with what environment."""

    def __init__(self, broken: int = 0) -> None:
        self.made: list[int] = []
        self.seen: set[tuple[str | None, ...]] = set()
        self._broken = broken
        self._lock = threading.Lock()

    def get_nvrtc_library_path(self) -> str:
        return "/cuda/lib/libnvrtc.so.13"

    def get_available_cpu_count(self) -> int:
        return 3

    def get_heuristics_config(self, layer: dict[str, int], device: torch.device) -> list[object]:
        def range_of(above: int, to: int, block: int) -> list[object]:
            return [above, to, {"block": block, "num_sms": above}]

        return [range_of(0, 8, 8), range_of(8, 64, 16), range_of(64, 72, 8), range_of(72, 999, 32)]

    def HummingKernel(self, block: int, n: int) -> None:
        names = ("LD_LIBRARY_PATH", "HUMMING_CACHE_DIR", "HUMMING_DISABLE_PARALLEL_BUILD")
        with self._lock:
            self.made.append(block)
            self.seen.add(tuple(map(os.environ.get, names)))
        if block == self._broken:
            raise RuntimeError("NVRTCCompiler failed with exit code 1")

    def prepare_kernels(self, config: str, compute: None, tuning: object, device: object) -> Tensor:
        numbers = [[above, to, dict(what)["block"], 0] for above, to, what in list(tuning)]  # type: ignore[call-overload]
        return torch.tensor(numbers).flatten()

    def module(self, name: str) -> types.SimpleNamespace:
        kernel = self.HummingKernel
        if name == "humming.kernel.humming":
            return types.SimpleNamespace(HummingKernel=Constructor(kernel, self.prepare_kernels))
        return self  # type: ignore[return-value]


class Constructor:
    """A class of the stand-in: it can be called, and has a method."""

    def __init__(self, make: object, prepare_kernels: object) -> None:
        self._make, self.prepare_kernels = make, prepare_kernels

    def __call__(self, **arguments: int) -> None:
        self._make(**arguments)  # type: ignore[operator]


@pytest.fixture
def library(monkeypatch, tmp_path) -> Iterator[Library]:
    library = Library()
    monkeypatch.setattr(humming, "_module", library.module)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    for name in ("HUMMING_CACHE_DIR", "HUMMING_TMP_DIR"):
        monkeypatch.setenv(name, "")
    return library


def test_each_kernel_is_compiled_once_and_none_that_no_step_needs(library, tmp_path) -> None:
    told: list[tuple[str, int, int]] = []
    config = '{"n": 64}'
    tables = humming.compiled([config, config], 70, CUDA, lambda *what: told.append(what))
    assert sorted(library.made) == [8, 16]
    assert tables[config].view(-1, 4)[:, :3].tolist() == [
        [0, 8, 8], [8, 64, 16], [64, humming.NO_LIMIT, 8]
    ]  # fmt: skip
    assert humming.first_rows(tables[config]) == [1, 9]
    assert told == [("int4 kernels", 1, 2), ("int4 kernels", 2, 2)]
    cache = str(tmp_path / "humming" / "cache")
    assert library.seen == {("/cuda/lib:/before", cache, "1")}
    assert os.environ["LD_LIBRARY_PATH"] == "/before"
    assert "HUMMING_DISABLE_PARALLEL_BUILD" not in os.environ


def test_a_kernel_that_does_not_compile_is_an_error_of_the_model(library) -> None:
    library._broken = 16
    with pytest.raises(ModelError, match="INT4 kernel does not compile: NVRTCCompiler"):
        humming.compiled(['{"n": 64}'], 70, CUDA, None)


def test_a_folder_that_cannot_be_written_is_an_error_of_the_model(library, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    with pytest.raises(ModelError, match="cannot be compiled"):
        humming.compiled(['{"n": 64}'], 70, CUDA, None)
