"""Workers of two ranks beside others: the same tokens, no hand-off, and no rank outlives its
worker."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from cluster import Cluster, make_cluster
from references import references
from tiny_models import write_tiny_model
from waiting import wait_until

from baton.errors import BatonError
from telemetry.names import Metric
from worker.watchdog import EXIT_DEVICE_LOST

OPTIONS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
GONE_S = 5.0


def ranks_of(cluster: Cluster, name: str) -> list[psutil.Process]:
    children = psutil.Process(cluster.processes[name].pid).children()
    return [child for child in children if "engine.ranks" in child.cmdline()]


def check(cluster: Cluster, model: Path) -> None:
    with cluster.client() as client:
        for length in (5, 40, 200):
            prompt = np.random.default_rng(length).integers(1, 384, length).tolist()
            answer = client.generate(token_ids=prompt, **OPTIONS)
            assert list(answer.token_ids) == references(model)(prompt, 12, past_end=True).tokens


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_of_two_ranks_is_never_paired_and_ends_with_a_rank(tmp_path):
    """A prefill worker of one rank has the same fingerprint, and hands nothing to it."""
    model = write_tiny_model(tmp_path / "model")
    own = {"both-0": {"tp": 2}}
    cluster = make_cluster(model, tmp_path / "logs", decode=0, both=1, own=own)
    try:
        cluster.start_all()
        check(cluster, model)
        assert cluster.metric(Metric.PREFILL_TOKENS + "_total", "prefill-0") == 0
        assert "peer open" not in cluster.logged()
        cluster.check_baseline()
        (rank,) = ranks_of(cluster, "both-0")
        rank.send_signal(signal.SIGKILL)
        assert cluster.wait_gone("both-0") == EXIT_DEVICE_LOST
        assert "rank 1 was killed by SIGKILL" in cluster.logged()
        with cluster.client() as client, pytest.raises(BatonError):
            client.generate(token_ids=[1, 2, 3], **OPTIONS)
        cluster.start("both-0")
        cluster.wait_attached("both-0")
        check(cluster, model)
        (rank,) = ranks_of(cluster, "both-0")
        cluster.kill("both-0")
        wait_until(lambda: not psutil.pid_exists(rank.pid), GONE_S)
    finally:
        cluster.stop()
