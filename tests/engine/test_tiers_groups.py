"""Resume points of several groups come from host memory whole, or not at all."""

from __future__ import annotations

import random

import pytest
from scheduler_bench import Bench, prompt_of

from engine.tiers.grouped import GroupedTiers

PAGE = 4
WINDOWS = [(5, 41), (17, 57)]


def bench_of(seed=None, host_slots=300, num_pages=61) -> Bench:
    return Bench(
        num_pages=num_pages,
        page_size=PAGE,
        slots=3,
        windows=WINDOWS,
        host_slots=host_slots,
        lane_random=None if seed is None else random.Random(seed),
    )


def talk(bench: Bench, prompts: list[list[int]]) -> list[list[int]]:
    """A turn of each conversation. Returns the prompts of the next."""
    said = []
    for first in range(0, len(prompts), 2):
        asked = [bench.submit(prompt, 6) for prompt in prompts[first : first + 2]]
        bench.run()
        for request_id in asked:
            bench.check_output(request_id)
            bench.scheduler.check_invariants()
        pairs = zip(prompts[first : first + 2], asked, strict=True)
        said += [[*prompt, *bench.outputs[asked_by, 0], 9] for prompt, asked_by in pairs]
    return said


def prompts_of(seed: int, count: int = 10) -> list[list[int]]:
    rng = random.Random(seed)
    return [prompt_of(rng, rng.randrange(20, 60), shared=0) for _ in range(count)]


def loaded(bench: Bench) -> int:
    return bench.scheduler.tiers.load().loaded_tokens["host"]


def test_prompts_go_on_behind_pages_that_came_back():
    came = 0
    for seed in range(4):
        bench, prompts = bench_of(), prompts_of(seed)
        for _ in range(3):
            prompts = talk(bench, prompts)
        came += loaded(bench)
        bench.check_baseline()
    assert came > 300


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))]
)
def test_copies_that_fail_or_are_late_never_leave_half_a_resume_point(seed):
    """The fake device answers by the KV that it reads: from a wrong or a missing page, wrongly."""
    bench, prompts = (
        bench_of(seed, host_slots=random.Random(seed).choice([40, 300])),
        prompts_of(seed),
    )
    for _ in range(4):
        prompts = talk(bench, prompts)
    bench.check_baseline()


def test_what_a_window_lost_is_computed(monkeypatch):
    """All pages of group 0 are in host memory. Without those of a window nothing is loaded."""
    bench, prompts = bench_of(), prompts_of(1)
    prompts = talk(bench, prompts)
    tiers = bench.scheduler.tiers
    assert isinstance(tiers, GroupedTiers)
    before = loaded(bench)
    for other in tiers._others:
        monkeypatch.setattr(other, "has", lambda key: False)
    talk(bench, prompts[:2])
    assert loaded(bench) == before
    monkeypatch.undo()
    talk(bench, prompts[2:4])
    assert loaded(bench) > before
    bench.check_baseline()
