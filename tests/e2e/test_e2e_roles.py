"""Workers change their roles while requests run: none fails, and weights and pages stay."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster import Cluster, running
from references import references
from streams import busy, prompt_of, read

OPTIONS = {"temperature": 0.0, "ignore_eos": True}
TOKEN = "an-operator"
BY_ITSELF_S = 2.0
"""A change without running legs; the command's own start is not counted."""


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs = tmp_path_factory.mktemp("logs")
    own = {name: {"flexible": True} for name in ("prefill-0", "decode-0", "decode-1")}
    with running(
        tiny,
        logs,
        prefill=1,
        decode=2,
        drain_s=1.0,
        failpoints="live",
        operator_token=TOKEN,
        own=own,
    ) as cluster:
        yield cluster


def role(cluster: Cluster, *words: str, token: str = TOKEN) -> tuple[int, str]:
    """`baton role`: its exit code, and what it says."""
    argv = [sys.executable, "-m", "baton", "role", *words, "--admin", cluster.plan.admin_address]
    environment = {**os.environ, "BATON_OPERATOR_TOKEN": token, "COLUMNS": "200"}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=100)
    return done.returncode, done.stdout + done.stderr


def took_s(said: str) -> float:
    """How long a change took, by what the command says."""
    return float(said.rpartition(" in ")[2].split()[0])


def test_there_and_back_takes_no_time_and_keeps_what_is_cached(cluster: Cluster, tiny: Path):
    prompt = prompt_of(200)
    expected = references(tiny)(prompt, 20, past_end=True).tokens
    with cluster.client() as client:
        first = client.generate(token_ids=prompt, max_tokens=20, **OPTIONS)
        started = cluster.identity("decode-1").epoch
        for to in ("prefill", "decode"):
            code, said = role(cluster, "decode-1", to)
            assert code == 0, said
            assert took_s(said) < BY_ITSELF_S / 2
            again = client.generate(token_ids=prompt, max_tokens=20, **OPTIONS)
            assert list(first.token_ids) == list(again.token_ids) == expected
            assert again.usage.cached_prompt_tokens >= 192
        now = cluster.identity("decode-1")
        assert (now.epoch, now.role) == (started, 2)
    cluster.check_baseline()


def test_streams_that_last_longer_go_on_elsewhere(cluster: Cluster, tiny: Path):
    """The worker has its new role after a second, and nobody sees it."""
    cluster.slow_down("decode-0", "decode-1", step_s=0.1)
    prompts = [prompt_of(40, seed=1 + n) for n in range(4)]
    with cluster.client() as client:
        readings = [read(client, prompt, max_tokens=200, **OPTIONS) for prompt in prompts]
        for reading in readings:
            reading.until(5)
        leaving = busy(cluster, "decode")
        code, said = role(cluster, leaving, "prefill")
        assert code == 0, said
        assert 0.5 < took_s(said) < 1.0 + BY_ITSELF_S
        cluster.disarm()
        for reading, prompt in zip(readings, prompts, strict=True):
            reading.end()
            assert reading.error is None, reading.error
            assert reading.tokens() == references(tiny)(prompt, 200, past_end=True).tokens
    assert cluster.metric("baton_failovers_total", cause="draining") > 0
    assert role(cluster, leaving, "decode")[0] == 0
    assert cluster.metric("baton_role_changes_total", cause="operator", to="prefill") > 0
    cluster.check_baseline()


def test_what_cannot_be_is_refused_with_its_reason(cluster: Cluster):
    for words, why in (
        (("prefill-0", "decode"), "prefill-0 stays prefill: no other worker computes prompts of"),
        (("prefill-9", "decode"), "no worker 'prefill-9' is attached; attached: decode-0,"),
        (("decode-0", "router"), "a role is prefill, decode or both"),
    ):
        code, said = role(cluster, *words)
        assert code != 0
        assert why in " ".join(said.split())
    code, said = role(cluster, "decode-0", "both", token="somebody")
    assert (code, "operator token" in said) == (1, True)
    assert "decode-0" in role(cluster)[1]


@pytest.mark.slow
def test_the_balance_moves_a_worker_to_where_the_work_is(tiny: Path, tmp_path: Path):
    """Prompts of which nothing is decoded: a decode worker turns to them, and nobody notices."""
    names = ("prefill-0", "decode-0", "decode-1")
    own: dict[str, dict[str, object]] = {name: {"flexible": True} for name in names}
    limits = {"balance_high": 1.01, "balance_hold_s": 2, "balance_apart_s": 3}
    own["router"] = {"balance": "auto", **limits}
    with running(tiny, tmp_path, decode=2, own=own, prefix_cache=False) as cluster:
        prompts = [prompt_of(3000, seed=n) for n in range(4)]
        with cluster.client() as client:
            expected = [
                client.generate(token_ids=each, max_tokens=1, **OPTIONS) for each in prompts
            ]

            def answer(number: int) -> bool:
                one = client.generate(token_ids=prompts[number], max_tokens=1, **OPTIONS)
                return one.token_ids == expected[number].token_ids

            until_s = time.monotonic() + 100
            with ThreadPoolExecutor(4) as pool:
                while not cluster.metric("baton_role_changes_total", cause="balance", to="prefill"):
                    assert all(pool.map(answer, [0, 1, 2, 3] * 5))
                    assert time.monotonic() < until_s, "no role changed"
                assert all(pool.map(answer, range(4)))
        assert cluster.metric("baton_balance_ratio", role="prefill") > 0
        assert cluster.metric("baton_worker_up", role="prefill") == 2
        assert "of their targets for 2 s" in cluster.logged()
        argv = [sys.executable, "-m", "baton", "top", "--once", "--admin"]
        done = subprocess.run([*argv, cluster.plan.admin_address], capture_output=True, text=True)
        assert re.search(r"balance  \w+: prefill at \d\.\d\d, decode at 0", done.stdout), (
            done.stdout
        )
