"""Compiles for a Hopper, without a GPU, each kernel that a script launches in Triton's interpreter.

    python tests/engine/compiled_kernels.py SCRIPT [ARGUMENT ...]

The interpreter runs a kernel as Python does: a name may have one type in one branch and another in
the other, and a tile may be larger than shared memory. The compiler refuses both. So the script
runs in the interpreter, the arguments of every launch are written down, and a second process
compiles each kind of launch once. It prints what is refused and ends with 1 then.
"""

from __future__ import annotations

import importlib
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

SHARED_BYTES: Final = 232_448
"""Of shared memory that a program may take on a Hopper."""


class Like(NamedTuple):
    """A tensor of this dtype, or a function of Triton by its name."""

    kind: str
    of: Any


def _written(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return Like("tensor", value.dtype)
    if hasattr(value, "fn"):
        return Like("function", (value.fn.__module__, value.fn.__qualname__))
    return value


def _read(value: object) -> object:
    if not isinstance(value, Like):
        return value
    if value.kind == "tensor":
        return torch.empty(16, dtype=value.of)
    module, name = value.of
    return getattr(importlib.import_module(module), name)


def record(path: Path, script: str) -> None:
    """Runs the script in the interpreter, and writes down its launches."""
    kernels = importlib.import_module("engine.cuda.kernels")
    launch, seen = kernels.launch, {}

    def recorded(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
        launches = (_written(kernel), tuple(map(_written, arguments)), options)
        seen[repr(launches)] = launches
        launch(kernel, grid, *arguments, **options)

    kernels.launch = recorded
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        path.write_bytes(pickle.dumps(list(seen.values())))


def compile_all(path: Path) -> int:
    """Compiles what was written down. Returns how many kinds of launches were refused."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Hopper:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: GPUTarget("cuda", 90, 32) if name == "get_current_target" else 0

    driver.set_active(Hopper())
    launches, refused = pickle.loads(path.read_bytes()), 0
    for number, (kernel, arguments, options) in enumerate(launches, 1):
        name = ".".join(kernel.of)
        print(f"\r{number} of {len(launches)}", end="", file=sys.stderr)
        try:
            done: Any = _read(kernel)
            done = done.run(*map(_read, arguments), grid=(1,), warmup=True, **options)
            if done.metadata.shared > SHARED_BYTES:
                raise ValueError(f"{done.metadata.shared} bytes of shared memory")
        except Exception as error:
            refused += 1
            print(f"\nREFUSED {name} {arguments} {options}\n{error}", flush=True)
    print(f"\n{len(launches)} kinds of launches compiled by Triton {triton.__version__}", end="")
    print(f" for sm_90, {refused} refused")
    return refused


def main() -> int:
    """Runs both processes."""
    if sys.argv[1] == "--compile":
        return min(compile_all(Path(sys.argv[2])), 1)
    script, *arguments = sys.argv[1:]
    if path := os.environ.get("BATON_LAUNCHES"):
        sys.argv = [script, *arguments]
        record(Path(path), script)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "BATON_LAUNCHES": str(Path(folder) / "launches")}
        command = [sys.executable, __file__]
        environment["TRITON_INTERPRET"] = "1"
        ran = subprocess.run([*command, script, *arguments], env=environment).returncode
        if ran:
            print(f"the script ended with {ran}; what it had launched is compiled")
        environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(folder) / "cache")}
        environment.pop("TRITON_INTERPRET", None)
        path = environment.pop("BATON_LAUNCHES", str(Path(folder) / "launches"))
        return subprocess.run([*command, "--compile", path], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
