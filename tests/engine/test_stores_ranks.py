"""Stores of a worker with several ranks: each part is an object, and all count together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_kit import running
from test_stores import OBJECT, Ends, start  # noqa: F401
from test_tiers_engine import talk
from test_tiers_stores import (  # noqa: F401
    COUNT,
    SMALL,
    conversations,
    path,
    secret,
    speaks,
    want,
)
from waiting import wait_until

from engine.tiers.stores.messages import LOAD, LOOKUP, STORE

HALVES = ((0, 4), (4, 8))
KEYS = [bytes([i]) * 32 for i in range(6)]


def files_of(folder: Path, key: bytes) -> list[Path]:
    """By rank."""
    return sorted(folder.glob(f"??/*{key.hex()}"))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def tear(file: Path) -> None:
    size = file.stat().st_size
    os.truncate(file, size // 2)
    os.truncate(file, size)


def test_one_part_that_is_not_whole_is_a_miss_for_all(start, tmp_path, secret):  # noqa: F811
    """Missing, torn, flipped, and the part of another rank under this rank's name."""
    ends: Ends = start(f"dir:{tmp_path}/kv?gib=1", secret, heads=HALVES)
    for arena in ends.arenas:
        arena.slots.random_(0, 256)
    assert ends.answer(STORE, *KEYS[:5]).good == [True] * 5
    parts = [files_of(tmp_path / "kv", key) for key in KEYS[:5]]
    names = [[part.name.split(".")[1] for part in files] for files in parts]
    assert names == [["h0-4", "h4-8"]] * 5
    parts[0][1].unlink()
    tear(parts[1][1])
    flip(parts[2][0])
    parts[3][1].write_bytes(parts[3][0].read_bytes())
    assert ends.answer(LOOKUP, *KEYS).good == [False, True, True, True, True, False]
    before = [arena.slots.clone() for arena in ends.arenas]
    answer = ends.answer(LOAD, *KEYS[:5])
    assert answer.good == [False] * 4 + [True]
    assert answer.damaged == 3
    for arena, slots in zip(ends.arenas, before, strict=True):
        assert torch.equal(arena.slots[17:21], slots[17:21])
    assert ends.answer(LOOKUP, *KEYS[:5]).good == [False] * 4 + [True]
    assert ends.answer(STORE, *KEYS[:5]).good == [True] * 5, "a missing part is written again"
    assert ends.answer(LOAD, *KEYS[:5]).good == [True] * 5


def test_each_rank_gets_its_own_part_into_its_own_slots(start, tmp_path):  # noqa: F811
    ends: Ends = start(f"disk:{tmp_path}?gib=0.01", heads=HALVES)
    assert ends.process.object_bytes == 2 * OBJECT
    for arena in ends.arenas:
        arena.slots.random_(0, 256)
    before = [arena.slots.clone() for arena in ends.arenas]
    assert ends.answer(STORE, *KEYS[:2]).good == [True, True]
    assert ends.answer(LOAD, KEYS[1], KEYS[2], first_slot=20).good == [True, False]
    for arena, slots in zip(ends.arenas, before, strict=True):
        assert torch.equal(arena.slots[20:24], slots[5:9])
        assert torch.equal(arena.slots[:20], slots[:20])
        assert torch.equal(arena.slots[24:], slots[24:])


def test_ranks_with_the_same_heads_share_a_part(start, tmp_path, secret):  # noqa: F811
    """Four ranks and two KV heads."""
    heads = ((0, 1), (0, 1), (1, 2), (1, 2))
    ends: Ends = start(f"dir:{tmp_path}/kv?gib=1", secret, heads=heads)
    for arena, other in (ends.arenas[:2], ends.arenas[2:]):
        arena.slots.random_(0, 256)
        other.slots.copy_(arena.slots)
    assert ends.answer(STORE, KEYS[0]).good == [True]
    files = files_of(tmp_path / "kv", KEYS[0])
    assert len(files) == 2
    assert ends.answer(LOAD, KEYS[0], first_slot=20).good == [True]
    for arena in ends.arenas:
        assert torch.equal(arena.slots[20:24], arena.slots[1:5])
    flip(files[1])
    answer = ends.answer(LOAD, KEYS[0])
    assert (answer.good, answer.damaged) == ([False], 1)


@pytest.mark.parametrize("heads", [((0, 8),), ((0, 2), (2, 4), (4, 6), (6, 8))])
def test_another_number_of_ranks_misses(start, tmp_path, secret, heads):  # noqa: F811
    address = f"dir:{tmp_path}/kv?gib=1"
    two: Ends = start(address, secret, heads=HALVES)
    assert two.answer(STORE, KEYS[0]).good == [True]
    other: Ends = start(address, secret, heads=heads)
    assert other.answer(LOOKUP, KEYS[0]).good == [False]
    assert other.answer(LOAD, KEYS[0]).good == [False]
    assert other.answer(STORE, KEYS[0]).good == [True]
    assert two.answer(LOAD, KEYS[0]).good == [True]


def of_rank_1(folder: Path) -> list[Path]:
    found = sorted(folder.glob("??/*.h1-2.*"))
    assert found
    return found


def put_in_its_place(file: Path) -> None:
    """Rank 0's part under rank 1's name."""
    file.write_bytes((file.parent / file.name.replace(".h1-2.", ".h0-1.")).read_bytes())


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("spoil", "damaged"), [(Path.unlink, False), (tear, True), (put_in_its_place, True)]
)
def test_engines_of_two_ranks_compute_what_one_part_lacks(
    path,  # noqa: F811
    want,  # noqa: F811
    tmp_path,
    secret,  # noqa: F811
    spoil: Callable[[Path], None],
    damaged: bool,
):
    options = {**SMALL, "tp": 2, "kv_secret_file": secret}
    stores = (f"dir:{tmp_path}/kv?gib=0.1",)
    with running(path, **options, kv_stores=stores) as engine:
        speaks(engine, want)
    for file in of_rank_1(tmp_path / "kv"):
        spoil(file)
    with running(path, **options, kv_stores=stores) as engine:
        assert talk(engine, conversations(COUNT), 1) == [answers[:1] for answers in want]
        tiers = engine.load().tiers
        assert tiers.loaded_tokens["dir"] == 0
        assert (tiers.late["dir damaged"] > 0) == damaged
        wait_until(lambda: engine.load().tiers.held_slots == 0)


@pytest.mark.matrix
def test_engines_of_other_numbers_of_ranks_share_no_object(
    path,  # noqa: F811
    want,  # noqa: F811
    tmp_path,
    secret,  # noqa: F811
):
    stores = (f"dir:{tmp_path}/kv?gib=0.1",)
    for ranks in (1, 2):
        with running(path, **SMALL, tp=ranks, kv_secret_file=secret, kv_stores=stores) as engine:
            assert talk(engine, conversations(COUNT), 1) == [answers[:1] for answers in want]
            assert engine.load().tiers.loaded_tokens["dir"] == 0
