"""Prefill and decode workers on GPUs: several to one, and what is left of one that is killed."""

from __future__ import annotations

import math
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, make_cluster, spawn
from streams import Reading, bring_back, read

from baton.errors import UnavailableError

pytestmark = pytest.mark.gpu

SHAPE = Path(__file__).parents[2] / "bench" / "shapes" / "llama-8b"
PROMPT, OUTPUT, STREAMS = 4000, 200, 24
KV_GIB = 20
FREED_MIB = 2048
"""What a GPU may show as used once its worker is gone."""


def used_mib() -> list[int]:
    """Memory in use, by GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    out = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    return [int(line) for line in out.split()]


def on_gpus(logs: Path, **options) -> Cluster:
    """Not started."""
    usual = {"load_format": "dummy", "num_pages": 0, "max_step_tokens": 2048, "max_sequences": 64}
    return make_cluster(SHAPE, logs, device="cuda", launch=spawn, **{**usual, **options})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if len(used_mib()) < 2:
        pytest.skip("needs two GPUs")
    cluster = on_gpus(tmp_path_factory.mktemp("logs"), kv_memory_gib=KV_GIB, resume_grace_s=60)
    cluster.start_all()
    yield cluster
    assert cluster.stop().keys() == cluster.workers.keys() | {"router"}


def crowd(cluster: Cluster, client, seed: int) -> list[Reading]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(5, 40_000, (STREAMS, PROMPT)).tolist()
    return [read(client, prompt, max_tokens=OUTPUT, temperature=0.0) for prompt in prompts]


def check_whole(readings: list[Reading]) -> None:
    for reading in readings:
        reading.end()
        assert reading.error is None, reading.error
        assert len(reading.tokens()) == OUTPUT


def check_typed(readings: list[Reading]) -> int:
    """Whole, or refused before their first token because nobody was left; how many were whole."""
    for reading in readings:
        reading.end()
        if reading.error is None:
            assert len(reading.tokens()) == OUTPUT
        else:
            assert isinstance(reading.error, UnavailableError), reading.error
            assert reading.num_tokens == 0
    return sum(reading.error is None for reading in readings)


def until(condition, timeout_s: float) -> float:
    """Seconds that it took; infinite where it took too long."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            return math.inf
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.parametrize(("victim", "gpu"), [("prefill", 0), ("decode", 1)])
def test_kill_9_with_transfers_in_flight(cluster, victim, gpu):
    """Its memory is free at once, streams that had begun are whole, the survivor loses no page, and
    the dead one comes back."""
    name = next(worker for worker in cluster.workers if worker.startswith(victim))
    with cluster.client() as client:
        check_whole(crowd(cluster, client, seed=1))
        cluster.check_baseline()
        before = used_mib()
        assert min(before[:2]) > KV_GIB * 1024
        readings = crowd(cluster, client, seed=2)
        readings[0].until(1)
        cluster.kill(name)
        freed_s = until(lambda: used_mib()[gpu] < FREED_MIB, 8.0)
        after = used_mib()
        assert freed_s < 5, f"{after} MiB: a peer holds on to the dead worker's memory"
        survivor = next(other for other in cluster.workers if other != name)
        assert cluster.processes[survivor].poll() is None
        cluster.start(name)
        whole = check_typed(readings)
        bring_back(cluster)
        check_whole(crowd(cluster, client, seed=3))
        cluster.check_baseline()
    gap_s = max(reading.longest_gap_s for reading in readings)
    print(f"\n{name}: {whole} of {STREAMS} whole, longest gap {gap_s:.1f} s;", end=" ")
    print(f"MiB before {before}, after {after}, freed after {freed_s:.2f} s")


@pytest.mark.parametrize(
    ("roles", "gib"),
    [
        ({"prefill": 2, "decode": 1}, {"prefill-0": 8, "prefill-1": 4, "decode-0": 12}),
        ({"prefill": 1, "decode": 2}, {"prefill-0": 4, "decode-0": 8, "decode-1": 12}),
    ],
)
def test_several_to_one_with_pools_of_different_sizes(tmp_path, roles, gib):
    """Where there are fewer GPUs than workers, they share."""
    own = {name: {"kv_memory_gib": memory} for name, memory in gib.items()}
    with on_gpus(tmp_path / "logs", own=own, **roles).started() as cluster:
        assert sorted(gib, key=gib.__getitem__) == sorted(gib, key=cluster.baselines.__getitem__)
        with cluster.client() as client:
            check_whole(crowd(cluster, client, seed=4))
        cluster.check_baseline()
        for name in gib:
            outcome = "sent" if name.startswith("prefill") else "received"
            assert cluster.metric("baton_kv_transfers_total", name, outcome=outcome) > 0, name
            assert cluster.metric("baton_kv_stale_notifications_total", name) == 0
