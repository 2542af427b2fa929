"""Processes of the last release beside those of this tree: under load no request is lost.

The release is the commit that set the version. Its tree runs with this environment's packages.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Process, make_cluster, spawn
from nursery import fork
from rolling import GROWING, go_through, load_on, start, wait_for_answers
from tiny_families import DENSE
from tiny_models import write_tiny_model

from baton.version import __version__

ROOT = Path(__file__).resolve().parents[2]
STORED = "-stored"
WINDOWS = DENSE["gemma3"] | {"sliding_window": 24}
"""The release keeps all pages of such a model, in one group: no pages go between the two."""

pytestmark = pytest.mark.slow


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release's source tree."""
    try:
        is_cut = git("rev-parse", "--is-shallow-repository").strip() == b"true"
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout: the release's tree is not here")
    if is_cut:
        pytest.skip("this checkout has no history: the release's tree is not here")
    commit = git("log", "-1", "--format=%H", "--", "baton/version.py").decode().strip()
    folder = tmp_path_factory.mktemp("release")
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        archive.extractall(folder, filter="data")
    with (folder / "baton/version.py").open("a") as file:
        file.write(f"\n__version__ += {STORED!r}\n")  # shows whose code a process runs
    return folder


def launch(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Those of the release start as users start them; the nursery forks this tree's."""
    return (spawn if "PYTHONPATH" in environment else fork)(argv, environment, log)


def a_cluster(
    tmp_path: Path, old: Path, names: Sequence[str], shape: Mapping[str, Any] = {}, **options: int
) -> Cluster:
    """A cluster of which these processes are the release's."""
    model = write_tiny_model(tmp_path / "model", max_positions=4096, **shape)
    cluster = make_cluster(model, tmp_path / "logs", launch=launch, **options)
    for name in names:
        cluster.own = {**cluster.own, name: {"PYTHONPATH": str(old)}}
    return cluster


def release_of(cluster: Cluster, name: str) -> str:
    """What the process says that it runs."""
    if name in cluster.workers:
        return cluster.identity(name).release
    with urllib.request.urlopen(f"http://{cluster.plan.http_address}/version") as answer:
        return json.load(answer)["version"]


@pytest.mark.parametrize("old", [["router"], ["prefill-0", "decode-0"]], ids=["router", "workers"])
def test_a_released_half_serves_beside_this_tree_s(old: list[str], released: Path, tmp_path: Path):
    with a_cluster(tmp_path, released, old).started() as cluster:
        for name in ("router", "prefill-0", "decode-0"):
            assert release_of(cluster, name).endswith(STORED) == (name in old)
        with load_on(cluster) as answered:
            wait_for_answers(cluster, answered, 60)
        assert cluster.metric("baton_kv_transfers_total", "decode-0") > 0
        cluster.check_baseline()


@pytest.mark.parametrize("shape", [{}, WINDOWS], ids=["one group", "windows"])
def test_an_upgrade_of_one_process_after_another_loses_no_request(
    shape: Mapping[str, Any], released: Path, tmp_path: Path
):
    """In the order of docs/operations.md, each drained and started again from this tree."""
    pools = {"prefill": 2, "decode": 2, "routers": 2}
    order = ["decode-0", "prefill-0", "decode-1", "prefill-1"]
    cluster = a_cluster(tmp_path, released, (), shape, **pools)
    order += cluster.routers
    cluster.own = {name: {"PYTHONPATH": str(released)} for name in order}
    with cluster.started():
        before = cluster.identity("decode-0").model.fingerprint
        with load_on(cluster) as answered:
            for name in order:
                wait_for_answers(cluster, answered)
                cluster.processes[name].terminate()
                assert cluster.wait_gone(name) == 0
                wait_for_answers(cluster, answered)
                cluster.own = {other: own for other, own in cluster.own.items() if other != name}
                cluster.start(name)
                cluster.wait_ready()
            wait_for_answers(cluster, answered, 60)
        assert {release_of(cluster, name) for name in cluster.workers} == {__version__}
        assert (cluster.identity("decode-0").model.fingerprint != before) or not shape
        assert cluster.metric("baton_kv_transfers_total", "decode-1") > 0
        cluster.check_baseline()


def test_a_cluster_of_the_release_grows_and_shrinks_into_this_tree_s(
    released: Path, tmp_path: Path
):
    """Each process that is started anew, or added, is this tree's. At 0.6 of the load that keeps
    it busy all the time."""
    pools = {"prefill": 2, "decode": 2, "routers": 2}
    first = ["router-0", "router-1", "prefill-0", "decode-0"]
    cluster = a_cluster(tmp_path, released, first, **pools)
    try:
        start(cluster, *first)
        with load_on(cluster, busy=0.6) as answered:
            go_through(cluster, answered, GROWING)
        for name in ("router-0", "router-1", "prefill-1", "decode-1"):
            assert not release_of(cluster, name).endswith(STORED)
    finally:
        cluster.stop()
