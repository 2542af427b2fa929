"""Checkpoints of gpt-oss: experts in MXFP4 (`engine.model.precision.mxfp4`), all else float.

One tensor holds all experts of a layer. Blocks have two values in a byte, the first one low, and an
exponent for each 16 bytes. Rows of gate and up lie in turns: gate of channel 0, up of channel 0,
gate of channel 1 and so on. A module here is one part of one expert, `...experts.3.up_proj`, which
has every second row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.model.config import ModelError, UnsupportedModelError
from engine.model.precision.base import Get, Kind, Quantised, Scheme, TensorSpec
from engine.model.precision.formats.expressions import Expressions
from engine.model.precision.formats.layout import Layout, LayoutFormat
from engine.model.precision.formats.names import is_skipped
from engine.model.precision.formats.settings import Settings
from engine.model.precision.mxfp4 import MXFP4_GROUP
from engine.model.region import Range, Region

ANY = -1
"""Instead of a size that the file decides: how many experts it has."""
_BYTES = MXFP4_GROUP // 2
_NO_NUMBER = 255
"""The exponent that stands for NaN, by the OCP specification of MX formats."""
_MODULE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")


def read_mxfp4(settings: Settings) -> LayoutFormat:
    """The format of a description.

    Raises:
        UnsupportedModelError: something in it is not supported.
    """
    skipped = settings.names("modules_to_not_convert")
    expressions = Expressions()

    def layout(module: str) -> Layout | None:
        is_expert = _MODULE.fullmatch(module) is not None
        is_float = not is_expert or is_skipped(module, skipped, expressions)
        return None if is_float else Mxfp4Layout()

    return LayoutFormat("mxfp4", layout)


class _Place(NamedTuple):
    """Where a module lies in its tensors."""

    tensor: str
    expert: int
    turn: int
    turns: int


@dataclass(frozen=True, slots=True)
class Mxfp4Layout:
    """`gate_up_proj_blocks` [E, 2 I, H / 32, 16] with `gate_up_proj_scales` [E, 2 I, H / 32], and
    `down_proj_...` [E, H, I / 32]."""

    @property
    def scheme(self) -> Scheme:
        """See `Layout`."""
        return Scheme(Kind.MXFP4, group=MXFP4_GROUP)

    def specs(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """See `Layout`."""
        (outputs, inputs), place = shape, _place(module)
        if inputs % MXFP4_GROUP:
            raise UnsupportedModelError(
                f"{module} has {inputs} inputs, which is no multiple of the {MXFP4_GROUP} that"
                " share an exponent"
            )
        rows, bytes_ = outputs * place.turns, (torch.uint8,)
        groups = inputs // MXFP4_GROUP
        return {
            f"{place.tensor}_blocks": TensorSpec((ANY, rows, groups, _BYTES), bytes_),
            f"{place.tensor}_scales": TensorSpec((ANY, rows, groups), bytes_),
        }

    def read(self, module: str, region: Region, get: Get) -> Quantised:
        """See `Layout`."""
        tensor, expert, turn, turns = _place(module)
        rows = Range(region.rows.start * turns, region.rows.end * turns)
        where = Range(expert, expert + 1), rows, region.columns.over(MXFP4_GROUP)
        blocks = get(f"{tensor}_blocks", *where)[0, turn::turns]
        exponents = get(f"{tensor}_scales", *where)[0, turn::turns].contiguous()
        if bool((exponents == _NO_NUMBER).any()):
            raise ModelError(f"{tensor}_scales holds a scale that is not finite or not positive")
        values = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
        return Quantised(values, exponents)


def _place(module: str) -> _Place:
    found = _MODULE.fullmatch(module)
    assert found is not None, module
    prefix, expert, part = found.groups()
    if part == "down":
        return _Place(f"{prefix}.down_proj", int(expert), 0, 1)
    return _Place(f"{prefix}.gate_up_proj", int(expert), ("gate", "up").index(part), 2)
