"""The plots of `baton bench`: what they say can be read."""

from __future__ import annotations

import pytest
from test_bench_figures import outcome

from console.loadgen.report.charts import _figure, _limit, _share, _under_way


@pytest.mark.parametrize("limit_ms", [0.0, 10.0, 490.0, 510.0, 1_500.0, 1_999.0, 30_000.0])
def test_a_service_level_is_told_within_the_plot(limit_ms: float) -> None:
    figure, (axes,) = _figure(1, 1, 3.6)
    _share(axes, [n / 1000 for n in range(1000)], "blue", "")
    axes.set_xlim(left=0)
    _limit(axes, limit_ms)
    figure.canvas.draw()
    (text,) = axes.texts
    said, frame = text.get_window_extent(), axes.get_window_extent()
    assert frame.x0 <= said.x0 < said.x1 <= frame.x1
    assert text.get_text().startswith(f"SLO {limit_ms:g}")
    is_far = limit_ms > 2_100
    assert text.get_text().endswith("\N{RIGHTWARDS ARROW}") == is_far
    lines = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert len(lines) == (0 if is_far else 1)
    assert all(axes.get_xlim()[0] <= limit_ms <= axes.get_xlim()[1] for _ in lines)


def test_a_request_is_under_way_until_it_ends_however_it_ends() -> None:
    outcomes = [
        outcome(0, 0.0, [1.0, 2.0]),
        outcome(1, 0.5, [], status="QUEUE_TIMEOUT", ended_s=60.0),
        outcome(2, 3.0, [4.0], status="TIMEOUT", ended_s=50.0),
    ]
    assert _under_way(outcomes) == ([0.0, 0.5, 2.0, 3.0, 50.0, 60.0], [1, 2, 1, 2, 1, 0])
