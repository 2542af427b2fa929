"""Runs Quest's kernels in Triton's interpreter against its path with PyTorch, and the engine's
tables of heads against what they are by definition.

A script of its own, because Triton looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import baton_quest_kernels
import numpy as np
import torch
from baton_quest import Quest
from torch import Tensor

from engine.cuda.hooks.choosing import head_tables
from engine.pool.fp8_pool import Fp8Pool
from engine.pool.kv_pool import PlainPool
from engine.step.attention import AttentionSpec
from engine.step.hooks import DecodeRows, HookSite, StepRows

CPU = torch.device("cpu")
PAGE, HEADS, GROUP, DIM, LAYERS, PAGES = 16, 2, 3, 24, 5, 90
CONTEXTS = np.array([500, 30, 700, 1, 1440], np.int32)
COUNTS = np.array([16, 0, 20, 0, 17], np.int32)
MOST = 22


def hook_over(pool) -> Quest:
    hook = Quest(256)
    specs = [AttentionSpec(1.0)] * LAYERS
    specs[3] = AttentionSpec(1.0, window=100)
    hook.attach(HookSite(pool, tuple(specs), decodes=True))
    return hook


def table_of(width: int) -> np.ndarray:
    """Pages of the rows. Behind them, and in columns that a row stride passes over, are others."""
    rng = np.random.default_rng(1)
    rows = [[*rng.permutation(PAGES), *range(width + 3 - PAGES)] for _ in CONTEXTS]
    return np.array(rows, np.int32)


def step_of(table: np.ndarray) -> StepRows:
    """A step in which most pages come, and two are completed."""
    return StepRows(
        number=0,
        tags=np.full(len(CONTEXTS), 16, np.int32),
        query_lens=np.ones(len(CONTEXTS), np.int32),
        context_lens=np.array([512, 30, 700, 1, 1440], np.int32),
        num_decodes=len(CONTEXTS),
        prompts_at=len(CONTEXTS),
        page_table=table,
        page_size=PAGE,
        arrived=np.arange(5, PAGES, dtype=np.int32),
    )


def check(kind, dtype: torch.dtype) -> None:
    """Equal summaries and equal places, in every layer."""
    torch.manual_seed(0)
    pool = kind(
        num_pages=PAGES, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, page_size=PAGE,
        dtype=dtype, device=CPU,
    )  # fmt: skip
    everything = torch.arange(PAGES).repeat_interleave(PAGE), torch.arange(PAGE).repeat(PAGES)
    for layer in range(LAYERS):
        k, v = torch.randn(2, PAGES * PAGE, HEADS, DIM).to(dtype)
        pool.write(layer, *everything, k * torch.randn(PAGES * PAGE, 1, 1).exp().to(dtype), v)
    table = table_of(92)
    theirs, ours = hook_over(pool), hook_over(pool)
    ours._use(baton_quest_kernels)
    assert not ours._is_summarised.any()
    for hook in (theirs, ours):
        hook.step_began(step_of(table))
        hook.step_ended(step_of(table))
    assert torch.equal(ours._is_summarised, theirs._is_summarised)
    assert 2 < (theirs._is_summarised == 0).sum() < 9
    known = theirs._is_summarised == 1
    assert torch.equal(ours._summaries[:, known], theirs._summaries[:, known])
    rows = DecodeRows(
        torch.from_numpy(table)[:, :92], torch.from_numpy(CONTEXTS), torch.from_numpy(COUNTS),
        MOST, PAGE,
    )  # fmt: skip
    qkv = torch.randn(len(CONTEXTS), HEADS * GROUP + 2 * HEADS, DIM).to(dtype)
    q = qkv[:, : HEADS * GROUP]
    places = []
    for hook in (theirs, ours):
        hook.choosing_began(rows)
        places.append([hook.pages_wanted(layer, q) for layer in range(LAYERS)])
    for layer, (want, got) in enumerate(zip(*places, strict=True)):
        assert (want is None) == (got is None) == (layer in (0, 1, 3))
        if got is not None:
            assert torch.equal(got[COUNTS > 0], want[COUNTS > 0]), (layer, got, want)


def check_ranks() -> None:
    """Two ranks with a KV head each choose what one with both would."""
    torch.manual_seed(1)
    pools = [
        PlainPool(
            num_pages=PAGES, num_layers=LAYERS, num_kv_heads=heads, head_dim=DIM, page_size=PAGE,
            dtype=torch.float32, device=CPU,
        )
        for heads in (HEADS, 1, 1)
    ]  # fmt: skip
    everything = torch.arange(PAGES).repeat_interleave(PAGE), torch.arange(PAGE).repeat(PAGES)
    k, v = torch.randn(2, PAGES * PAGE, HEADS, DIM)
    for pool, heads in zip(pools, (slice(None), slice(0, 1), slice(1, 2)), strict=True):
        pool.write(2, *everything, k[:, heads].contiguous(), v[:, heads].contiguous())
    q = torch.randn(len(CONTEXTS), HEADS * GROUP, DIM)
    table = table_of(92)
    numbers = torch.from_numpy(CONTEXTS), torch.from_numpy(COUNTS)
    rows = DecodeRows(torch.from_numpy(table)[:, :92], *numbers, MOST, PAGE)
    places = []
    for pool, own in zip(pools, (q, q[:, :GROUP], q[:, GROUP:]), strict=True):
        hook = hook_over(pool)
        hook._use(baton_quest_kernels)
        hook.step_began(step_of(table))
        hook.choosing_began(rows)
        places.append(hook.pages_wanted(2, own)[COUNTS > 0])
    assert torch.equal(places[0], torch.cat(places[1:], 1))
    assert not torch.equal(*places[1:])


def check_ties() -> None:
    """Of equal bounds the first pages are read, and never more than the count."""
    pool = PlainPool(
        num_pages=PAGES, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, page_size=PAGE,
        dtype=torch.float32, device=CPU,
    )  # fmt: skip
    hook = hook_over(pool)
    hook._use(baton_quest_kernels)
    table = table_of(92)
    rows = DecodeRows(
        torch.from_numpy(table), torch.from_numpy(CONTEXTS), torch.from_numpy(COUNTS), MOST, PAGE
    )
    for summarised, sign in ((0, 1), (1, 1), (1, -1)):
        hook._is_summarised.fill_(summarised)
        hook._summaries.fill_(1.0)
        hook.choosing_began(rows)
        found = hook.pages_wanted(2, sign * torch.ones(len(CONTEXTS), HEADS * GROUP, DIM))
        for row, count in enumerate(COUNTS.tolist()):
            last = (int(CONTEXTS[row]) - 1) // PAGE
            want = torch.tensor([*range(count - 1), *[last] * (MOST - count + 1)])
            assert not count or (found[row] == want).all(), (row, found[row])


def check_tables() -> None:
    table = table_of(92)
    wanted = torch.randint(0, 1, (len(CONTEXTS), HEADS, MOST))
    for row, context in enumerate(CONTEXTS.tolist()):
        wanted[row] = torch.randint(0, -(-context // PAGE), (HEADS, MOST))
    rows = DecodeRows(
        torch.from_numpy(table)[:, :92], torch.from_numpy(CONTEXTS), torch.from_numpy(COUNTS),
        MOST, PAGE,
    )  # fmt: skip
    beyond = torch.zeros(1, dtype=torch.int32)
    check_table(head_tables(wanted, rows, beyond), wanted, table)
    assert not beyond
    wanted[1], wanted[0, :, 16:] = 1 << 40, -1  # Nobody reads them.
    check_table(head_tables(wanted, rows, beyond), wanted, table)
    assert not beyond
    for wrong in (-1, 44, 1 << 40):
        places, beyond = wanted.clone(), torch.zeros(1, dtype=torch.int32)
        places[2, 1, 7] = wrong
        got = head_tables(places, rows, beyond)
        places[2, 1, 7] = 0 if wrong < 0 else 43
        check_table(got, places, table)
        assert beyond == 1


def check_table(got: Tensor, wanted: Tensor, table: np.ndarray) -> None:
    for row, (context, count) in enumerate(zip(CONTEXTS.tolist(), COUNTS.tolist(), strict=True)):
        used = -(-context // PAGE)
        for head in range(HEADS):
            places = [*wanted[row, head, : count - 1].tolist(), used - 1] if count else range(used)
            want = [int(table[row, place]) * HEADS + head for place in places]
            assert got[row * HEADS + head, : len(want)].tolist() == want


def main() -> None:
    with torch.inference_mode():
        check(PlainPool, torch.float32)
        check(Fp8Pool, torch.float32)
        check_ranks()
        check_ties()
        check_tables()
    print("all equal")


if __name__ == "__main__":
    main()
