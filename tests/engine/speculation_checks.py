"""What must hold of the kernels of verify steps: on a GPU, and in Triton's interpreter, which is
this module's `main`. The reference is `engine.speculation`, with PyTorch."""

from __future__ import annotations

import os
from itertools import product

import numpy as np
import torch
from torch import Tensor

from engine.attention.parts import FP8, PLAIN, division
from engine.cuda.decode_attention import decode_attention
from engine.cuda.kernels import StepInputs
from engine.cuda.kv.fp8_decode import decode_attention_fp8
from engine.cuda.speculation.accepting import accept, read_result
from engine.cuda.speculation.columns import Columns as Known
from engine.cuda.speculation.columns import unpack_columns
from engine.cuda.speculation.noise import uniform
from engine.cuda.speculation.suffix import draft_suffix
from engine.pool.fp8_pool import Fp8Pool
from engine.pool.kv_pool import PlainPool
from engine.sampling import device_noise, noise
from engine.speculation.suffix import LONGEST, SHORTEST
from engine.speculation.tables import Columns, SlotTables, accepted
from engine.step.attention import AttentionSpec

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
SLOTS, CONTEXT, MOST, VOCAB, PAGE = 9, 2400, 7, 50, 16
LENGTHS = [0, 1, 15, 16, 40, 100, 333, 2047, 2200]


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def tables_of(seed: int, letters: int = VOCAB) -> SlotTables:
    generator = torch.Generator().manual_seed(seed)
    tables = SlotTables(SLOTS, CONTEXT, MOST, VOCAB, DEVICE)
    random = torch.randint(0, letters, (SLOTS + 1, CONTEXT), generator=generator)
    tables.history.copy_(random)
    tables.length[:SLOTS] = ints(LENGTHS)
    tables.next.copy_(tables.history.gather(1, tables.length[:, None].long()).squeeze(1))
    tables.drafts.copy_(torch.randint(0, VOCAB, (SLOTS + 1, MOST), generator=generator))
    tables.ready.copy_(torch.randint(0, MOST + 1, (SLOTS + 1,), generator=generator))
    tables.prompt_len.copy_(tables.length // 2)
    tables.seed.copy_(torch.randint(-(2**63), 2**63 - 1, (SLOTS + 1,), generator=generator))
    return tables


def check_attention_of_several_tokens() -> None:
    """As of so many rows of one token each, over the same pages. In the interpreter it takes
    minutes, and `interpreted_kernels` has its own."""
    if DEVICE.type == "cpu":
        return
    dtype = torch.bfloat16
    kinds = ((PlainPool, decode_attention, PLAIN), (Fp8Pool, decode_attention_fp8, FP8))
    for (kind, attend, tiles), width in product(kinds, (2, 4, 8)):
        pool = kind(num_pages=60, num_layers=2, num_kv_heads=2, head_dim=64, page_size=16,
                    dtype=dtype, device=DEVICE)  # fmt: skip
        at = torch.arange(60 * 16, device=DEVICE)
        k, v = torch.randn(2, len(at), 2, 64, device=DEVICE).to(dtype)
        pool.write(1, at // 16, at % 16, k, v)
        contexts = ints([width, 9, 130, 290])
        table = torch.randperm(60, device=DEVICE).int()[:20].repeat(4, 1)
        q = torch.randn(4 * width, 8, 64, device=DEVICE).to(dtype)
        each = contexts[:, None] - width + 1 + torch.arange(width, device=DEVICE)
        alone = each.flatten().int(), table.repeat_interleave(width, 0)
        for window, differ in product((None, 20), (True, False)):
            spec = AttentionSpec(0.125, window)
            divided = division(4, 2, differ=differ, tiles=tiles)
            got = attend(q, pool, 1, contexts, table, spec, divided)
            want = attend(q, pool, 1, *alone, spec, divided)
            error = (got.double() - want.double()).norm() / want.double().norm()
            assert error < 5e-3, (kind, width, window, differ, float(error))


def check_noise() -> None:
    """Bit for bit that of the host, at edges of every argument."""
    rng = np.random.default_rng(0)
    edges = np.array([0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1], np.uint64)
    seeds = np.concatenate([edges, rng.integers(0, 2**64 - 1, 2000, np.uint64)])
    choices = rng.choice([0, 1, 127, 2**31 - 1], len(seeds))
    indices = rng.choice([0, 1, 131071, 2**31 - 1], len(seeds))
    want = noise.uniform(seeds, choices, indices)
    given = (seeds.view(np.int64), choices, indices)
    got, plain = (
        of(*(torch.from_numpy(each).to(DEVICE) for each in given)).cpu().numpy()
        for of in (uniform, device_noise.uniform)
    )
    assert (got == want).all()
    assert (plain == want).all()


def check_columns() -> None:
    """Ids, positions, places and pages; padding and what is behind a bound touch the scratch page
    alone, and prompts beside are as in other steps."""
    for width in (1, 2, 4, 8):
        tables, real, padded, prompts = tables_of(width), 5, 8, 2
        slots = ints([3, 8, 0, 6, 2] + [SLOTS] * 3)
        lengths = tables.length[slots.long()].tolist()
        narrower = zip(lengths[:real], (0, 1, 0, 3, 9), strict=True)
        bounds = [max(1, length + width - by) for length, by in narrower] + [1] * 3 + [70, 1]
        columns = max(bounds) // PAGE + 1
        pages = torch.randperm(6 * columns).int().to(DEVICE).view(6, columns) + 1
        tokens = padded * width + 70
        of_tokens = torch.full((3, tokens), -7, dtype=torch.int32, device=DEVICE)
        table = torch.full((10, columns + 3), -7, dtype=torch.int32, device=DEVICE)
        contexts, kept_bounds = torch.full((2, 10), -7, dtype=torch.int32, device=DEVICE)
        inputs = StepInputs(*of_tokens, table, contexts)
        header = ints([real, 1, columns])
        least = ints([*lengths[:3], lengths[3] + 1, 0, 0, 0, 0])
        known = Known(header, slots, ints(bounds), least, ints(bounds), pages)
        unpack_columns(known, tables, PAGE, width, inputs, kept_bounds)
        alive = [row < real and row != 3 for row in range(padded)]
        want = [bound if own else 0 for bound, own in zip(bounds, alive, strict=False)]
        assert kept_bounds[:padded].tolist() == want
        assert prompts == len(bounds) - padded
        for row in range(padded):
            length, own = (lengths + [0] * 3)[row], slice(row * width, (row + 1) * width)
            slot = int(slots[row])
            want = [int(tables.next[slot]), *tables.drafts[slot].tolist()][:width]
            places = list(range(length, length + width))
            assert inputs.token_ids[own].tolist() == want
            assert inputs.positions[own].tolist() == places
            assert contexts[row] == length + width
            kept = [alive[row] and place < bounds[row] for place in places]
            stores = [
                (int(pages[row, place // PAGE]) if keep else 0) * PAGE + place % PAGE
                for place, keep in zip(places, kept, strict=True)
            ]
            assert inputs.stores[own].tolist() == stores
            count, mine = -(-(length + width) // PAGE), -(-bounds[row] // PAGE)
            table = pages[row, : min(count, mine)].tolist() if alive[row] else []
            assert inputs.page_table[row, :count].tolist() == table + [0] * (count - len(table))
        assert contexts[padded:].tolist() == [70, 1]
        assert inputs.page_table[padded, :5].tolist() == pages[real, :5].tolist()
        assert inputs.page_table[padded + 1, 0] == 0
        assert (inputs.token_ids[padded * width :] == -7).all(), "prompts' ids are not its own"
        shifted = ints([bound - PAGE for bound in bounds])  # The row's first page is let go.
        known = Known(header, slots, shifted, least * 0, ints(bounds), pages)
        unpack_columns(known, tables, PAGE, width, inputs, kept_bounds)
        assert contexts[0] == lengths[0] + width - PAGE == width
        assert inputs.stores[0] == int(pages[0, 0]) * PAGE


def check_accepting() -> None:
    """Tables and results as `engine.speculation` makes them."""
    generator = torch.Generator().manual_seed(3)
    for width, prompts, limited in product((1, 2, 4, 8), (0, 2), (False, True)):
        tables, want = tables_of(width), tables_of(width)
        slots, decodes = ints([3, 8, 0, 6, 2, 7, 5][: 5 + prompts]), 5
        own = slots[:decodes].long()
        bounds = tables.length[own] + ints([width, 1, 0, width - 1, width])
        ids = torch.cat((tables.next[own, None], tables.drafts[own, : width - 1]), 1)
        drawn = torch.randint(0, VOCAB, (decodes, width), generator=generator).int().to(DEVICE)
        right = torch.rand((decodes, width - 1), generator=generator).to(DEVICE) < 0.8
        drawn[:, :-1] = torch.where(right, ids[:, 1:], drawn[:, :-1])
        first = torch.randint(0, VOCAB, (prompts,), generator=generator).int().to(DEVICE)
        every = torch.cat((drawn.flatten(), first))
        finite = torch.ones_like(every)
        finite[[0, width - 1 + width]] = 0
        allowed = ints([width, 1, width, 2, 1, 1, 1][: len(slots)]) if limited else None
        valid = (1 + tables.ready[own]).clamp(max=width).minimum(bounds - tables.length[own])
        drafted = (valid - 1).clamp(min=0)
        if allowed is not None:
            valid = valid.minimum(allowed[:decodes])
        valid = valid.clamp(min=0).long()
        given = (ids.flatten(), torch.stack((every, finite)), slots, bounds, width, tables)
        result = read_result(accept(*given, allowed=allowed))
        counts = accepted(ids.long(), drawn.long(), valid)
        columns = Columns(own, want.length[own].long(), ids.long(), valid)
        want.advance(columns, drawn.long(), counts)
        want.write(slots[decodes:].long(), first.long())
        for name in ("length", "next", "ready", "history"):
            assert torch.equal(getattr(tables, name), getattr(want, name)), name
        assert result.counts.tolist() == counts.tolist() + [1] * prompts
        assert result.drafted.tolist() == drafted.tolist() + [0] * prompts
        assert torch.equal(result.tokens[:decodes], drawn)
        assert torch.equal(result.tokens[decodes:, 0], first)
        bad = [int(counts[0]) == 0, int(counts[1]) < width]
        assert result.finite.tolist()[:2] == [int(each) for each in bad]
        assert result.finite.tolist()[2:] == [1] * (len(slots) - 2)


def check_synthetic_acceptance() -> None:
    """Accepts at the rate that is asked for, alike each time, and emits the drafts."""
    counts = []
    for seed in range(40):
        tables = tables_of(seed)
        tables.ready.fill_(3)
        slots = ints(range(SLOTS))
        ids = torch.cat((tables.next[:SLOTS, None], tables.drafts[:SLOTS, :3]), 1)
        drawn = torch.full((SLOTS * 4,), VOCAB, dtype=torch.int32, device=DEVICE)
        both = torch.stack((drawn, torch.ones_like(drawn)))
        given = (ids.flatten(), both, slots, tables.length[:SLOTS] + 4, 4)
        again = tables_of(seed)
        again.ready.fill_(3)
        result = accept(*given, tables, synthetic=0.8)
        assert torch.equal(result, accept(*given, again, synthetic=0.8))
        tokens, accepted, *_ = read_result(result)
        for row, count in enumerate(accepted.tolist()):
            assert tokens[row, : count - 1].tolist() == ids[row, 1:count].tolist()
            assert tokens[row, count - 1] == VOCAB
            counts.append(count)
    shares = [sum(count > least for count in counts) / len(counts) for least in (1, 2, 3)]
    assert all(abs(share - 0.8**n) < 0.08 for n, share in enumerate(shares, 1)), shares


def drafts_of(tokens: list[int]) -> list[int]:
    """By the rule, one place after the other."""
    last, best, place = len(tokens) - 1, 0, -1
    for at in range(last):
        match = 0
        while match < min(LONGEST, at + 1) and tokens[at - match] == tokens[last - match]:
            match += 1
        if match >= max(best, 1):
            best, place = match, at
    if best < SHORTEST:
        return []
    return [tokens[place + 1 + n % (last - place)] for n in range(min(best, MOST))]


def check_the_suffix_drafter() -> None:
    for seed, letters in enumerate((2, 3, 8, VOCAB)):
        tables = tables_of(seed, letters)
        tables.history[4, :50] = 7  # A period of one.
        tables.history[5, 61:101] = tables.history[5, 11:51]  # More than the longest match.
        slots = ints(range(SLOTS))
        draft_suffix(slots, tables)
        for slot, length in enumerate(LENGTHS):
            want = drafts_of(tables.history[slot, : length + 1].tolist())
            assert tables.drafts[slot, : len(want)].tolist() == want
            assert tables.ready[slot] == len(want)


CHECKS = [found for name, found in sorted(globals().items()) if name.startswith("check_")]

if __name__ == "__main__":
    for check in CHECKS:
        check()
        print(check.__name__)
