"""Figures of several invocations are summed up sample by sample."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from chaos.figures import Figures


def test_what_was_written_is_summed_up(tmp_path: Path) -> None:
    one = Figures(runs=2, faults=Counter(kill=3), stalls_s=[0.1, 0.3], detected_s={"killed": [1.0]})
    other = Figures(
        runs=1, faults=Counter(kill=1, freeze=1), stalls_s=[0.2], detected_s={"killed": [3.0]}
    )
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    one.write(files[0], seed=1)
    other.write(files[1], seed=2)
    summary = Figures.read(files).summary()
    assert summary["runs"] == 3
    assert summary["faults"] == {"kill": 4, "freeze": 1}
    assert summary["stall_ms"] == {"count": 3, "p50": 200.0, "p99": 300.0, "max": 300.0}
    assert summary["detected_ms"]["killed"]["max"] == 3000.0
