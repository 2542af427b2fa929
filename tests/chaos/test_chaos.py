"""Twenty runs with faults; `make chaos RUNS=500 SEED=...` makes more of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from chaos.harness import harness, run_many
from chaos.plan import plan_run

SEED = 3
RUNS = range(20)


def test_a_seed_makes_the_same_run_every_time() -> None:
    assert plan_run(7, 3) == plan_run(7, 3)
    assert plan_run(7, 3) != plan_run(7, 4)
    assert plan_run(7, 3) != plan_run(8, 3)


@pytest.mark.timeout(600)
def test_no_fault_makes_an_answer_wrong_or_leaves_anything_behind(tmp_path: Path) -> None:
    with harness(workspace=tmp_path) as made:
        outcomes = run_many(made, SEED, RUNS, print, math.inf)
        made.close_cluster()
    failed = [outcome.report() for outcome in outcomes if not outcome.is_good]
    assert not failed, "\n".join(failed)
    figures = made.figures
    assert figures.runs == len(RUNS)
    assert figures.tokens_compared > 1000
    assert figures.faults.total() >= 10, "hardly anything went wrong"
    assert figures.detected_s.get("killed"), "nobody was seen to die"
