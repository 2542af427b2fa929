"""One cluster for all of the package: a test leaves it as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster, running
from tiny_models import write_tiny_model


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(
        write_tiny_model(tmp_path_factory.mktemp("model"), max_positions=4096),
        tmp_path_factory.mktemp("logs"),
        prefill=2,
        decode=2,
        num_pages=1100,
        resume_grace_s=3,
        step_timeout_s=8,  # twice that ends a stopped process when it wakes
        failpoints="live",
        poison_freed_pages=True,
    ) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_damaged(cluster: Cluster) -> Iterator[None]:
    """No write has landed in a page that was free: the pattern there is whole. And nothing is left
    armed for the next test."""
    yield
    cluster.disarm()
    for name in cluster.workers:
        if cluster.processes[name].poll() is None:
            assert cluster.metric("baton_kv_damaged_pages_total", name) == 0
