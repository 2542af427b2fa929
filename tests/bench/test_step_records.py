"""Where the time of a case goes, by the steps of each worker."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from expert_groups_kit import grouped
from tiny_families import EXPERTS
from tiny_models import write_tiny_model

from bench.engine import Case, run_case
from bench.step_records import StepRecords, spent


def test_all_the_time_of_a_case_is_divided_among_its_parts(tmp_path):
    """Two workers of a group: one alone, then both."""
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **EXPERTS["qwen3_moe"])
    case, options = Case(6, 40, 1, 0, 0, 0), {"prefix_cache": False, "max_step_tokens": 80}
    with grouped(path, tmp_path / "group", 2, **options) as engines:
        records = [StepRecords(engine) for engine in engines]
        began_s = time.monotonic()
        run_case(engines[1], case, 1)
        alone = spent(records[1].taken(), began_s, time.monotonic())
        assert spent(records[0].taken(), began_s, time.monotonic()) is None
        began_s = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda engine: run_case(engine, case, 2), engines))
        over_s = time.monotonic()
        both = [record.taken() for record in records]
    assert alone is not None
    assert alone.alone == alone.steps >= 3
    assert any(step["workers"] == 2 for steps in both for step in steps)
    for steps in both:
        assert sum(step["prompt_tokens"] for step in steps) == 6 * 40
        found = spent(steps, began_s, over_s)
        assert found is not None
        parts = found.before_s, found.steps_s, found.turns_s, found.between_s, found.after_s
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(over_s - began_s)
        assert f"{found.steps} steps" in found.line()
