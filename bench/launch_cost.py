"""What launching a layer costs the host in a step of one prompt. Needs no GPU: nothing is computed.

python -m bench.launch_cost [--shapes qwen3-30b-a3b llama-8b] [--precisions as-is fp8]
                            [--repeats 200] [--kernels]

CPU time of a layer, in us: the least of `repeats` steps through eight layers, less that of steps
through four; and the time of its launches of our kernels, one after the other. PyTorch's operators
are counted. The model has the layers of its shape in small, since sizes are the device's work.
Tensors lie in the host's memory. Triton compiles for a Hopper. Its launches end in a CUDA driver
that does nothing, which a C compiler makes here. PyTorch's products, attention and the choice of
rows are an empty result each. So what PyTorch and CUDA take for a launch comes on top.

`--kernels`: each launch by itself, and beside it what Triton's own would take, and parts of that.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import compute_cache_key

from engine.attention.fa3 import Fa3Backend
from engine.attention.grouped import PagedGroups
from engine.attention.paged import PagedStep
from engine.cuda.early import early
from engine.cuda.experts import mixing
from engine.cuda.forward import FusedForward
from engine.cuda.steps import launching
from engine.model import Model, load_model
from engine.model.experts.stacked import capability
from engine.model.precision.choice import Precision
from engine.pool.kv_pool import PlainPool
from engine.pool.pools import one_group

SHAPES = Path(__file__).parent / "shapes"
SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 512,
    "max_position_embeddings": 1024,
}  # fmt: skip
LAYERS, HALF = 8, 4
TOKENS = 320
"""Length of the prompt: more than products of ours take."""
PAGE_TOKENS = 16
CALLS, TURNS = 100, 10
"""Calls of the same launch in a row, and rows."""
CUDA = """
#include <cuda.h>
CUresult cuCtxGetCurrent(CUcontext *own) { *own = (CUcontext)1; return 0; }
CUresult cuCtxSetCurrent(CUcontext own) { return 0; }
CUresult cuDeviceGet(CUdevice *own, int number) { *own = 0; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *own, CUdevice device) { return 0; }
CUresult cuFuncSetAttribute(CUfunction of, CUfunction_attribute which, int value) { return 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = ""; return 0; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction of, void **given, void **more) {
  return 0;
}
CUresult cuPointerGetAttribute(void *found, CUpointer_attribute which, CUdeviceptr of) {
  *(CUdeviceptr *)found = of;
  return 0;
}
"""
"""What a launch calls of the CUDA driver."""


class Hopper:
    """Triton's driver of a device that is not there."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for the CUDA driver that does nothing."""
        here = Path(nvidia.__file__).parent
        source, library = folder / "cuda.c", folder / "libcuda.so.1"
        source.write_text(CUDA)
        flags = ["-O2", "-shared", "-fPIC", f"-I{here / 'include'}", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["cc", *flags, "-o", library, source], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        from triton.backends.nvidia.driver import CudaLauncher  # It looks for the library.

        self.launcher_cls = CudaLauncher
        self.utils = SimpleNamespace(
            get_device_properties=lambda _device: {"max_shared_mem": 232_448},
            load_binary=lambda *_: (1, 1, 32, 0, 1024),
        )

    def get_current_target(self) -> GPUTarget:
        """A Hopper."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The only one."""
        return 0


class Call(NamedTuple):
    """A launch, as a step has made it."""

    name: str
    again: Callable[[], object]
    of_triton: dict[str, Callable[[], object]]
    """What Triton does in a launch of its own, whole and by parts."""


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, of: Any, _types: Any, given: Any = (), named: Any = None) -> Any:
        self.seen[of._schema.name.removeprefix("aten::")] += 1
        return of(*given, **(named or {}))


class Library(SimpleNamespace):
    """Attention of prompts that computes nothing."""

    def flash_attn_varlen_func(self, q: Tensor, *_given: object, **_named: object) -> Tensor:
        """[T, Hq, D]"""
        return torch.empty_like(q)


def product(rows: Tensor, weight: Tensor, *given: Any, **named: Any) -> Tensor:
    """Stands for PyTorch's of experts, or in FP8: [T, N]."""
    wanted = [one for one in (*given, named.get("out_dtype")) if isinstance(one, torch.dtype)]
    dtype = wanted[0] if wanted else rows.dtype
    return torch.empty(rows.shape[0], weight.shape[-1], dtype=dtype, device=rows.device)


def linear(rows: Tensor, weight: Tensor, _bias: Tensor | None = None) -> Tensor:
    """Stands for PyTorch's: [T, N]."""
    return torch.empty(rows.shape[0], weight.shape[0], dtype=rows.dtype, device=rows.device)


def taken(rows: Tensor, _dim: int, places: Tensor) -> Tensor:
    """Stands for `index_select`, since nobody has computed the places."""
    return torch.empty(places.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)


def of_a_hopper() -> None:
    """From now on PyTorch says that there is one."""
    asked, cuda = torch.cuda.get_device_capability, torch.device("cuda", 0)
    known = SimpleNamespace(major=9, minor=0)
    stand_ins: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "_get_device_properties", lambda _device: known),
        (torch.cuda, "get_device_capability", lambda _device=None: asked(cuda)),
        (Precision, "on_gpu", True),
        (mixing, "groups_in_one_kernel", lambda x: capability(x.device) >= (9, 0)),
        (F, "linear", linear),
        (F, "grouped_mm", product),
        (torch, "_scaled_mm_v2", product),
        (torch, "_scaled_grouped_mm_v2", product),
        (torch.Tensor, "index_select", taken),
    ]
    for of, name, stand_in in stand_ins:
        setattr(of, name, stand_in)


class Step:
    """A step of one prompt through so many layers."""

    def __init__(self, shape: str, precision: str, layers: int) -> None:
        described = json.loads((SHAPES / shape / "config.json").read_text())
        described |= SMALL | {"num_hidden_layers": layers}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(described))
            loaded = load_model(
                folder, dtype=torch.bfloat16, device=torch.device("cpu"), load_format="dummy",
                quantization="" if precision == "as-is" else precision,
            )  # fmt: skip
        config = loaded.config
        pages = TOKENS // PAGE_TOKENS
        pool = PlainPool(
            num_pages=pages + 1, num_layers=layers, num_kv_heads=config.kept.kv_heads,
            head_dim=config.kept.head_dim, page_size=PAGE_TOKENS, dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )  # fmt: skip
        decode: Any = None  # There are no decode rows.
        kernels: Any = Library()
        attention = Fa3Backend(pool, loaded.model.attention_specs, kernels, decode)
        pools = one_group(pool)
        groups = PagedGroups([attention], pools.places)
        assert isinstance(loaded.model, Model)
        self._forward = FusedForward(loaded.model, pools, groups, TOKENS)
        at = torch.arange(TOKENS, dtype=torch.int32)
        table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
        contexts, starts = at.new_full((1,), TOKENS), at.new_tensor([0, TOKENS])
        groups.prepare([PagedStep(0, contexts, table, starts, TOKENS, all_fresh=True)])
        self._given = at % 100, at, [at + PAGE_TOKENS]

    @torch.inference_mode()
    def launch(self) -> None:
        """As `CudaExecutor` does, without what comes before and behind the layers."""
        self._forward.hidden(*self._given)

    def seconds(self) -> float:
        """CPU time of one."""
        began = time.thread_time()
        self.launch()
        return time.thread_time() - began


def kernels_of(step: Step) -> list[Call]:
    """The launches of a step, in order."""
    seen: list[Call] = []
    launch = launching.launch

    def noted(kernel: Any, grid: Any, arguments: Any, options: Any) -> None:
        again = partial(launch, kernel, grid, arguments, options)
        again()
        seen.append(Call(kernel.__name__, again, of_triton(kernel, grid, arguments, options)))

    with patch.object(launching, "launch", noted):
        step.launch()
    return seen


def of_triton(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Callable[[], object]]:
    """See `Call`."""
    whole = partial(kernel.run, *arguments, grid=grid, warmup=False, **options)
    done, (_, keys, _, _, binder) = whole(), kernel.device_caches[0]
    every = {**options, "debug": False, "instrumentation_mode": ""}
    bound, kinds, named = binder(*arguments, **every)
    size = (*grid, 1, 1)[:3]
    given = (*size, 0, done.function, done.packed_metadata, None, None, None, *bound.values())
    return {
        "Triton's own": whole,
        "binder": partial(binder, *arguments, **every),
        "key": partial(compute_cache_key, keys, kinds, named),
        "hooks": partial(done.launch_metadata, grid, 0, *bound.values()),
        "launcher": partial(done.run, *given),
    }


def operators_of(step: Step) -> Counter[str]:
    """The operators of a step."""
    mode = Operators()
    with mode:
        step.launch()
    return mode.seen


@torch.inference_mode()
def us_of(call: Callable[[], object]) -> float:
    """Least CPU time of a call, of some rows of calls."""
    taken = []
    for _ in range(TURNS):
        began = time.thread_time()
        for _ in range(CALLS):
            call()
        taken.append(1e6 * (time.thread_time() - began) / CALLS)
    return min(taken)


def measure(shape: str, precision: str, repeats: int, each: bool) -> None:
    """Prints the parts."""
    step, half = (Step(shape, precision, layers) for layers in (LAYERS, HALF))
    for one in (step, half):
        one.launch()
    more = LAYERS - HALF
    least = [min(one.seconds() for _ in range(repeats)) for one in (step, half)]
    us = 1e6 * (least[0] - least[1]) / more
    calls, others = kernels_of(step), kernels_of(half)
    count, first = (len(calls) - len(others)) // more, len(others) // 2
    taken = [(call, us_of(call.again)) for call in calls[first : first + count]]
    of_kernels = sum(one for _, one in taken)
    print(f"{shape} {precision}: {us:.0f} us a layer, {of_kernels:.0f} of {count} launches")
    for call, its_us in taken if each else ():
        parts = (f"{name} {us_of(again):.1f}" for name, again in call.of_triton.items())
        print(f"    {call.name:16} {its_us:4.1f}   {', '.join(parts)}")
    operators = operators_of(step) - operators_of(half)
    told = ", ".join(f"{number // more} {name}" for name, number in operators.most_common())
    print(f"    {operators.total() // more} operators: {told}", flush=True)


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b-a3b", "llama-8b"])
    parser.add_argument("--precisions", nargs="+", default=["as-is", "fp8"])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    of_a_hopper()
    assert early()
    with tempfile.TemporaryDirectory() as folder:
        driver.set_active(Hopper(Path(folder)))
        for shape in arguments.shapes:
            for precision in arguments.precisions:
                measure(shape, precision, arguments.repeats, arguments.kernels)


if __name__ == "__main__":
    main()
