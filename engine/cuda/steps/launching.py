"""Launches of Triton kernels, past Triton where the kernel is compiled.

A step without a graph launches hundreds of kernels one by one. Triton looks for the compiled one by
what it was specialised for: dtypes, which addresses and numbers are multiples of 16, which numbers
are 1, constants, options. Half of a launch's time goes there (`bench.launch_cost`). Here the key
tells more launches apart than Triton's does, and is found sooner: numbers are in it as they are. So
equal keys mean equal compiled kernels, and a kernel may have several keys.

The first launch of a key is Triton's, which returns the kernel. Triton also launches

- what has an argument that is neither a plain tensor nor a plain value, such as a descriptor;
- everything, while somebody has hooks on launches, such as a profiler;
- kernels in the interpreter, or with heuristics.

Only there Triton looks whether constants that a kernel reads have changed since it was compiled.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from types import NoneType
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_TENSORS: Final = frozenset({Tensor, Parameter})
_VALUES: Final = frozenset({bool, int, float, str, NoneType})
_MOST_KEYS: Final = 1024
"""Keys of a kernel, which has a few in a model. It bounds memory where a number is another one in
each step."""


class _Known(NamedTuple):
    """A kernel that was launched before."""

    kernel: Any
    """It is kept, so that no other one gets its id."""
    takes: int
    """So many arguments."""
    free: tuple[int, ...]
    """Places of numbers that it is not specialised for."""
    ready: dict[tuple[object, ...], tuple[Any, Any, Any]]
    """By key: what launches the compiled kernel, its handle and its metadata."""


_known: Final[dict[int, _Known]] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, int]
) -> None:
    """Launches on the current stream of the current device. `options` are the compiler's."""
    known = _known.get(id(kernel)) or _met(kernel)
    if known is None or len(arguments) != known.takes or kernel.pre_run_hooks or _is_watched():
        kernel[grid](*arguments, **options)
        return
    device = driver.active.get_current_device()
    key = _key(known.free, arguments, device, options)
    try:
        found = known.ready.get(key)
    except TypeError:  # It cannot be hashed.
        found = None
    if found is None:
        _keep(known, key, arguments, kernel.run(*arguments, grid=grid, warmup=False, **options))
        return
    stream = driver.active.get_current_stream(device)
    run, handle, metadata = found
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    run(x, y, z, stream, handle, metadata, None, None, None, *arguments)


def _met(kernel: Any) -> _Known | None:
    """What is known of a kernel from now on; None: it is always Triton's."""
    if not isinstance(kernel, JITFunction):
        return None
    free = tuple(each.num for each in kernel.params if each.do_not_specialize)
    known = _known[id(kernel)] = _Known(kernel, len(kernel.params), free, {})
    return known


def _is_watched() -> bool:
    runtime = knobs.runtime
    begins, ends = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(begins, "calls", begins) or getattr(ends, "calls", ends))


def _key(
    free: tuple[int, ...], arguments: tuple[Any, ...], device: int, options: dict[str, int]
) -> tuple[object, ...]:
    key: list[object] = [
        (one.dtype, one.data_ptr() % 16) if type(one) in _TENSORS else (type(one), one)
        for one in arguments
    ]
    for place in free:
        one = arguments[place]
        if type(one) is int and one.bit_length() < 32:
            key[place] = int
    return (device, knobs.runtime.debug, *options.items(), *key)


def _keep(known: _Known, key: tuple[object, ...], arguments: tuple[Any, ...], done: Any) -> None:
    """Remembers what Triton has launched, if the key says everything about it."""
    is_plain = all(type(one) in _TENSORS or type(one) in _VALUES for one in arguments)
    if is_plain and isinstance(done, CompiledKernel):
        if len(known.ready) >= _MOST_KEYS:
            known.ready.clear()
        known.ready[key] = done.run, done.function, done.packed_metadata
