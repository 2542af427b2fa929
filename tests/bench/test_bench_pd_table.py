"""Where uneven gaps come from: histograms of a row's processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.pd_table import _buckets, add, counted, ticks

PAGE = {
    'baton_engine_step_seconds_bucket{le="0.005"}': 50.0,
    'baton_engine_step_seconds_bucket{le="0.01"}': 98.0,
    'baton_engine_step_seconds_bucket{le="+Inf"}': 100.0,
    'baton_inter_token_seconds_bucket{model="a",le="0.005"}': 1.0,
    'baton_inter_token_seconds_bucket{model="b",le="0.005"}': 2.0,
    'baton_inter_token_seconds_bucket{model="a",le="+Inf"}': 3.0,
}


def test_buckets_of_all_labels_are_added_up() -> None:
    found = _buckets(PAGE)
    assert found["gap<=0.005"] == 3.0
    assert found["step<=+Inf"] == 100.0


def test_a_line_for_each_process_that_has_any() -> None:
    row = {
        "cluster": {"settings": {}},
        "workload": {"prompt_tokens": 1, "output_tokens": 2, "rate": 3.0},
        "runs": [{"wall_s": 10.0}],
        "processes": {"decode-0": {"cpu_s": 5.0, **_buckets(PAGE)}, "router-0": {"cpu_s": 1.0}},
    }
    (_, name, cpu, step, lag, _gap), *others = list(ticks([row]))[1:]
    assert (name, cpu, lag, others) == ("decode-0", "50%", "", [])
    # Half are up to the first bound; the last hundredth is beyond the last one.
    assert [float(each) for each in step.split(" / ")] == pytest.approx([5.0, 10.0])


def test_a_row_is_kept_though_processes_have_died(tmp_path: Path) -> None:
    assert counted(["decode-0=127.0.0.1:1"]) == {}, "nobody listens there"
    row, rows = tmp_path / "row.json", tmp_path / "rows.jsonl"
    row.write_text("{}")
    (tmp_path / "requests.jsonl").write_text("")
    before = {"gone": {"cpu_s": 9.0}, "anew": {"cpu_s": 9.0}, "same": {"cpu_s": 9.0}}
    now = {"anew": {"cpu_s": 2.0}, "same": {"cpu_s": 10.0}, "new": {"cpu_s": 3.0}}
    add(row, rows, before, now)
    found = {
        name: each["cpu_s"] for name, each in json.loads(rows.read_text())["processes"].items()
    }
    assert found == {"anew": 2.0, "same": 1.0, "new": 3.0}
