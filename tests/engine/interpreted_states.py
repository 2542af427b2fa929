"""Runs the kernels of states in Triton's interpreter, against the mixers on a CPU.

A script of its own, because Triton looks at TRITON_INTERPRET when it is imported. Arguments: a
scratch folder, then families.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from test_model_logits import load
from tiny_families import HYBRIDS
from tiny_models import write_tiny_model
from torch import Tensor

from engine.attention.paged import PagedStep
from engine.attention.recurrent.states import RecurrentBackend
from engine.cuda.mixers.delta import FusedDelta
from engine.cuda.mixers.mamba import FusedMamba
from engine.cuda.states import decode
from engine.model.mixers.delta import DeltaRule
from engine.pool.state_pool import StatePool
from engine.step.attention import AttentionBatch

CPU, PAGES, JUNK = torch.device("cpu"), 12, 3e4


class Row(NamedTuple):
    """A row of a step."""

    start: int
    tokens: int
    read: int
    write: int
    saved: tuple[tuple[int, int], ...] = ()
    """Pages and tokens."""


STEPS: list[tuple[list[Row], list[Row], int]] = [
    ([], [Row(0, 70, 0, 1)], 0),
    ([Row(70, 1, 1, 1)], [Row(0, 130, 0, 2, ((3, 64), (4, 128))), Row(0, 2, 0, 5)], 0),
    ([Row(71, 1, 1, 6, ((7, 72),)), Row(2, 1, 5, 5)], [Row(128, 1, 4, 8), Row(64, 71, 3, 9)], 3),
    # The second row's state is one of 72 tokens, and the third has none of its own.
    ([Row(72, 1, 6, 6), Row(75, 1, 7, 7), Row(0, 1, 0, 10)], [], 0),
    ([], [Row(130, 1, 2, 2), Row(60, 9, 8, 8)], 5),
    ([Row(131, 1, 2, 2)], [Row(3, 70, 5, 5, ((11, 64),))], 0),
]
"""Decode rows, prompts, and tokens of padding behind each. Saved states are on the grid, or at the
end of a row."""


class Pair:
    """A layer twice: as the reference, and fused."""

    def __init__(self, module: Any) -> None:
        self.module = module
        kept = module.own.kept
        self.pools, self.backends = [], []
        for _ in "ab":
            pool = StatePool(
                num_pages=PAGES, num_layers=2, units=kept.kv_heads, numbers=kept.state, device=CPU
            )
            pool.elements.fill_(JUNK)
            self.pools.append(pool)
            self.backends.append(RecurrentBackend(pool, (module.spec, module.spec)))
        pools = SimpleNamespace(
            state_of=lambda _: (self.pools[1], 1), places=[SimpleNamespace(group=0)] * 9
        )
        fuse = FusedDelta if isinstance(module, DeltaRule) else FusedMamba
        groups = SimpleNamespace(states=lambda _: self.backends[1])
        self.fused = fuse(module, pools, groups)  # type: ignore[arg-type]

    def reference(self, x: Tensor, decodes: list[Row], prompts: list[Row]) -> Tensor:
        rows = decodes + prompts
        batch = AttentionBatch(
            np.array([row.tokens for row in rows], np.int32),
            np.array([row.start + row.tokens for row in rows], np.int32),
            len(decodes), table_of(rows).long(), *[torch.zeros(0)] * 2, is_state=True,
        )  # fmt: skip
        self.backends[0].begin(batch)
        attend = lambda _, q, k, v: self.backends[0](1, q, k, v)  # noqa: E731
        out: Tensor = self.module(x, SimpleNamespace(attention=attend))
        return out

    def run(self, x: Tensor, decodes: list[Row], prompts: list[Row], padding: int) -> Tensor:
        rows = decodes + prompts
        decode.FEW = 132 * (len(decodes) % 2)  # Each turn has a program, or a unit.
        contexts = [row.start + row.tokens for row in rows]
        lens, table = [row.tokens for row in prompts], table_of(rows)
        if padding:  # A decode row, an empty prompt, and one with all tokens of padding.
            at = len(decodes)
            contexts = [*contexts[:at], 1, *contexts[at:], 1, 1]
            more = torch.zeros(1, 6, dtype=torch.int32)
            table = torch.cat((table[:at], more, table[at:], more, more))
            lens = [*lens, 0, padding]
            zeros = torch.zeros(padding, x.shape[1])
            x = torch.cat((x[:at], zeros[:1], x[at:], zeros))
        starts = torch.tensor([0, *np.cumsum(lens)]).int() if lens else None
        self.backends[1].prepare(
            PagedStep(
                len(decodes) + bool(padding), torch.tensor(contexts).int(), table, starts,
                max(lens, default=0), all_fresh=False,
            )
        )  # fmt: skip
        out = self.fused.run(x, None)  # type: ignore[arg-type]
        assert out.isfinite().all()
        if padding:
            out = torch.cat((out[: len(decodes)], out[len(decodes) + 1 : len(x) - padding]))
        return out

    def spoilt(self, decodes: int, prompts: int, padding: int) -> list[list[bool]]:
        found = self.backends[1].found > 0
        if padding:
            assert not found[[decodes, -1, -2]].any(), "nothing is wrong with padding"
            found = torch.cat((found[:decodes], found[decodes + 1 :][:prompts]))
        return [self.backends[0].spoilt.tolist(), found.tolist()]


def table_of(rows: list[Row]) -> Tensor:
    table = torch.zeros(len(rows), 6, dtype=torch.int32)
    for row, own in zip(table, rows, strict=True):
        flat = [own.read, own.write, *(number for pair in own.saved for number in pair)]
        row[: len(flat)] = torch.tensor(flat)
    return table


def check(module: Any) -> None:
    """Steps one after the other: what comes out, and all pages."""
    pair = Pair(module)
    hidden = module.inputs.parts[0].region.columns.size
    for number, (decodes, prompts, padding) in enumerate(STEPS):
        x = torch.randn(sum(row.tokens for row in decodes + prompts), hidden)
        with torch.inference_mode():
            want = pair.reference(x, decodes, prompts)
            got = pair.run(x, decodes, prompts, padding)
        same(got, want, f"step {number}")
        one, other = (pool.layer(1) for pool in pair.pools)
        for page in range(1, PAGES):
            same(other[page], one[page], f"step {number}, page {page}")
        one, other = (pool.stamps(1)[1:] for pool in pair.pools)
        assert torch.equal(one, other), (number, one, other)
        want_spoilt, got_spoilt = pair.spoilt(len(decodes), len(prompts), padding)
        assert want_spoilt == got_spoilt, (number, want_spoilt, got_spoilt)
        assert any(want_spoilt) == (number in (3, 4)), "a wrong state is found"
    assert pair.pools[1].layer(0).eq(JUNK).all(), "no other layer is written"


def same(got: Tensor, want: Tensor, where: str) -> None:
    off = (got - want).norm() / want.norm().clamp_min(1e-9)
    assert off < 1e-5, (where, float(off))


def randomised(module: Any) -> None:
    """Weights as trained ones are: decays of all speeds, keys that are alike."""
    for name, scale in (("taps", 0.5), ("rate", 1.0), ("rate_bias", 1.0)):
        getattr(module, name).data.normal_(0, scale)


def main() -> None:
    """All layers of families, or of two of them."""
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
    for family in sys.argv[2:]:
        path = write_tiny_model(folder / family, tokenizer=False, **HYBRIDS[family])
        # Two turns a head of the delta rule, one of Mamba-2.
        columns = 4 if "qwen" in family else 64
        decode.THREADS = decode.SPLIT = decode.THREADS._replace(columns=columns)
        mixer = load(path).model.layers[0].mixer
        randomised(mixer)
        check(mixer)
    print("all equal")


if __name__ == "__main__":
    main()
