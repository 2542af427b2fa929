"""Checkpoints of AutoGPTQ and GPTQModel: four bits.

A weight is (value - zero point) x scale. Eight values of neighbouring inputs share an int32, eight
zero points of neighbouring output channels, the lowest bits first. The older `checkpoint_format`,
`gptq`, stores zero points minus 1; `gptq_v2` stores them as they are.

`g_idx` says which group an input belongs to. Only groups of neighbours are supported. `desc_act`
alone does not decide: with static groups the order is the plain one again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.config import UnsupportedModelError
from engine.model.precision.base import Get, Kind, Quantised, Scheme, TensorSpec
from engine.model.precision.formats.expressions import Expressions
from engine.model.precision.formats.layout import Layout, LayoutFormat
from engine.model.precision.formats.names import EMBEDDING, HEAD, has_part
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

SYMMETRIC_ZERO = 8
EXTRA_BIASES = ("_proj.bias", ".w1.bias", ".w2.bias", ".w3.bias")
"""Old versions of AutoGPTQ wrote biases of zeros for modules that have none. The last three are
those of the experts of Mixtral."""


def read_gptq(settings: Settings) -> LayoutFormat:
    """The format of a description.

    Raises:
        UnsupportedModelError: something in it is not supported.
    """
    key = settings.first("checkpoint_format", "format")
    version = settings.one_of(key, ("gptq", "gptq_v2"), "gptq")
    settings.absent("is_marlin_format", works="false is")
    settings.absent("lm_head", works="a float lm_head is")
    settings.one_of("pack_dtype", ("int32", None))
    usual = _layout(settings, version)
    rules = _rules(settings, version)
    chosen = _chosen(settings)
    expressions = Expressions()

    def layout(module: str) -> Layout | None:
        if module in (HEAD, EMBEDDING):
            return None
        if chosen and not any(has_part(module, each) for each in chosen):
            return None
        found = (each for pattern, each in rules if expressions.match(pattern, module))
        return next(found, usual)

    return LayoutFormat("gptq", layout, EXTRA_BIASES)


def _layout(settings: Settings, version: str) -> Layout:
    settings.one_of("bits", (4,))
    return GptqLayout(settings.group("group_size"), 0 if version == "gptq_v2" else 1)


def _rules(settings: Settings, version: str) -> list[tuple[str, Layout | None]]:
    """GPTQModel's `dynamic`: regular expressions of modules, in order. `-:` before one leaves its
    modules float; others have settings of their own."""
    dynamic = settings.inner("dynamic")
    rules: list[tuple[str, Layout | None]] = []
    for pattern in dynamic.values:
        if pattern.startswith("-:"):
            rules.append((pattern.removeprefix("-:"), None))
            continue
        own = dynamic.inner(pattern)
        merged = Settings(own.where, {**settings.values, **own.values})
        rules.append((pattern.removeprefix("+:"), _layout(merged, version)))
    return rules


def _chosen(settings: Settings) -> list[str]:
    """Parts of the names of the only modules that are quantised; empty: all."""
    lists: Any = settings.get("modules_in_block_to_quantize", [])
    if not isinstance(lists, list):
        raise settings.refusal("modules_in_block_to_quantize", "a list of names is")
    flat = [name for each in lists for name in (each if isinstance(each, list) else [each])]
    inner: Mapping[str, Any] = {"modules_in_block_to_quantize": flat}
    return list(Settings(settings.where, inner).names("modules_in_block_to_quantize"))


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """`qweight` [K / 8, N], `qzeros` [K / group, N / 8], `scales` [K / group, N], `g_idx` [K]."""

    group: int
    """0: all inputs of a channel."""
    missing: int
    """What zero points lack as stored."""

    @property
    def scheme(self) -> Scheme:
        """See `Layout`."""
        return Scheme(Kind.INT4, group=self.group)

    def specs(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """See `Layout`."""
        outputs, inputs = shape
        check_words(module, "outputs", outputs)
        check_words(module, "inputs", inputs)
        count = groups(module, inputs, self.group)
        return {
            f"{module}.qweight": TensorSpec((inputs // A_WORD, outputs), (torch.int32,)),
            f"{module}.qzeros": TensorSpec((count, outputs // A_WORD), (torch.int32,)),
            f"{module}.scales": TensorSpec((count, outputs), FLOATS),
            f"{module}.g_idx": TensorSpec((inputs,), (torch.int32, torch.int64)),
        }

    def read(self, module: str, region: Region, get: Get) -> Quantised:
        """See `Layout`."""
        (outputs, inputs), columns = region.shape, region.columns
        self._check_order(module, inputs, get)
        name = f"{module}.scales"
        scales = positive(get(name), name).reshape(-1, outputs).T.contiguous()
        words = get(f"{module}.qweight", columns.over(A_WORD), region.rows)
        values = unpacked(words.T)[:, inside(columns)]
        zeros = unpacked(get(f"{module}.qzeros").reshape(-1, outputs // A_WORD)).T.contiguous()
        zeros.add_(self.missing).bitwise_and_(15)
        scales, zeros = (region.of(each, 1, self.group or inputs) for each in (scales, zeros))
        return Quantised(values, scales, _zero_points(zeros))

    def _check_order(self, module: str, inputs: int, get: Get) -> None:
        found = get(f"{module}.g_idx")
        plain = torch.arange(inputs) // (self.group or inputs)
        if not torch.equal(found.long(), plain):
            raise UnsupportedModelError(
                f"{module}.g_idx puts inputs that are not neighbours into one group (desc_act,"
                " act-order), which is not supported; supported: desc_act false, or static groups"
            )


def _zero_points(zeros: Tensor) -> Tensor | None:
    """None if all are the usual one."""
    return None if bool((zeros == SYMMETRIC_ZERO).all()) else zeros
