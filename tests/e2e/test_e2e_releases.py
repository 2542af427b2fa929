"""Processes of the last release beside those of this tree: under load no request is lost.

The release is the commit that set the version. Its tree runs with this environment's packages.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from cluster import GENERATED_S, Cluster, Process, make_cluster, spawn
from nursery import fork
from streams import Asking, prompt_of
from tiny_families import DENSE
from tiny_models import write_tiny_model
from waiting import wait_until

from baton.client.clients import Client
from baton.version import __version__

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
STORED = "-stored"
WINDOWS = DENSE["gemma3"] | {"sliding_window": 24}
"""The release keeps all pages of such a model, in one group: no pages go between the two."""
PROMPTS = [prompt_of(20 + 37 * n, seed=n) for n in range(6)]

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


@contextmanager
def load_on(cluster: Cluster) -> Iterator[list[int]]:
    """Clients over gRPC and HTTP that ask on and on; each answer must be the first one's."""
    over = threading.Event()
    answered: list[int] = []
    with cluster.client(retries=True) as client:
        expected = [client.generate(token_ids=prompt, **OPTIONS) for prompt in PROMPTS]

    def ask_grpc() -> None:
        with cluster.client(retries=True) as client:
            ask_over(client)

    def ask_over(client: Client) -> None:
        while not over.is_set():
            number = len(answered) % len(PROMPTS)
            answer = client.generate(token_ids=PROMPTS[number], **OPTIONS)
            assert answer.token_ids == expected[number].token_ids
            answered.append(number)

    def ask_http() -> None:
        url = f"http://{cluster.plan.http_address}/v1"
        with openai.OpenAI(base_url=url, api_key="-", timeout=GENERATED_S) as client:
            while not over.is_set():
                number = len(answered) % len(PROMPTS)
                answer = client.completions.create(
                    model="", prompt=PROMPTS[number], max_tokens=12, temperature=0,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                assert answer.choices[0].text == expected[number].text
                answered.append(number)

    threads = [Asking(ask) for ask in (ask_grpc,) * 2 + (ask_http,) * 2]
    for thread in threads:
        thread.start()
    yield answered
    over.set()
    for thread in threads:
        thread.end()


def wait_for_answers(cluster: Cluster, answered: list[int], count: int = 12) -> None:
    enough = len(answered) + count
    wait_until(lambda: len(answered) >= enough, GENERATED_S, show=cluster.tail)


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
