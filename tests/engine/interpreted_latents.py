"""Runs the kernels of latents in Triton's interpreter, against float64.

A script of its own, because Triton looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.attention.latents import blocks_of
from engine.attention.parts import Division, Tiles
from engine.cuda.kv.latent_decode import decode_latents
from engine.cuda.kv.latent_prompt import prompt_latents
from engine.cuda.kv.latent_store import latent_store
from engine.cuda.kv.rope_store import RopeTable
from engine.model.linear import Build, RmsNorm
from engine.model.mixers.rope import Rope, Ropes, rotate
from engine.pool.latent_pool import LatentPool
from engine.step.attention import AttentionSpec, Latents

CPU = torch.device("cpu")
JUNK, SCALE = 3e4, 0.2


class Shape(NamedTuple):
    heads: int
    rank: int
    made: int
    turned: int
    values: int

    @property
    def dim(self) -> int:
        return self.rank + self.turned


def pool_of(shape: Shape, pages: int, dtype: torch.dtype) -> LatentPool:
    pool = LatentPool(
        values=shape.rank, num_pages=pages, num_layers=2, num_kv_heads=1, head_dim=shape.dim,
        page_size=16, dtype=dtype, device=CPU,
    )  # fmt: skip
    pool.elements.fill_(JUNK)
    return pool


def spec_of(shape: Shape, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """And what makes K and V of heads, in float64."""
    weight = (torch.randn(shape.heads, shape.made + shape.values, shape.rank) / 5).to(dtype)
    return AttentionSpec(SCALE, latents=Latents(weight, shape.made)), weight.double()


def attended(q: Tensor, latents: Tensor, heads: Tensor, shape: Shape) -> Tensor:
    """One token's q [Hq, N + R] over [L, C + R], with K and V of heads written out."""
    both = torch.einsum("lc,hmc->hlm", latents[:, : shape.rank], heads)
    turned = latents[None, :, shape.rank :].expand(shape.heads, -1, -1)
    keys = torch.cat((both[..., : shape.made], turned), dim=-1)
    logits = torch.einsum("hd,hld->hl", q, keys) * SCALE
    return torch.einsum("hl,hlv->hv", logits.softmax(-1), both[..., shape.made :])


def check_decode(
    shape: Shape, width: int, parts: tuple[int, int], dtype: torch.dtype, within: float
) -> None:
    """Rows of `width` new tokens each, which attend over K and V of heads, written out."""
    contexts = torch.tensor([width, 64, 64 + width, 200], dtype=torch.int32)
    pages = -(-int(contexts.max()) // 16) + 1
    pool = pool_of(shape, len(contexts) * pages, dtype)
    table = torch.randperm(pool.num_pages).int().view(len(contexts), pages)
    latents = torch.randn(len(contexts), 200, shape.dim).to(dtype)
    for row, length in enumerate(contexts.tolist()):
        at = torch.arange(length)
        own = latents[row, :length, None]
        pool.write(1, table[row][at // 16].long(), at % 16, own, own)
    spec, heads = spec_of(shape, dtype)
    q = torch.randn(4 * width, shape.heads, shape.made + shape.turned).to(dtype)
    division = Division(*parts, Tiles(32, 4, 3))
    found = decode_latents(spec.latents.absorbed(q), pool, 1, contexts, table, spec, division)
    found = spec.latents.values(found)
    lengths = (contexts[:, None] - width + 1 + torch.arange(width)).flatten()
    for token, length in enumerate(lengths.tolist()):
        seen = latents[token // width, :length].double()
        want = attended(q[token].double(), seen, heads, shape)
        off = (found[token].double() - want).norm() / want.norm()
        assert off < within, (token, shape, width, parts, off)


def check_prompts(shape: Shape, dtype: torch.dtype, within: float) -> None:
    """Pieces of prompts, each behind a context of its own, and a whole one."""
    contexts, lens = torch.tensor([70, 33, 200, 5]), torch.tensor([1, 33, 40, 2])
    pages = -(-int(contexts.max()) // 16) + 1
    pool = pool_of(shape, len(contexts) * pages, dtype)
    table = torch.randperm(pool.num_pages).int().view(len(contexts), pages)
    latents = torch.randn(len(contexts), 200, shape.dim).to(dtype)
    for row, length in enumerate(contexts.tolist()):
        at = torch.arange(length)
        own = latents[row, :length, None]
        pool.write(1, table[row][at // 16].long(), at % 16, own, own)
    spec, heads = spec_of(shape, dtype)
    q = torch.randn(int(lens.sum()), shape.heads, shape.made + shape.turned).to(dtype)
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    absorbed = spec.latents.absorbed(q)
    found = prompt_latents(absorbed, pool, 1, starts, 40, contexts.int(), table, spec)
    found = spec.latents.values(found)
    for row, (length, new) in enumerate(zip(contexts.tolist(), lens.tolist(), strict=True)):
        for place in range(new):
            token = int(starts[row]) + place
            seen = latents[row, : length - new + place + 1].double()
            want = attended(q[token].double(), seen, heads, shape)
            off = (found[token].double() - want).norm() / want.norm()
            assert off < within, (row, place, shape, off)


def check_store(shape: Shape, *, neighbours: bool) -> None:
    """As the mixer norms and rotates."""
    pool, half = pool_of(shape, 7, torch.float32), shape.turned // 2
    tokens, width = 5, shape.made + shape.turned
    raw, q = torch.randn(tokens, shape.dim), torch.randn(tokens, shape.heads * width)
    kept = raw.clone()
    norm = RmsNorm(shape.rank, 1e-6, Build(torch.float32, CPU, None, None, None))
    norm.weight.data.uniform_(0.5, 1.5)
    rope = Rope(tuple(0.5**i for i in range(half)), scale=1.2, neighbours=neighbours)
    ropes = Ropes([rope], CPU)
    positions = torch.tensor([3, 4, 9, 40, 0])
    stores = torch.tensor([19, 20, 105, 95, 32])
    angles = torch.empty(64, 2, half)
    ropes.fill(rope, angles)
    table = RopeTable(angles.flatten(1), half, neighbours)
    cos, sin, _ = ropes(positions, torch.float32)[rope]
    want = torch.cat(
        (
            norm(kept[:, : shape.rank]),
            rotate(kept[:, None, shape.rank :], cos, sin, neighbours=neighbours)[:, 0],
        ),
        dim=1,
    )
    heads = q.view(tokens, shape.heads, width)
    turned = rotate(heads[..., shape.made :].clone(), cos, sin, neighbours=neighbours)
    want_q = torch.cat((heads[..., : shape.made], turned), dim=2).clone()
    to = positions.int(), stores.int(), pool, 1, shape.heads
    latent_store(kept, q, norm, table, *to)
    torch.testing.assert_close(kept, want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(q.view_as(want_q), want_q, atol=1e-6, rtol=1e-5)
    stored = pool.layer(1)[0][stores // 16, 0, stores % 16]
    assert torch.equal(stored, kept)
    again, alone = pool_of(shape, 7, torch.float32), raw.clone()
    latent_store(alone, None, norm, table, *to[:2], again, 1, 0)
    assert torch.equal(again.elements, pool.elements)
    left = pool.elements.eq(JUNK).sum()
    assert left == pool.elements.numel() - tokens * shape.dim, "nothing else is written"


def main() -> None:
    """One case of each kernel, or all cases."""
    torch.manual_seed(0)
    assert [blocks_of(*each) for each in ((16, 1), (16, 8), (20, 4), (128, 1))] == [1, 2, 2, 2]
    small = Shape(3, 32, 16, 8, 12)
    check_decode(small, 1, (3, 64), torch.float32, 1e-5)
    check_decode(small, 4, (3, 64), torch.float32, 1e-5)
    check_prompts(small, torch.float32, 1e-5)
    check_store(small, neighbours=True)
    if "all" in sys.argv:
        check_store(small, neighbours=False)
        check_store(Shape(20, 48, 24, 16, 8), neighbours=True)
        check_prompts(Shape(20, 48, 24, 16, 8), torch.float32, 1e-5)
        check_prompts(Shape(16, 64, 32, 32, 32), torch.float16, 3e-3)
        check_decode(small, 1, (1, 1), torch.float32, 1e-5)
        check_decode(Shape(20, 48, 24, 16, 8), 8, (2, 32), torch.float32, 1e-5)
        check_decode(Shape(16, 64, 32, 32, 32), 8, (4, 32), torch.float32, 1e-5)
        check_decode(Shape(16, 64, 32, 32, 32), 2, (4, 32), torch.float16, 3e-3)
    print("all equal")


if __name__ == "__main__":
    main()
