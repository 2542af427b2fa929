"""Runs the PTX that a kernel holds in Triton's interpreter, which knows none.

It knows the few instructions that kernels of ours use on 32 bits, one operation each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

Register = np.ndarray[Any, np.dtype[np.uint32]]


def _floats(register: Register, kind: str) -> torch.Tensor:
    dtype = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[kind]
    return torch.from_numpy(register.view(np.int16).copy()).view(dtype).double()


def _fma(kind: str) -> Callable[..., Register]:
    def run(a: Register, b: Register, c: Register) -> Register:
        exact = _floats(a, kind) * _floats(b, kind) + _floats(c, kind)
        rounded = exact.to(torch.bfloat16 if kind == "bf16x2" else torch.float16)
        assert torch.equal(rounded.double(), exact), "not exact: double may round twice"
        return rounded.view(torch.int16).numpy().view(np.uint32)

    return run


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    both = np.stack((a, b), -1).view(np.uint8).reshape(len(a), 8)
    picks = np.stack([(selector >> shift) & 15 for shift in (0, 4, 8, 12)], -1)
    picked = np.take_along_axis(both, picks & 7, 1)
    signs = (picked.view(np.int8) >> 7).view(np.uint8)
    return np.ascontiguousarray(np.where(picks & 8, signs, picked)).view(np.uint32)[:, 0]


def _dp2a(half: int, kind: type[np.int8 | np.uint8]) -> Callable[..., Register]:
    """Two signed numbers of 16 bits, with the lower or the upper two bytes."""

    def run(a: Register, b: Register, c: Register) -> Register:
        pairs = np.ascontiguousarray(a).view(np.int16).reshape(len(a), 2).astype(np.int64)
        four = np.ascontiguousarray(b).view(kind).reshape(len(b), 4)
        exact = (pairs * four[:, half : half + 2]).sum(1) + c.view(np.int32)
        assert (abs(exact) < 1 << 31).all(), "too large for a register"
        found: Register = exact.astype(np.int32).view(np.uint32)
        return found

    return run


INSTRUCTIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shl.b32": np.left_shift,
    "shr.b32": np.right_shift,
    "prmt.b32": _prmt,
    "dp2a.lo.s32.s32": _dp2a(0, np.int8),
    "dp2a.hi.s32.s32": _dp2a(2, np.int8),
    "dp2a.lo.s32.u32": _dp2a(0, np.uint8),
    "dp2a.hi.s32.u32": _dp2a(2, np.uint8),
    "fma.rn.bf16x2": _fma("bf16x2"),
    "fma.rn.f16x2": _fma("f16x2"),
}


def run(text: str, registers: dict[str, Register]) -> None:
    """Runs instructions, with no jumps, over many threads at once."""
    length = len(next(iter(registers.values())))
    body = text.strip().removeprefix("{").removesuffix("}")
    for line in filter(None, (each.strip() for each in body.split(";"))):
        name, operands = line.split(maxsplit=1)
        if name == ".reg":
            continue
        target, *sources = re.split(r",\s*", operands)
        values = [
            registers[one] if one in registers else np.full(length, int(one, 0), np.uint32)
            for one in sources
        ]
        registers[target] = INSTRUCTIONS[name](*values)


class _Results(list[Any]):
    get_result = list.__getitem__


def _create(
    _builder: Any, text: str, constraints: str, values: list[Any], types: list[Any],
    _pure: bool, pack: int,
) -> _Results:  # fmt: skip
    """Four bytes in, two registers for each of the outputs, of 16 bits; or registers in, and one
    out."""
    shape = values[0].data.shape
    taken = [np.ascontiguousarray(value.data).reshape(-1).view(np.uint32) for value in values]
    kinds, first = constraints.split(","), 0
    for kind in kinds:
        first += kind.startswith("=")
    assert set(kinds[:first]) <= {"=r", "=&r"}
    assert kinds[first:] == ["r"] * len(values)
    registers = {f"${first + number}": register for number, register in enumerate(taken)}
    run(text, registers)
    results = _Results()
    if pack == 1:
        assert (first, len(types)) == (1, 1)
        data = registers["$0"].view(interpreter._get_np_dtype(types[0].scalar)).reshape(shape)
        results.append(interpreter.TensorHandle(data, types[0].scalar))
        return results
    assert (first, pack, len(values), len(types)) == (4, 4, 1, 2)
    for number, dtype in zip((0, 2), types, strict=True):
        both = np.stack([registers[f"${number + half}"] for half in (0, 1)], -1)
        data = both.view(interpreter._get_np_dtype(dtype.scalar)).reshape(shape)
        results.append(interpreter.TensorHandle(data, dtype.scalar))
    return results


def teach() -> None:
    """From now on the interpreter runs such PTX."""
    interpreter.InterpreterBuilder.create_inline_asm = _create
