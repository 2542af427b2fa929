"""What layers with states take on a GPU, and how far they are from float32.

python -m bench.states [--kinds delta mamba] [--rows 1 64 256] [--prompts 1x8192 8x1024 32x256]
                       [--tiles C,W,S ...] [--threads W,R,C ...] [--json FILE]

Shapes: of `delta`, a layer of Qwen3.5-35B-A3B (16 key and 32 value heads of 128); of `mamba`, one
of Granite 4 H Small (128 heads of 64, of 128 numbers). First the values are compared with the
reference in float32: decode rows, whole prompts, chunks, and the states that they leave. Then a
line for each number of decode rows: us of all kernels of a layer between its products, and the
bytes of states that are read and written a second. The floor is what 3.0 TB/s would take, which an
H100's memory gives. Then prompts: us of each kernel, and tokens a second and layer. Calls are
captured in a graph, and the median of pairs of replays is shown. `--tiles` adds other divisions
of the kernel that folds (columns of values, warps, stages), `--threads` of the one of decode rows
(warps, registers of a thread, where 0 is no bound, and columns at a time).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from bench.harness import write_json
from bench.kernels import replayed_us
from engine.attention.paged import PagedStep
from engine.attention.recurrent.states import RecurrentBackend
from engine.cuda.mixers import delta, mamba
from engine.cuda.states import decode, folding
from engine.cuda.states.folding import fold
from engine.cuda.states.layout import Kept, Made, Shape, Weights
from engine.cuda.states.mixing import mix
from engine.cuda.states.norms import norm_groups, norm_heads
from engine.cuda.states.rows import Rows, RowsOfSteps
from engine.cuda.states.solving import solve
from engine.model.linear import Build, RmsNorm
from engine.model.mixers.config import DeltaConfig, MambaConfig
from engine.model.mixers.delta import Rule
from engine.model.mixers.mamba import Scan
from engine.pool.state_pool import StatePool
from engine.step.attention import AttentionBatch, AttentionSpec

DEVICE = "cuda"
LAYERS = 4
CALLS = 8
MEMORY_TB_S = 3.0
MOST_OFF = 2e-2
"""Largest error, as a share of the norm of results and states: what products in bf16 leave."""
DELTA = DeltaConfig(16, 32, 128, 128, 4)
MAMBA = MambaConfig(
    heads=128, head_dim=64, groups=1, state_dim=128, kernel=4, units=16, least_step=0.0,
    most_step=float("inf"), conv_bias=True, bias=False,
)  # fmt: skip
Row = tuple[int, int, int, int, tuple[int, ...]]
"""Tokens before the step, tokens of it, page read, page written, pairs of page and tokens saved."""


class Layer:
    """A layer with random weights, over states in `pages` pages."""

    def __init__(self, kind: str, pages: int, layers: int = LAYERS) -> None:
        own: Any = DELTA if kind == "delta" else MAMBA
        self.own, self.is_delta, device = own, kind == "delta", torch.device(DEVICE)
        kept = own.kept
        self.pool = StatePool(
            num_pages=pages, num_layers=layers, units=kept.kv_heads, numbers=kept.state,
            device=device,
        )  # fmt: skip
        self.units = units = kept.kv_heads
        module: Any = delta if self.is_delta else mamba
        self.shape: Shape = module.shape_of(own)
        more = () if self.is_delta else (own.groups,)
        self.places: Made = module.places_of(own, units, *more)
        heads, values = units, self.shape.heads
        draw = partial(torch.randn, device=device)
        self.weights = Weights(
            (draw(units, own.channels, own.kernel) / 2).bfloat16(),
            None if self.is_delta else draw(units, own.channels).bfloat16(),
            draw(heads, values), draw(heads, values),
            None if self.is_delta else draw(heads, values),
            (0.0, 0.0) if self.is_delta else (own.least_step, own.most_step),
        )  # fmt: skip
        numbers = units * values * self.shape.value_dim
        self.norm = RmsNorm(
            self.shape.value_dim if self.is_delta else numbers, 1e-6,
            Build(torch.bfloat16, device, None, None, None),  # type: ignore[arg-type]
        )  # fmt: skip
        self.norm.weight.data.uniform_(0.5, 1.5)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence in one layer."""
        return self.pool.page_bytes // self.pool.num_layers

    def made(self, tokens: int) -> Made:
        """What products would make of tokens, at random."""
        draw = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
        heads = self.weights.rate.numel()
        if self.is_delta:
            width = self.units * (self.own.channels + self.own.values)
            made = draw(tokens, width), draw(tokens, 2 * heads)
        else:
            inner = heads * self.shape.value_dim
            inputs = draw(tokens, 2 * inner + 2 * self.own.groups * self.own.state_dim + heads)
            made = inputs, inputs
        return self.places._replace(inputs=made[0], gates=made[1])

    def rows(self, decodes: list[Row], prompts: list[Row], x: Tensor) -> Rows:
        """A step's rows, for the kernels."""
        both = decodes + prompts
        backend = RecurrentBackend(self.pool, ())
        table = torch.zeros(len(both), 6, dtype=torch.int32)
        for row, (_, _, read, write, saved) in zip(table, both, strict=True):
            row[: 2 + len(saved)] = torch.tensor([read, write, *saved])
        contexts = torch.tensor([row[0] + row[1] for row in both]).int().to(DEVICE)
        lens = [row[1] for row in prompts]
        starts = torch.tensor([0, *np.cumsum(lens)]).int().to(DEVICE) if lens else None
        most = max(lens, default=0)
        backend.prepare(PagedStep(len(decodes), contexts, table.to(DEVICE), starts, most, False))
        return RowsOfSteps(backend).of(x)

    def run(self, made: Made, rows: Rows, layer: int = 0) -> Tensor:
        """All kernels between the products."""
        given = made, self.weights, Kept(self.pool, layer), rows, self.shape
        if self.is_delta:
            return delta.folded(*given, self.norm)
        out = mamba.scanned(*given)
        rest = self.norm.weight, self.own.groups, self.norm.eps
        return norm_groups(out, made.inputs, made.gate, *rest)

    def reference(self, made: Made, decodes: list[Row], prompts: list[Row]) -> tuple[Any, Tensor]:
        """Another pool behind the step, of its own zeros, and what comes out."""
        pool = StatePool(
            num_pages=self.pool.num_pages, num_layers=1, units=self.units,
            numbers=self.pool.numbers, device=self.pool.device,
        )  # fmt: skip
        pool.layer(0).copy_(self.pool.layer(0))
        pool.stamps(0).copy_(self.pool.stamps(0))
        weights, both = self.weights, decodes + prompts
        recurrence: Any
        if self.is_delta:
            recurrence = Rule(self.own, weights.taps)
        else:
            assert weights.skip is not None
            recurrence = Scan(self.own, weights.taps, weights.bias, weights.skip)
        backend = RecurrentBackend(pool, (AttentionSpec(1.0, recurrence=recurrence),))
        table = torch.zeros(len(both), 6, dtype=torch.int64)
        for row, (_, _, read, write, saved) in zip(table, both, strict=True):
            row[: 2 + len(saved)] = torch.tensor([read, write, *saved])
        batch = AttentionBatch(
            np.array([row[1] for row in both], np.int32),
            np.array([row[0] + row[1] for row in both], np.int32),
            len(decodes), table.to(DEVICE), table, table, is_state=True,
        )  # fmt: skip
        backend.begin(batch)
        inputs, first, second, gate = self._read(made)
        out = backend(0, inputs, first, second).flatten(1)
        return pool, self._behind(out, gate)

    def _read(self, made: Made) -> tuple[Tensor, ...]:
        units, values = self.units, self.own.values
        tokens, weights = len(made.inputs), self.weights
        if self.is_delta:
            key = self.own.key_dim
            sizes = [units * size for size in (key, key, values, values)]
            q, k, v, gate = torch.split(made.inputs, sizes, dim=1)
            inputs = torch.cat([each.view(tokens, units, -1) for each in (q, k, v)], dim=-1)
            beta, rate = made.gates.view(tokens, 2, units, -1).unbind(1)
            second = beta.float().sigmoid()
            steps = torch.nn.functional.softplus(rate.float() + weights.rate_bias)
            return inputs, -weights.rate.exp() * steps, second, gate
        inner, group = units * values, self.own.groups * self.own.state_dim
        sizes = [inner, inner, group, group, weights.rate.numel()]
        gate, x, b, c, dt = torch.split(made.inputs, sizes, dim=1)
        both = [each[:, None].expand(-1, units, -1) for each in (b, c)]
        inputs = torch.cat((x.view(tokens, units, -1), *both), dim=-1)
        steps = torch.nn.functional.softplus(dt.view(tokens, units, -1) + weights.rate_bias)
        return inputs, -weights.rate.exp() * steps, steps, gate

    def _behind(self, out: Tensor, gate: Tensor) -> Tensor:
        silu = torch.nn.functional.silu(gate.float())
        if not self.is_delta:
            out = out * silu
        normed = out.view(len(out), -1, len(self.norm.weight))
        scale = torch.rsqrt(normed.square().mean(-1, keepdim=True) + self.norm.eps)
        out = (normed * scale * self.norm.weight.float()).flatten(1)
        return out * silu if self.is_delta else out


class Step(NamedTuple):
    """Rows of a step that the check computes."""

    decodes: list[Row]
    prompts: list[Row]


CHECKED = (
    Step([], [(0, 300, 0, 1, ()), (0, 2, 0, 2, ())]),
    Step([(300, 1, 1, 1, ()), (2, 1, 2, 3, (4, 3))], [(0, 1000, 0, 5, (6, 64, 7, 960))]),
    Step([(301, 1, 1, 1, ())], [(64, 936, 6, 8, ()), (960, 40, 7, 9, ())]),
)


def check(kind: str) -> None:
    """Compares values, and stops where they differ. Chunks of a prompt leave the bits of a whole
    one."""
    layer = Layer(kind, 10, 1)
    of_prompt = layer.made(1000)
    for number, step in enumerate(CHECKED):
        lens = [row[1] for row in step.decodes + step.prompts]
        made = layer.made(sum(lens))
        at = len(step.decodes)
        for row in step.prompts if number else ():
            for mine, theirs in zip((made.inputs, made.gates), of_prompt[::5], strict=False):
                mine[at : at + row[1]] = theirs[row[0] : row[0] + row[1]]
            at += row[1]
        pool, want = layer.reference(made, *step)
        rows = layer.rows(*step, made.inputs)
        found = layer.run(made, rows)
        _compare(found, want, f"{kind}, step {number}")
        assert not rows.states.spoilt.any(), "no state is wrong"
        for page in range(1, 10):
            _compare(layer.pool.layer(0)[page], pool.layer(0)[page], f"step {number}, page {page}")
        assert torch.equal(layer.pool.stamps(0)[1:], pool.stamps(0)[1:])
    whole, *parts = (layer.pool.integers[page, :, 0] for page in (5, 8, 9))
    for part in parts:
        if not torch.equal(whole, part):
            raise SystemExit(f"{kind}: a prompt in chunks leaves other bits than a whole one")
    print(f"{kind}: values as the reference in float32 gives them", flush=True)


def _compare(found: Tensor, want: Tensor, what: str) -> None:
    off = float((found.float() - want).norm() / want.norm().clamp_min(1e-9))
    if not off < MOST_OFF:
        raise SystemExit(f"{what}: {off:.3g} of the norm off")


def decoding(kind: str, rows: int, more: list[tuple[int, ...]]) -> dict[str, Any]:
    """Times of decode rows."""
    layer = Layer(kind, 2 * rows + 1)
    made = layer.made(rows)
    # Another page is written than read: a call must not spoil the state of the next one.
    own: list[Row] = [(9, 1, page, rows + page, ()) for page in range(1, rows + 1)]
    given = layer.rows(own, [], made.inputs)
    layer.pool.elements[..., 32:].normal_()
    layer.pool.integers[..., 0].fill_(9)

    def calls() -> None:
        for call in range(CALLS):
            layer.run(made, given, call % LAYERS)

    us = replayed_us(calls) / CALLS
    assert not given.states.spoilt.any(), "states are read"
    moved = 2 * rows * layer.state_bytes
    line = {
        "kind": kind, "rows": rows, "us": us, "tb_per_s": moved / us / 1e6,
        "floor_us": moved / MEMORY_TB_S / 1e6,
    }  # fmt: skip
    for each in more:
        other = decode.Threads._make(each)
        with mock.patch.multiple(decode, THREADS=other, OF_MAMBA=other, SPLIT=other):
            line[f"{each}_us"] = replayed_us(calls) / CALLS
    print(line, flush=True)
    return line


def prompts(kind: str, each: tuple[int, int], more: list[tuple[int, ...]]) -> dict[str, Any]:
    """Times of prompts, us a layer, of each kernel."""
    count, length = each
    layer = Layer(kind, count + 1, 1)
    tokens = count * length
    made = layer.made(tokens)
    given = layer.rows([], [(0, length, 0, page, ()) for page in range(1, count + 1)], made.inputs)
    kept = Kept(layer.pool, 0)
    own = layer.weights, kept, given.states, layer.shape
    mixed = mix(made, *own, given.chunks)
    out = layer.run(made, given)
    line: dict[str, Any] = {"kind": kind, "prompts": f"{count}x{length}"}
    line["whole_us"] = replayed_us(partial(layer.run, made, given))
    line["mtokens_per_s"] = tokens / line["whole_us"]
    line["mix_us"] = replayed_us(partial(mix, made, *own, given.chunks))
    solved = None
    if layer.is_delta:
        solved = solve(mixed, layer.shape, given.chunks)
        line["solve_us"] = replayed_us(partial(solve, mixed, layer.shape, given.chunks))
        raw, rest = out, (made, layer.shape, layer.norm, 0)
        line["norm_us"] = replayed_us(partial(norm_heads, raw, *rest, torch.empty_like(out)))
    target = out if layer.is_delta else out.float()
    folds = partial(fold, made, mixed, solved, *own, target)
    line["fold_us"] = replayed_us(folds)
    for tiles in more:
        with (
            mock.patch.object(folding, "FOLDING", folding.Tiles._make(tiles)),
            mock.patch.object(folding, "MANY", 1 << 30),
        ):
            line[f"fold_{tiles}_us"] = replayed_us(folds)
    print(line, flush=True)
    return line


def parsed(text: str) -> tuple[int, int]:
    """Prompts from the command line."""
    count, length = map(int, text.split("x"))
    return count, length


def numbers(text: str) -> tuple[int, ...]:
    """A division from the command line."""
    return tuple(map(int, text.split(",")))


USUAL: Final = ((1, 8192), (8, 1024), (32, 256))


def main() -> None:
    """Checks values, and times rows and prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["delta", "mamba"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--prompts", type=parsed, nargs="*", default=USUAL)
    parser.add_argument("--tiles", type=numbers, nargs="*", default=[])
    parser.add_argument("--threads", type=numbers, nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found, wrong = [], []
    with torch.inference_mode():
        for kind in arguments.kinds:
            try:
                check(kind)
            except SystemExit as error:  # Times are of worth all the same.
                wrong.append(str(error))
                print(error, flush=True)
            found += [decoding(kind, rows, arguments.threads) for rows in arguments.rows]
            found += [prompts(kind, each, arguments.tiles) for each in arguments.prompts]
    write_json(arguments.json, found)
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
