"""The library `humming-kernels`: products of INT4 weights, compiled on the machine that runs them.

Source: github.com/vllm-project/humming, "docs" and `humming.transform`, version 0.1.19.

The library makes a kernel for each shape of weight and each range of row numbers: on Hopper GPUs
25 to 33 for a shape. A kernel takes two to six seconds of a core, by NVRTC: no `nvcc` is needed.
What is compiled is kept in a folder and used again. Left alone, the library compiles a shape's
kernels when it is first multiplied. `compiled` does it before.

Nothing here imports the library before an INT4 weight is on a GPU.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from engine.model.config import ModelError

Progress = Callable[[str, int, int], None]
INSTALL: Final = "pip install 'humming-kernels[cu13]', the extra int4"
LEAST_TORCH: Final = (2, 11)
"""For older ones the library compiles its launcher with the host's C++ compiler."""
LEAST_CAPABILITY: Final = (8, 0)
"""Compute capability of GPUs that multiply bf16."""
HEADERS: Final = ["cuda_runtime.h", "crt/host_defines.h", "cuda/std/cstdint"]
"""One of each package of headers: of the runtime, which the library looks for, of crt, of CCCL."""
COLUMNS: Final = 128
"""The rows of a weight are filled up to a multiple of this: some kernels take no other."""
LOCKS: Final = 2048
"""Integers by which the blocks of one product wait for each other, as many as the library has."""
MOST_COMPILERS: Final = 32
"""At one time. Each takes 0.2 GB."""
NO_LIMIT: Final = 1 << 30
"""Rows of the last tile: beyond any step."""


class Stored(NamedTuple):
    """A weight in the order of the kernels."""

    config: str
    """Describes the layer to the library. Weights with the same one share kernels."""
    weight: Tensor
    scales: Tensor
    zero_points: Tensor | None


def obstacle(device: torch.device) -> str:
    """Why the library cannot run on this device; empty if it can."""
    if device.type != "cuda":
        return "INT4 products run on NVIDIA GPUs alone"
    if not all(map(find_spec, ("humming", "cuda"))):
        return f"INT4 needs humming-kernels: {INSTALL}"
    if _version(torch.__version__) < LEAST_TORCH:
        return f"INT4 needs torch 2.11 or newer, and this is {torch.__version__}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        name, found = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        return f"INT4 needs a GPU of compute capability 8.0 or newer, and {name} has {found}"
    return _toolkit_obstacle()


def _toolkit_obstacle() -> str:
    """Why nothing can be compiled; empty if NVRTC and the headers that it will see are there."""
    try:
        with environment():
            find = _module("humming.utils.cuda").filter_cuda_paths
            folders = [
                Path(folder) for folder in find(required_headers=HEADERS[:1])["include_paths"]
            ]
    except (ModelError, RuntimeError) as error:
        return f"{error}; {INSTALL}"
    for header in HEADERS:
        if not any((folder / header).exists() for folder in folders):
            return f"INT4 kernels cannot be compiled: no {header} in {folders[0]}; {INSTALL}"
    return ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


@contextmanager
def environment() -> Iterator[None]:
    """Settings that the library and its compilers read from the environment.

    Raises:
        ModelError: there is no NVRTC, or the folder of kernels cannot be written.
    """
    names = ("HUMMING_DISABLE_PARALLEL_BUILD", "LD_LIBRARY_PATH")
    before = {name: os.environ.get(name) for name in names}
    try:
        _set_environment(before["LD_LIBRARY_PATH"])
        yield
    finally:
        for name, value in before.items():
            _restore(name, value)


def _set_environment(libraries: str | None) -> None:
    try:
        os.environ.update(_folders())
        # At its import it would start two processes that compile what its wheel has.
        os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
        nvrtc = Path(_module("humming.utils.nvrtc").get_nvrtc_library_path()).parent
    except (RuntimeError, OSError) as error:
        raise ModelError(f"INT4 kernels cannot be compiled: {error}") from error
    # Parts of NVRTC lie beside it, and that of CUDA 13.0 does not look there by itself.
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(nvrtc), libraries)))


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _folders() -> dict[str, str]:
    """Where the library keeps kernels and locks: in the user's cache, unless the environment says
    otherwise."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = {}
    for name in ("cache", "tmp"):
        key, ours = f"HUMMING_{name.upper()}_DIR", cache / "humming" / name
        found[key] = os.environ.get(key) or str(ours)
        Path(found[key]).mkdir(parents=True, exist_ok=True)
    return found


def _module(name: str) -> Any:
    return importlib.import_module(name)


def stored(
    values: Tensor, scales: Tensor, zero_points: Tensor | None, device: torch.device
) -> Stored:
    """Puts a weight into the order of the kernels. Compiles one small kernel the first time.

    Args:
        values: [N, K / 2] uint8, two values in a byte, the first one low.
        scales: [N, K / group], bf16 or f16, which is the dtype of the products.
        zero_points: [N, K / group] uint8, or None: 8.
        device: a CUDA device.
    """
    n, k = len(values), 2 * values.shape[1]
    groups = scales.shape[1]
    tensors = {"weight": values.view(torch.int32), "weight_scale": scales}
    if zero_points is not None:
        tensors["zero_point"] = packed_by_rows(zero_points)
    with environment(), torch.cuda.device(device):
        schema = _module("humming.schema").HummingWeightSchema(
            b_dtype="uint4",
            weight_scale_group_size=k // groups if groups > 1 else 0,
            has_zero_point=zero_points is not None,
        )
        config, ready = _module("humming.transform").prepare_and_transform_humming_tensors(
            tensors, n, k, schema,
            pad_n_to_multiple=COLUMNS, torch_dtype=scales.dtype, device=device,
        )  # fmt: skip
    return Stored(config.to_str(), ready["weight"], ready["weight_scale"], ready.get("zero_point"))


def packed_by_rows(zero_points: Tensor) -> Tensor:
    """[N, groups] uint8 of 0 to 15 -> [N / 8, groups] int32, the first of eight rows lowest."""
    eights = zero_points.view(len(zero_points) // 8, 8, -1).int()
    packed: Tensor = eights[:, 0].clone()
    for place in range(1, 8):
        packed |= eights[:, place] << 4 * place
    return packed


def compiled(
    configs: Sequence[str], most_rows: int, device: torch.device, progress: Progress | None
) -> dict[str, Tensor]:
    """Compiles the kernels of every number of rows from 1 to `most_rows`, in parallel.

    Returns:
        By config, the table that `product` takes: int64 on the CPU, four numbers for each range of
        row numbers (above, to, kernel, SMs).

    Raises:
        ModelError: a kernel does not compile.
    """
    with environment():
        ranges = {config: _ranges(config, most_rows, device) for config in set(configs)}
        kernels = {}
        for config, found in ranges.items():
            for _, _, tuning in found:
                spec = json.loads(config) | tuning
                spec.pop("num_sms", None)
                kernels[json.dumps(spec, sort_keys=True)] = spec
        _compile(list(kernels.values()), device, progress)
        make = _module("humming.kernel.humming").HummingKernel.prepare_kernels
        return {config: make(config, None, found, device) for config, found in ranges.items()}


def _ranges(config: str, most_rows: int, device: torch.device) -> list[list[Any]]:
    """[above, to, tuning] for the row numbers that can come. The last range has no end."""
    tune = _module("humming.tune").get_heuristics_config
    found = [list(x) for x in tune(json.loads(config), device=device) if x[0] < most_rows]
    found[-1][1] = NO_LIMIT
    return found


def _compile(specs: list[dict[str, Any]], device: torch.device, progress: Progress | None) -> None:
    kernel = _module("humming.kernel.humming").HummingKernel
    cores = _module("humming.utils.cpu").get_available_cpu_count()

    def make(spec: dict[str, Any]) -> None:
        with torch.cuda.device(device):
            kernel(**spec)

    with ThreadPoolExecutor(min(cores, MOST_COMPILERS)) as threads:
        futures = [threads.submit(make, spec) for spec in specs]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                if progress:
                    progress("int4 kernels", done, len(specs))
        except (RuntimeError, AssertionError) as error:
            threads.shutdown(cancel_futures=True)
            raise ModelError(f"an INT4 kernel does not compile: {error}") from error


def first_rows(table: Tensor) -> list[int]:
    """For each kernel of a table the least number of rows that it is used for."""
    found: dict[int, int] = {}
    for above, _, kernel, _ in table.view(-1, 4).tolist():
        found.setdefault(kernel, above + 1)
    return list(found.values())


def product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    locks: Tensor,
    table: Tensor,
) -> Tensor:
    """[T, K] -> [T, N]. Compiles nothing.

    Args:
        x: in the dtype of the scales.
        weight: with its scales and zero points, as `stored` returns them.
        locks: of this weight alone, [LOCKS] int32 of zeros, which the kernel leaves as zeros.
        table: of this weight's config, by `compiled`.
    """
    out: Tensor = _module("humming.ops").launch_kernel(
        configs=table,
        inputs=x,
        weight=weight,
        weight_scale=scales,
        zero_point=zero_points,
        locks=locks,
    )
    return out
