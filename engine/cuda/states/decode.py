"""A token of each decode row folded into its state, in one kernel a layer: the convolution, norms
of q and k, gates, the recurrence, of the delta rule the gated norm behind it, and the page in and
out.

A program takes a unit of a row. So nobody else reads or writes its part of the page, and a page is
written in place. The stamp of the unit says how many tokens are folded in. If these are not all
before this one, the row is spoilt: it computes with zeros, and the host fails its request.

The delta rule is that of Yang et al. 2024, "Gated Delta Networks"; Mamba-2 of Dao and Gu 2024,
"Transformers are SSMs". All arithmetic is float32. See `engine.model.mixers.delta` and `.mamba`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.kernels import launch
from engine.cuda.states.layout import Kept, Made, Shape, States, Weights
from engine.cuda.states.parts import silu, softplus
from engine.model.linear import RmsNorm
from engine.pool.state_pool import SPOILT, STAMP_NUMBERS


class Threads(NamedTuple):
    """Threads of a program."""

    warps: int
    registers: int
    """The most of a thread; 0: the compiler's own bound."""


THREADS: Final = Threads(4, 0)
"""On an H200 64 rows of 32 matrices of 128 x 128 took 73 us so, and 93 with eight warps of 128
registers. That was without reading them, so it is to be measured again (`bench.states`)."""
_SPOILT = tl.constexpr(SPOILT)
_STAMP = tl.constexpr(STAMP_NUMBERS)


@triton.jit
def _window(
    made, numbers, before, channel, source, inside, keeps,
    kernel: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """[channels, columns]: the inputs of the K - 1 tokens before, and of this one."""
    at = tl.arange(0, columns)[None, :]
    there = inside[:, None] & keeps & (at < kernel - 1)
    old = tl.load(numbers + before + channel[:, None] * (kernel - 1) + at, mask=there, other=0.0)
    is_new = inside[:, None] & (at == kernel - 1)
    new = tl.load(made + source[:, None] + 0 * at, mask=is_new, other=0.0).to(tl.float32)
    return tl.where(is_new, new, old)


@triton.jit
def _convolved(
    window, taps, bias, channel, inside,
    kernel: tl.constexpr, columns: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """[channels]"""
    at = tl.arange(0, columns)[None, :]
    there = inside[:, None] & (at < kernel)
    tap = tl.load(taps + channel[:, None] * kernel + at, mask=there, other=0.0).to(tl.float32)
    total = tl.sum(window * tap, 1)
    if has_bias:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return silu(total)


@triton.jit
def _keep_window(
    numbers, after, beside, write, saved, window, channel, inside,
    kernel: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, columns)[None, :]
    there = inside[:, None] & (at > 0) & (at < kernel)
    place = _STAMP + channel[:, None] * (kernel - 1) + at - 1
    if write > 0:
        tl.store(numbers + after + place, window, mask=there)
    if saved > 0:
        tl.store(numbers + beside + place, window, mask=there)


@triton.jit
def _keep_stamp(stamps, after, beside, write, saved, is_right, context, spoilt):
    stamp = tl.where(is_right, context, _SPOILT)
    if write > 0:
        tl.store(stamps + after, stamp)
    if saved > 0:
        tl.store(stamps + beside, stamp)
    if is_right == 0:
        tl.store(spoilt, 1)


@triton.jit
def _keep_state(
    numbers, after, beside, write, saved, place, state, there, is_whole: tl.constexpr
):  # fmt: skip
    if write > 0:
        if is_whole:
            tl.store(numbers + after + place, state)
        else:
            tl.store(numbers + after + place, state, mask=there)
    if saved > 0:
        tl.store(numbers + beside + place, state, mask=there)


@triton.jit
def _stepped(state, q, k, v, rate, rate_bias, speed, beta, least, most, is_delta: tl.constexpr):
    """The matrix of a head behind a token, and what comes of that."""
    step = softplus(rate + rate_bias)
    if not is_delta:
        step = tl.minimum(tl.maximum(step, least), most)
    state = state * tl.exp(-tl.exp(speed) * step)
    if is_delta:
        found = tl.sum(state * k[:, None], 0)
        change = (v - found) * tl.sigmoid(beta)
    else:
        change = v * step
    state = state + k[:, None] * change[None, :]
    return state, tl.sum(state * q[:, None], 0)


@triton.jit
def _gated(result, gate, weight, inside, eps, value_dim: tl.constexpr, dtype: tl.constexpr):
    """Behind the norm and the gate of the delta rule."""
    result = result.to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.where(inside, result * result, 0.0)) / value_dim + eps)
    return (result * scale * weight).to(dtype).to(tl.float32) * silu(gate)


@triton.jit
def _key(
    window, numbers, after, beside, write, saved, taps, bias, channel, inside,
    is_delta: tl.constexpr, kernel: tl.constexpr, has_bias: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """q or k of a unit, whose inputs are also kept."""
    _keep_window(numbers, after, beside, write, saved, window, channel, inside, kernel, columns)
    vector = _convolved(window, taps, bias, channel, inside, kernel, columns, has_bias)
    if is_delta:
        vector = vector * tl.rsqrt(tl.sum(vector * vector) + 1e-6)
    return vector


@triton.jit
def _head(
    head, unit, q, k, token, own_gates, out, numbers, before, after, beside, write, saved, keeps,
    taps, bias, rates, rate_biases, skips, gain, v_first, z_first, rate_first, beta_first, least,
    most, eps,
    is_delta: tl.constexpr, heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    kernel: tl.constexpr, v_channel: tl.constexpr, channels: tl.constexpr, has_bias: tl.constexpr,
    columns: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
):  # fmt: skip
    """A head's token. What it reads it asks for before it writes."""
    key, value = tl.arange(0, keys), tl.arange(0, values)
    inside = value < value_dim
    there = (key < key_dim)[:, None] & inside[None, :]
    is_whole: tl.constexpr = (keys == key_dim) & (values == value_dim)
    number, own = unit * heads + head, head * value_dim + value
    window = _window(
        token, numbers, before + _STAMP, v_channel + own, v_first + own, inside, keeps, kernel,
        columns,
    )  # fmt: skip
    at = _STAMP + (kernel - 1) * channels + (head * key_dim + key[:, None]) * value_dim
    at += value[None, :]
    if is_whole:  # Masks take registers.
        state = tl.load(numbers + before + at, mask=keeps, other=0.0)
    else:
        state = tl.load(numbers + before + at, mask=there & keeps, other=0.0)
    rate = tl.load(own_gates + rate_first + head).to(tl.float32)
    beta = tl.load(own_gates + beta_first + head).to(tl.float32)
    rate_bias, speed = tl.load(rate_biases + number), tl.load(rates + number)
    has_gate = inside & is_delta
    gate = tl.load(token + z_first + own, mask=has_gate, other=0.0).to(tl.float32)
    weight = tl.load(gain + value, mask=has_gate, other=0.0).to(tl.float32)
    skip = tl.load(skips + number)
    tl.debug_barrier()
    _keep_window(
        numbers, after, beside, write, saved, window, v_channel + own, inside, kernel, columns
    )
    v = _convolved(window, taps, bias, v_channel + own, inside, kernel, columns, has_bias)
    state, result = _stepped(state, q, k, v, rate, rate_bias, speed, beta, least, most, is_delta)
    _keep_state(numbers, after, beside, write, saved, at, state, there, is_whole)
    if is_delta:
        result = _gated(result, gate, weight, inside, eps, value_dim, out.dtype.element_ty)
    else:
        result += v * skip
    tl.store(out + number * value_dim + value, result, mask=inside)


@triton.jit(do_not_specialize=["table_width"])
def _decode_state(
    made, gates, out, numbers, stamps, taps, bias, rates, rate_biases, skips, gain, table, contexts,
    spoilt, page_stride, unit_stride, layer_offset, made_stride, gates_stride, table_width,
    q_first, q_stride, k_first, k_stride, v_first, v_stride, shared_by, z_first, z_stride,
    rate_first, rate_stride, beta_first, beta_stride, least, most, eps,
    is_delta: tl.constexpr, heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    kernel: tl.constexpr, q_channel: tl.constexpr, k_channel: tl.constexpr,
    v_channel: tl.constexpr, channels: tl.constexpr, has_bias: tl.constexpr,
    columns: tl.constexpr, keys: tl.constexpr, values: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    unit, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pages = table + row * table_width
    read, write = tl.load(pages).to(tl.int64), tl.load(pages + 1).to(tl.int64)
    saved = tl.load(pages + 2).to(tl.int64)
    context = tl.load(contexts + row)
    place = unit.to(tl.int64) * unit_stride + layer_offset
    before = read * page_stride + place
    after, beside = write * page_stride + place, saved * page_stride + place
    folded = tl.where(read > 0, tl.load(stamps + before), 0)
    is_right = folded == context - 1
    keeps = is_right & (read > 0)
    token, owner = made + row * made_stride, unit // shared_by
    own_taps, own_bias = taps + unit * channels * kernel, bias + unit * channels
    key = tl.arange(0, keys)
    is_key = key < key_dim
    q_window = _window(
        token, numbers, before + _STAMP, q_channel + key, q_first + owner * q_stride + key, is_key,
        keeps, kernel, columns,
    )  # fmt: skip
    k_window = _window(
        token, numbers, before + _STAMP, k_channel + key, k_first + owner * k_stride + key, is_key,
        keeps, kernel, columns,
    )  # fmt: skip
    # Several threads may load the same number, and one stores another to its place. What a program
    # loads it asks for before that.
    tl.debug_barrier()
    q = _key(
        q_window, numbers, after, beside, write, saved, own_taps, own_bias, q_channel + key, is_key,
        is_delta, kernel, has_bias, columns,
    )  # fmt: skip
    k = _key(
        k_window, numbers, after, beside, write, saved, own_taps, own_bias, k_channel + key, is_key,
        is_delta, kernel, has_bias, columns,
    )  # fmt: skip
    if is_delta:
        q = q * (key_dim**-0.5)
    _keep_stamp(stamps, after, beside, write, saved, is_right, context, spoilt + row)
    for head in range(heads):
        _head(
            head, unit, q, k, token, gates + row * gates_stride,
            out + row * tl.num_programs(0) * heads * value_dim, numbers, before, after, beside,
            write, saved, keeps, own_taps, own_bias, rates, rate_biases, skips, gain,
            v_first + unit * v_stride, z_first + unit * z_stride, rate_first + unit * rate_stride,
            beta_first + unit * beta_stride, least, most, eps, is_delta, heads, key_dim, value_dim,
            kernel, v_channel, channels, has_bias, columns, keys, values,
        )  # fmt: skip


def decode_states(
    made: Made,
    weights: Weights,
    kept: Kept,
    states: States,
    shape: Shape,
    norm: RmsNorm | None,
    out: Tensor,
) -> None:
    """Folds one token of each decode row into its state.

    Args:
        made: of the step's tokens; those of decode rows come first.
        weights: of the layer.
        kept: its states.
        states: the step's rows.
        shape: the layer's.
        norm: of the delta rule, over the values of each head.
        out: [T, U * R * Dv], contiguous. Rows of decode rows are filled in: of the delta rule with
            gate and norm; of Mamba-2 what the recurrence gives.
    """
    step, table = states.step, states.step.page_table
    units, inputs = len(weights.taps), made.inputs
    keys, values = (triton.next_power_of_2(dim) for dim in (shape.key_dim, shape.value_dim))
    nothing = weights.rate
    launch(
        _decode_state,
        (units, step.num_decodes),
        inputs,
        made.gates,
        out,
        kept.pool.elements,
        kept.pool.integers,
        weights.taps,
        nothing if weights.bias is None else weights.bias,
        weights.rate,
        weights.rate_bias,
        nothing if weights.skip is None else weights.skip,
        nothing if norm is None else norm.weight,
        table,
        step.context_lens,
        states.spoilt,
        *kept.strides,
        inputs.stride(0),
        made.gates.stride(0),
        table.shape[1],
        *made.q[:2],
        *made.k[:2],
        *made.v[:2],
        made.q.shared_by,
        *made.gate[:2],
        *made.rate[:2],
        *made.beta[:2],
        *weights.steps,
        0.0 if norm is None else norm.eps,
        *shape,
        shape.channels,
        weights.bias is not None,
        triton.next_power_of_2(shape.kernel),
        max(keys, 16),
        max(values, 16),
        early(),
        launch_pdl=early(),
        **_threads(),
    )


def _threads() -> dict[str, int]:
    bound = {"maxnreg": THREADS.registers} if THREADS.registers else {}
    return {"num_warps": THREADS.warps, **bound}
