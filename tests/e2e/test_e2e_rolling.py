"""Everything is started anew under load, and nobody notices: all answers come, and are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import make_cluster
from rolling import GROWING, go_through, load_on, start
from tiny_models import write_tiny_model


@pytest.mark.parametrize(
    ("pools", "first", "steps"),
    [
        pytest.param(
            {"decode": 2},
            ("router", "prefill-0", "decode-0"),
            ("+decode-1", "-decode-0"),
            id="a decode worker for another",
        ),
        pytest.param(
            {"prefill": 2, "decode": 2, "routers": 2},
            ("router-0", "router-1", "prefill-0", "decode-0"),
            GROWING,
            id="everything",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_cluster_grows_and_shrinks_under_load(
    pools: dict[str, int], first: tuple[str, ...], steps: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model", max_positions=4096)
    cluster = make_cluster(model, tmp_path / "logs", poison_freed_pages=True, **pools)
    try:
        start(cluster, *first)
        with load_on(cluster, busy=0.6, clients=1 + (len(first) > 3)) as answered:
            go_through(cluster, answered, steps)
        running = [name for name in cluster.workers if cluster.processes[name].poll() is None]
        for name in running:
            assert cluster.metric("baton_kv_damaged_pages_total", name) == 0
        assert cluster.metric("baton_kv_transfers_total", running[-1]) > 0
    finally:
        codes = cluster.stop()
    assert set(codes.values()) == {0}
