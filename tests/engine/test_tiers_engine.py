"""Whole engines with a small pool and a host tier give the tokens of a large pool."""

from __future__ import annotations

import os
import resource
from types import MappingProxyType

import numpy as np
import pytest
import torch
from engine_kit import build, check_baseline, finish, running, submit

from engine.config import EngineConfig
from engine.engine import Engine, EngineError
from engine.tiers.arena import HostArena
from engine.tiers.lanes import measure
from engine.tiers.movers import CpuMover
from engine.tiers.touching import HostMemoryError
from faults import failpoints

MIB = 1 << 20
SMALL = MappingProxyType({"num_pages": 41, "max_sequences": 4, "kv_host_bytes": 24 * MIB})


def conversations(count: int, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 384, int(rng.integers(20, 70))).tolist() for _ in range(count)]


def talk(engine: Engine, prompts: list[list[int]], rounds: int) -> list[list[list[int]]]:
    """Every conversation takes a turn, then every one the next. Two run at a time."""
    said = [list(prompt) for prompt in prompts]
    answers: list[list[list[int]]] = [[] for _ in prompts]
    for _ in range(rounds):
        for first in range(0, len(said), 2):
            runs = [submit(engine, prompt, 5) for prompt in said[first : first + 2]]
            finish(*runs)
            for i, run in enumerate(runs, first):
                answers[i].append(run.tokens[0])
                said[i] += [*run.tokens[0], 7, i % 300 + 1]
    return answers


@pytest.mark.parametrize(
    ("count", "rounds", "precision", "ranks"),
    [
        (24, 2, "auto", 1),
        pytest.param(24, 2, "auto", 2, marks=pytest.mark.slow),
        pytest.param(200, 3, "auto", 1, marks=pytest.mark.matrix),
        pytest.param(200, 2, "fp8", 1, marks=pytest.mark.matrix),
        pytest.param(200, 2, "fp8", 2, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.usefixtures("no_hurry")
def test_a_small_pool_over_a_host_tier_speaks_as_a_large_one(
    tiny_path, count, rounds, precision, ranks
):
    prompts = conversations(count)
    with running(tiny_path, num_pages=200 * 8, kv_cache_dtype=precision) as large:
        want = talk(large, prompts, rounds)
    with running(tiny_path, **SMALL, kv_cache_dtype=precision, tp=ranks) as small:
        assert talk(small, prompts, rounds) == want
        counts = small.load().tiers
        assert counts.loaded_tokens["host"] > count * 16 * (rounds - 1)
        assert counts.late == {}


@pytest.mark.parametrize(
    ("lane", "action"),
    [
        ("load", "sleep:0.3"),
        pytest.param("load", "raise", marks=pytest.mark.matrix),
        pytest.param("save", "sleep:0.3", marks=pytest.mark.matrix),
        pytest.param("save", "raise", marks=pytest.mark.matrix),
    ],
)
def test_copies_that_fail_or_are_late_cost_time_alone(tiny_path, lane, action):
    prompts = conversations(24)
    with running(tiny_path, num_pages=800) as large:
        want = talk(large, prompts, 2)
    small = build(tiny_path, **SMALL)
    failpoints.arm(f"tiers.{lane}={action}@3")
    try:
        assert talk(small, prompts, 2) == want
        assert small.load().tiers.late[lane] > 0
        check_baseline(small)
    finally:
        failpoints.arm("")
        small.stop()


@pytest.mark.slow
@pytest.mark.parametrize("action", ["raise", "sleep:0.3"])
def test_a_part_that_fails_or_is_late_is_a_miss_for_all_ranks(tiny_path, action, monkeypatch):
    prompts = conversations(24)
    with running(tiny_path, num_pages=800) as large:
        want = talk(large, prompts, 2)
    monkeypatch.setenv("BATON_DEBUG_FAILPOINTS", f"rank.copy={action}~1@7")
    with running(tiny_path, **SMALL, tp=2) as small:  # Four copies measure its rates.
        assert talk(small, prompts, 2) == want
        assert sum(small.load().tiers.late.values()) > 0


def test_more_memory_than_can_be_touched_is_refused_with_both_sizes(monkeypatch):
    """What a process may write stands for what a container may hold."""
    with pytest.raises(HostMemoryError, match=r"wanted for KV pages, this machine has \d"):
        HostArena(1 << 60, 4096, torch.device("cpu"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300 * MIB, limits[1]))
    try:
        with pytest.raises(HostMemoryError, match=r"^0\.50 GiB .*could be touched: 0\.25$"):
            HostArena(512 * MIB, 4096, torch.device("cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_the_engine_says_of_a_host_tier_that_cannot_be(tiny_path):
    config = EngineConfig(model=str(tiny_path), num_pages=40, kv_host_bytes=5000)
    with pytest.raises(EngineError, match="at least 2"):
        Engine.build(config)
    config = EngineConfig(model=str(tiny_path), num_pages=40, kv_host_bytes=MIB, prefix_cache=False)
    with pytest.raises(EngineError, match="prefix_cache"):
        Engine.build(config)


@pytest.mark.parametrize("page_bytes", [4096, 5000])
def test_pages_come_back_as_they_were(page_bytes):
    """Any pages to any slots, in any order; a slot is padded."""
    arena = HostArena(MIB, page_bytes, torch.device("cpu"))
    assert arena.slot_bytes % 4096 == 0
    pages = torch.randint(0, 256, (50, page_bytes), dtype=torch.uint8)
    before = pages.clone()
    mover = CpuMover(pages, arena.slots)
    assert min(measure(mover, 50, arena.num_slots, page_bytes)) > 0
    assert torch.equal(pages, before)
    rng = np.random.default_rng(0)
    some = rng.permutation(50)[:30].astype(np.int32)
    slots = rng.permutation(arena.num_slots)[:30].astype(np.int32)
    mover.save(some, slots)
    pages.zero_()
    mover.load(slots, some)
    assert torch.equal(pages[some], before[some])
    assert os.fstat(arena.fd).st_size == arena.num_slots * arena.slot_bytes
    arena.close()
