"""Checkpoints of AutoAWQ: four bits, `version: gemm`.

A weight is (value - zero point) x scale. Its tensors are those of the transposed weight [K, N].
Eight values of neighbouring output channels share an int32, in the order of `ORDER`. Zero points
are there whether or not the description has `zero_point`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.precision.base import Get, Kind, Quantised, Scheme, TensorSpec
from engine.model.precision.formats.layout import Layout, LayoutFormat
from engine.model.precision.formats.names import EMBEDDING, HEAD
from engine.model.precision.formats.packing import (
    A_WORD,
    FLOATS,
    check_words,
    groups,
    inside,
    positive,
    unpacked,
)
from engine.model.precision.formats.settings import Settings
from engine.model.region import Region

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word, counted from its lowest bits, each of its eight channels lies."""


def read_awq(settings: Settings) -> LayoutFormat:
    """The format of a description.

    Raises:
        UnsupportedModelError: something in it is not supported.
    """
    settings.one_of(settings.first("w_bit", "bits"), (4,))
    settings.one_of(settings.first("version", "format"), ("gemm",), "gemm")
    if settings.get("backend") == "llm-awq":
        raise settings.refusal("backend", "supported: autoawq")
    settings.absent("lm_head", works="a float lm_head is")
    size = settings.group(settings.first("q_group_size", "group_size"))
    skipped = settings.names("modules_to_not_convert")

    def layout(module: str) -> Layout | None:
        """AutoAWQ skips a module if its name has one of these anywhere."""
        is_float = module in (HEAD, EMBEDDING) or any(part in module for part in skipped)
        return None if is_float else AwqLayout(size)

    return LayoutFormat("awq", layout)


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """`qweight` [K, N / 8], `qzeros` [K / group, N / 8], `scales` [K / group, N]."""

    group: int
    """0: all inputs of a channel."""

    @property
    def scheme(self) -> Scheme:
        """See `Layout`."""
        return Scheme(Kind.INT4, group=self.group)

    def specs(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """See `Layout`."""
        outputs, inputs = shape
        check_words(module, "outputs", outputs)
        count, words = groups(module, inputs, self.group), outputs // A_WORD
        return {
            f"{module}.qweight": TensorSpec((inputs, words), (torch.int32,)),
            f"{module}.qzeros": TensorSpec((count, words), (torch.int32,)),
            f"{module}.scales": TensorSpec((count, outputs), FLOATS),
        }

    def read(self, module: str, region: Region, get: Get) -> Quantised:
        """See `Layout`."""
        (outputs, inputs), rows = region.shape, region.rows
        name = f"{module}.scales"
        scales = positive(get(name), name).reshape(-1, outputs).T.contiguous()
        zeros = _channels(get(f"{module}.qzeros").reshape(-1, outputs // A_WORD))
        values = _channels(get(f"{module}.qweight", region.columns, rows.over(A_WORD)))
        scales, zeros = (region.of(each, 1, self.group or inputs) for each in (scales, zeros))
        return Quantised(values[inside(rows)], scales, zeros)


def _channels(words: Tensor) -> Tensor:
    """[R, N / 8] int32 -> [N, R] uint8."""
    inside = unpacked(words).reshape(len(words), -1, A_WORD)[:, :, ORDER]
    return inside.flatten(1).T.contiguous()
