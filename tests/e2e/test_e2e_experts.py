"""Models with experts that several ranks or workers divide: pages go between any of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import make_cluster
from streams import prompt_of, read
from test_e2e_ranks import PREFILL_TOKENS, check
from tiny_families import EXPERTS
from tiny_models import write_tiny_model

from worker.watchdog import EXIT_DEVICE_LOST

MODEL = EXPERTS["qwen3_moe"]
WHOLE: Mapping[str, object] = {"tp": 2, "expert_parallel": True}
SLICES: Mapping[str, object] = {"tp": 2}
ROLES = ("prefill", "decode", "both")
LOST_S = 4.0
GRACE_S = 3.0
"""What a busy machine may add."""


def group(folder: Path, role: str) -> dict[str, Mapping[str, object]]:
    """Two workers of a role that hold the experts together."""
    place = f"{folder / role}?rank={{}}&ranks=2"
    return {f"{role}-{rank}": {"expert_group": place.format(rank)} for rank in range(2)}


GRIDS: Mapping[str, Any] = {
    "group to whole": lambda folder: group(folder, "prefill") | {"decode-0": WHOLE},
    "whole to slices": lambda _: {"prefill-0": WHOLE, "decode-0": SLICES},
    "slices to whole": lambda _: {"prefill-0": SLICES, "decode-0": WHOLE},
    "one to group": lambda folder: {"prefill-0": {}} | group(folder, "decode"),
    "group to group": lambda folder: group(folder, "prefill") | group(folder, "decode"),
    "both": lambda folder: group(folder, "both"),
}


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("grid", GRIDS)
def test_pages_go_between_workers_that_divide_experts_otherwise(grid: str, tmp_path: Path) -> None:
    """The answers are those of transformers; nothing is computed again on decode."""
    model, own = write_tiny_model(tmp_path / "model", **MODEL), GRIDS[grid](tmp_path)
    counts = {role: sum(name.startswith(role) for name in own) for role in ROLES}
    cluster = make_cluster(model, tmp_path / "logs", own=own, local_prefill="never", **counts)
    with cluster.started():
        for _ in range(len(own) - 1):
            check(cluster, model)
        for name in (name for name in own if name.startswith("decode")):
            assert cluster.metric(PREFILL_TOKENS, name, source="computed") == 0
        cluster.check_baseline()


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("struck", [signal.SIGKILL, signal.SIGSTOP], ids=lambda own: own.name)
def test_a_worker_that_is_struck_ends_its_group_and_requests_go_on(
    struck: signal.Signals, tmp_path: Path
) -> None:
    """The others of the group end, and all start again; a worker outside goes on meanwhile. What
    is stopped ends with its next signal."""
    model, own = write_tiny_model(tmp_path / "model", **MODEL), group(tmp_path, "prefill")
    cluster = make_cluster(model, tmp_path / "logs", own=own, prefill=3)
    with cluster.started():
        check(cluster, model)
        for first, other in (("prefill-0", "prefill-1"), ("prefill-1", "prefill-0")):
            began_s = time.monotonic()
            cluster.kill(first, struck)
            assert cluster.wait_gone(other) == EXIT_DEVICE_LOST
            assert time.monotonic() - began_s < LOST_S + GRACE_S
            if struck is signal.SIGSTOP:
                cluster.kill(first)
            check(cluster, model)
            cluster.start("prefill-0")
            cluster.start("prefill-1")
            for name in ("prefill-0", "prefill-1"):
                cluster.wait_attached(name)
            check(cluster, model, (41, 201))
        cluster.check_baseline()


STREAMS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 11}}


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("killed", ["decode-0", "decode-1"])
def test_streams_of_a_lost_group_go_on_where_they_were(killed: str, tmp_path: Path) -> None:
    """Both workers of the group decode some of them; the third worker has all experts."""
    model, own = write_tiny_model(tmp_path / "model", **MODEL), group(tmp_path, "decode")
    cluster = make_cluster(model, tmp_path / "logs", own=own, decode=3)
    prompts = [prompt_of(40 + number, number) for number in range(6)]
    with cluster.started():
        for options in STREAMS.values():
            with cluster.client() as client:
                want = [
                    client.generate(token_ids=prompt, max_tokens=300, ignore_eos=True, **options)
                    for prompt in prompts
                ]
                readings = [read(client, prompt, max_tokens=300, **options) for prompt in prompts]
                for reading in readings:
                    reading.until(5)
                cluster.kill(killed)
                for reading, one in zip(readings, want, strict=True):
                    reading.end()
                    assert reading.error is None, reading.error
                    assert reading.tokens() == list(one.token_ids)
            (other,) = own.keys() - {killed}
            assert cluster.wait_gone(other) == EXIT_DEVICE_LOST
            for name in own:
                cluster.start(name)
            for name in own:
                cluster.wait_attached(name)
        cluster.check_baseline()
