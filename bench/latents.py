"""What attention over latents takes on a GPU, and how far it is from float64.

python -m bench.latents [--heads 16] [--width 1 2 4 8] [--batch ROWSxTOKENS ...]
                        [--tiles B,W,S ...] [--sweep] [--prompts TOKENS ...] [--json FILE]

Pages of 16 latents of 512 + 64 numbers, bf16, four layers. First the values are compared with
heads written out in float64, decode rows and prompts. Then a line for each batch of decode rows: us
of the kernel by both divisions, of the whole attention with what absorbs, and the bytes of latents
a second, of which 70 % of the memory's speed is the goal. Eight calls are captured in a graph, and
the median of five pairs of replays is shown. `--tiles` adds other tiles, `--sweep` the three
fastest divisions with those in `SWEPT` and these (a minute for one width, mostly compiling).
`--prompts`: fresh prompts with FlashAttention-3 over K and V of heads, and absorbed, us a layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from bench.harness import write_json
from bench.kernels import CALLS, LAYERS, PAGE_TOKENS, replayed_us
from engine.attention import choose_backend
from engine.attention.latents import LatentBackend, blocks_of, divided
from engine.attention.paged import PagedStep
from engine.attention.parts import LEAST_TOKENS_OF_FEW, PROCESSORS, Division, Tiles
from engine.cuda.attention_kernels import CudaKernels
from engine.cuda.kv.latent_decode import decode_latents
from engine.pool.latent_pool import LatentPool
from engine.step.attention import AttentionSpec, Latents

RANK, TURNED, K_DIM, V_DIM = 512, 64, 128, 128
SCALE: Final = (K_DIM + TURNED) ** -0.5
BATCHES = ((1, 8192), (64, 1152), (64, 8192), (256, 384), (256, 2176))
SWEPT: Final = tuple(
    Tiles(*one) for one in ((32, 4, 3), (32, 8, 3), (32, 4, 5), (64, 4, 2), (64, 8, 2))
)
"""Tiles that the sweep tries. Others do not fit a processor or are small: a latent has 1,152 bytes,
and each round multiplies the sums of 512 numbers of every query once more."""
MOST_PARTS: Final = 32
MOST_OFF = 1e-2
"""Largest error, as a share of the norm of a head's output: what bf16 leaves."""


class Batch:
    """Rows with random latents."""

    def __init__(self, heads: int, rows: int, tokens: int, width: int) -> None:
        device = torch.device("cuda")
        weight = torch.randn(heads, K_DIM + V_DIM, RANK, device=device) * RANK**-0.5
        self.latents = Latents(weight.bfloat16(), K_DIM)
        self.spec = AttentionSpec(SCALE, latents=self.latents)
        pages = -(-tokens // PAGE_TOKENS)
        self.pool = LatentPool(
            values=RANK, num_pages=rows * pages + 1, num_layers=LAYERS, num_kv_heads=1,
            head_dim=RANK + TURNED, page_size=PAGE_TOKENS, dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        self.pool.elements.normal_()
        order = torch.randperm(rows * pages, device=device).int() + 1
        self.table = order.view(rows, pages)
        self.contexts = torch.full((rows,), tokens, dtype=torch.int32, device=device)
        shape = rows * width, heads, K_DIM + TURNED
        self.q = torch.randn(shape, device=device).bfloat16()
        self.rows, self.width = rows, width

    @property
    def read_bytes(self) -> int:
        """Bytes of latents that a call reads."""
        return int(self.contexts.sum()) * (RANK + TURNED) * 2

    def attend(self, q: Tensor, divided: Division) -> None:
        """Some calls of the kernel and the merge alone, of absorbed queries."""
        for call in range(CALLS):
            where = self.contexts, self.table, self.spec, divided
            decode_latents(q, self.pool, call % LAYERS, *where)

    def kernel_us(self, divided: Division) -> float:
        """Time of a call of `attend`."""
        return replayed_us(partial(self.attend, self.latents.absorbed(self.q), divided)) / CALLS

    def whole_us(self) -> float:
        """Time with absorbing and what makes V."""
        backend = self.backend("auto")
        step = PagedStep(self.rows, self.contexts, self.table, None, 0, True, False, self.width)
        backend.prepare(step)

        def calls() -> None:
            for call in range(CALLS):
                backend.attend_ends(call % LAYERS, self.q, self.contexts, self.table)

        return replayed_us(calls) / CALLS

    def backend(self, name: str) -> LatentBackend:
        """Attention over its pool."""
        found = choose_backend(name, self.pool, (self.spec,) * LAYERS, CudaKernels())
        assert isinstance(found, LatentBackend), "a Hopper is needed"
        return found

    def of_row(self, row: int, length: int) -> Tensor:
        """Its first latents in layer 0, in float64."""
        pages = self.table[row].long()
        stored = self.pool.layer(0)[0][pages, 0].flatten(0, 1)
        return stored[:length].double()

    def want(self, token: int, length: int, row: int) -> Tensor:
        """A token's attention, with K and V of heads written out."""
        seen, weight = self.of_row(row, length), self.latents.weight.double()
        both = torch.einsum("lc,hmc->hlm", seen[:, :RANK], weight)
        turned = seen[None, :, RANK:].expand(len(weight), -1, -1)
        keys = torch.cat((both[..., :K_DIM], turned), dim=-1)
        logits = torch.einsum("hd,hld->hl", self.q[token].double(), keys) * SCALE
        return torch.einsum("hl,hlv->hv", logits.softmax(-1), both[..., K_DIM:])


def check(heads: int) -> None:
    """Compares values, and stops where they differ."""
    for width in (1, 4):
        batch = Batch(heads, 4, 1500, width)
        batch.contexts = torch.tensor([width, 65, 700, 1500], dtype=torch.int32, device="cuda")
        backend = batch.backend("auto")
        backend.prepare(PagedStep(4, batch.contexts, batch.table, None, 0, True, True, width))
        found = backend.attend_ends(0, batch.q, batch.contexts, batch.table)
        for token in range(4 * width):
            row, column = divmod(token, width)
            length = int(batch.contexts[row]) - width + 1 + column
            _compare(found[token], batch.want(token, length, row), f"decode width {width}")
    for name, fresh in (("auto", True), ("auto", False), ("triton", True)):
        batch, length = Batch(heads, 1, 300, 300), 300
        backend, k = batch.backend(name), batch.of_row(0, length).bfloat16()[:, None]
        backend.prepare(prompt_step(batch, length, fresh=fresh))
        found = backend.attend(0, batch.q, k, k[..., :RANK])
        for token in (0, 1, 63, 64, 299):
            _compare(found[token], batch.want(token, token + 1, 0), f"prompt {name} {fresh}")
    print("values: as float64 gives them", flush=True)


def _compare(found: Tensor, want: Tensor, what: str) -> None:
    off = float((found.double() - want).norm() / want.norm())
    if not off < MOST_OFF:
        raise SystemExit(f"{what}: {off:.3g} of the norm off")


def prompt_step(batch: Batch, length: int, *, fresh: bool) -> PagedStep:
    """One prompt."""
    starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    return PagedStep(0, batch.contexts, batch.table, starts, length, fresh)


def measured(heads: int, case: tuple[int, int], width: int, more: Any) -> dict[str, Any]:
    """Times of a batch, which are also printed."""
    rows, tokens = case
    batch, blocks = Batch(heads, rows, tokens, width), blocks_of(heads, width)
    alike_us, different_us = (
        batch.kernel_us(divided(rows, heads, width, differ=differ)) for differ in (False, True)
    )
    line: dict[str, Any] = {
        "rows": rows, "tokens": tokens, "width": width, "alike_us": alike_us,
        "different_us": different_us, "whole_us": batch.whole_us(),
        "tb_per_s": batch.read_bytes / min(alike_us, different_us) / 1e6,
    }  # fmt: skip
    chosen = divided(rows, heads, width, differ=False)
    for tiles in more.tiles:
        line[",".join(map(str, tiles))] = batch.kernel_us(chosen._replace(tiles=tiles))
    if more.sweep:
        tried = swept(rows * blocks, (*SWEPT, *more.tiles))
        fastest = sorted((batch.kernel_us(one), one) for one in tried)[:3]
        line["best"] = [(round(us, 1), *one[:2], *one.tiles) for us, one in fastest]
        line["best_tb_per_s"] = batch.read_bytes / fastest[0][0] / 1e6
    print(line, flush=True)
    return line


def swept(items: int, tiles: tuple[Tiles, ...]) -> Iterator[Division]:
    """Divisions to choose from: whole items, and parts that make up to eight programs a
    processor."""
    yield from (Division(1, 1, one) for one in tiles)
    parts = [2**n for n in range(1, MOST_PARTS.bit_length()) if items * 2**n <= 8 * PROCESSORS]
    for one, most, least in product(tiles, parts, (LEAST_TOKENS_OF_FEW, 256)):
        yield Division(most, least, one)


def prompts(heads: int, length: int) -> dict[str, Any]:
    """A fresh prompt, us a layer: by heads, and absorbed."""
    batch = Batch(heads, 1, length, length)
    k = batch.of_row(0, length).bfloat16()[:, None]
    line: dict[str, Any] = {"prompt": length}
    for name in ("auto", "triton"):
        backend = batch.backend(name)
        backend.prepare(prompt_step(batch, length, fresh=True))
        line[f"{name}_us"] = replayed_us(partial(backend.attend, 0, batch.q, k, k[..., :RANK]))
    print(line, flush=True)
    return line


def numbers(text: str) -> tuple[int, ...]:
    """Numbers from the command line: `64x1152`, `32,4,3`."""
    return tuple(map(int, text.replace("x", ",").split(",")))


def main() -> None:
    """Checks values, and times every batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batch", type=numbers, nargs="+", default=BATCHES)
    parser.add_argument("--tiles", type=lambda text: Tiles(*numbers(text)), nargs="+", default=[])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--prompts", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        check(arguments.heads)
        found = [
            measured(arguments.heads, case, width, arguments)
            for case, width in product(arguments.batch, arguments.width)
        ]
        found += [prompts(arguments.heads, length) for length in arguments.prompts]
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
