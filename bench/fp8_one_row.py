"""The product of one row in FP8 without tensor cores, to be compared with `few_rows`.

A program takes whole rows of the weight, so nothing is added up between programs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.fp8_products import Tiles, bring
from engine.cuda.kernels import launch


@triton.jit
def _one_row(
    values,
    scales,
    x,
    x_scales,
    bias,
    out,
    outputs,
    inputs: tl.constexpr,
    bn: tl.constexpr,
    bk: tl.constexpr,
    lines: tl.constexpr,
    has_bias: tl.constexpr,
    pdl: tl.constexpr,
):
    channel = tl.program_id(0) * bn + tl.arange(0, bn)
    at = tl.arange(0, bk)
    weights = values + tl.minimum(channel, outputs - 1).to(tl.int64) * inputs
    if pdl:
        gdc_launch_dependents()
        line = tl.minimum(tl.arange(0, lines) * 128, inputs - 128)
        bring(weights[:, None] + line[None, :], 128)
        gdc_wait()
    acc = tl.zeros((bn, bk), tl.float32)
    for start in range(0, inputs, bk):
        taken = tl.load(x + start + at).to(tl.float32)
        weight = tl.load(weights[:, None] + (start + at)[None, :]).to(tl.float32)
        acc += weight * taken[None, :]
    there = channel < outputs
    total = tl.sum(acc, axis=1) * tl.load(scales + channel, mask=there, other=0.0)
    total *= tl.load(x_scales)
    if has_bias:
        total += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(out + channel, total, mask=there)


def one_row(
    values: Tensor,
    scales: Tensor,
    x: Tensor,
    x_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tiles: Tiles,
) -> Tensor:
    """The product of one row without tensor cores, as `few_rows`; `tiles.inputs` divides K."""
    outputs, inputs = values.shape
    out = torch.empty(1, outputs, dtype=out_dtype, device=x.device)
    given = out if bias is None else bias
    launch(
        _one_row,
        (triton.cdiv(outputs, tiles.outputs),),
        values,
        scales,
        x,
        x_scales,
        given,
        out,
        outputs,
        inputs,
        tiles.outputs,
        tiles.inputs,
        triton.next_power_of_2(inputs // 128),
        bias is not None,
        tiles.ahead > 0,
        num_warps=tiles.warps,
        launch_pdl=tiles.ahead > 0,
    )
    return out
