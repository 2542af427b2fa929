"""Workers of several ranks: the same tokens, pages that go between unequal numbers of ranks, and no
rank outlives its worker."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cluster import Cluster, make_cluster
from otlp_receiver import OtlpReceiver, attributes, otlp_receiver
from references import NOISE, references
from tiny_families import EVERY, HYBRIDS
from tiny_models import write_tiny_model
from waiting import wait_until

from baton import LLM
from telemetry.names import Attr, Metric
from worker.watchdog import EXIT_DEVICE_LOST

OPTIONS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
GONE_S = 5.0
PREFILL_TOKENS = f"{Metric.PREFILL_TOKENS}_total"
QUICK = (2, 1)
SHAPES = ((1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (1, 8), (8, 4))
DEMO_SHAPES = ((3, 1), (1, 3), (3, 3))
DEMO_TEXTS = ("The capital of France is", "Zwölf Boxkämpfer jagen", "🏃 baton 🥖" * 20)
EIGHT_HEADS: Mapping[str, Any] = {"heads": 8, "kv_heads": 4, "hidden": 128}
WINDOWS = {**EVERY["gemma3"], **EIGHT_HEADS, "sliding_window": 24}
"""With two groups of pages."""
STATES = {**HYBRIDS["qwen3_5"], **EIGHT_HEADS, "linear_num_key_heads": 4}
"""With pages of states beside those of tokens."""
LATENT = {**EVERY["deepseek_v3"], "heads": 8, "kv_heads": 8}
"""Every rank of P has every page: ranks write in turns."""
STAGED: Mapping[str, Any] = {**EIGHT_HEADS, "layers": 4}
FP8 = {"kv_cache_dtype": "fp8"}
"""Two planes of a page."""
GRIDS = [
    (WINDOWS, (2, 1), (1, 2), {}),
    *((STAGED, p, d, {}) for p, d in (((4, 1), (2, 2)), ((1, 1), (2, 1)), ((2, 2), (4, 2)))),
    *((STAGED, p, d, FP8) for p, d in (((2, 1), (1, 1)), ((2, 1), (4, 2)))),
    (LATENT, (2, 1), (1, 2), {}),
    (WINDOWS, (1, 1), (4, 1), {}),
]
"""A model, stages and ranks of each stage of prefill and decode, and settings of both. In every
second row the side with fewer stages has bands for those of the other."""
CASES = [
    pytest.param(
        model, shape, marks=() if shape == QUICK and model is WINDOWS else pytest.mark.matrix
    )
    for model, shapes in (
        (EIGHT_HEADS, SHAPES),
        (WINDOWS, (QUICK, (1, 2), (2, 4), (8, 1))),
        (STATES, ((2, 1), (1, 2), (2, 4))),
        (LATENT, (QUICK, (1, 2), (2, 4), (4, 2))),
    )
    for shape in shapes
]


def ranks_of(cluster: Cluster, name: str) -> list[psutil.Process]:
    children = psutil.Process(cluster.processes[name].pid).children()
    return [child for child in children if "engine.ranks" in child.cmdline()]


def check(
    cluster: Cluster, model: Path, lengths: Sequence[int] = (5, 40, 200), *, whole: bool = False
) -> None:
    with cluster.client() as client:
        references(model, whole=whole).check_client(client, lengths)


def ranked(model: Path, logs: Path, shape: tuple[int, int], **options: Any) -> Cluster:
    own = {"prefill-0": {"tp": shape[0]}, "decode-0": {"tp": shape[1]}}
    return make_cluster(model, logs, own=own, **options)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("shapes", "shape"), CASES)
def test_pages_go_from_any_ranks_to_any_others(
    shapes: Mapping[str, Any], shape: tuple[int, int], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model", **shapes)
    with ranked(model, tmp_path / "logs", shape).started() as cluster:
        for name, count in zip(("prefill-0", "decode-0"), shape, strict=True):
            lines = [rank.cmdline() for rank in ranks_of(cluster, name)]
            pid = str(cluster.processes[name].pid)
            # They were started while the worker imported: it had no folder to name yet.
            assert [line[-2:] for line in lines] == (count - 1) * [["engine.ranks", pid]]
        check(cluster, model, whole=shapes is STATES)
        assert cluster.metric(PREFILL_TOKENS, "prefill-0") >= 245
        assert cluster.metric(PREFILL_TOKENS, "decode-0", source="computed") == 0
        check(cluster, model, whole=shapes is STATES)  # with pages that decode holds already
        cluster.check_baseline()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("shapes", "prefill", "decode", "options", "banded"),
    [
        pytest.param(*grid, at % 2 == 0, marks=pytest.mark.matrix if at else ())
        for at, grid in enumerate(GRIDS)
    ],
)
def test_pages_go_from_any_stages_to_any_others(
    shapes: Mapping[str, Any],
    prefill: tuple[int, int],
    decode: tuple[int, int],
    options: Mapping[str, Any],
    banded: bool,
    tmp_path: Path,
) -> None:
    """The answers are those of workers of one rank; nothing is computed again on decode."""
    model = write_tiny_model(tmp_path / "model", **shapes)
    grids = {"prefill-0": prefill, "decode-0": decode}
    own = {name: {"pp": pp, "tp": tp, **options} for name, (pp, tp) in grids.items()}
    if banded:
        fewer = min(grids, key=lambda name: grids[name][0])
        own[fewer]["debug_kv_bands"] = max(prefill[0], decode[0])
    with make_cluster(model, tmp_path / "logs", own=own).started() as cluster:
        for name, (pp, tp) in grids.items():
            assert len(ranks_of(cluster, name)) == pp * tp - 1
        if options:
            check_beside(cluster, model, options)
        else:
            check(cluster, model)
        assert cluster.metric(PREFILL_TOKENS, "decode-0", source="computed") == 0
        if not options:
            check(cluster, model)  # with pages that decode holds already
        cluster.check_baseline()


def check_beside(cluster: Cluster, model: Path, options: Mapping[str, Any]) -> None:
    """Answers are those of one process with such settings."""
    with LLM(model, device="cpu", **options) as one, cluster.client() as client:
        for length in (40, 200):
            prompt = np.random.default_rng(length).integers(1, 384, length).tolist()
            answers = (each.generate(token_ids=prompt, **OPTIONS) for each in (one, client))
            assert len({tuple(answer.token_ids) for answer in answers}) == 1


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shape", DEMO_SHAPES, ids=str)
def test_the_demo_model_between_three_ranks_and_others(
    shape: tuple[int, int], demo_model: Path, tmp_path: Path
) -> None:
    """9 query heads and 3 KV heads: a rank of three has one KV head."""
    with otlp_receiver() as (receiver, address):
        options = {"local_prefill": "never", "otlp_endpoint": f"http://{address}"}
        with ranked(demo_model, tmp_path / "logs", shape, **options).started() as cluster:
            check_answers(cluster, demo_model)
            assert cluster.metric(PREFILL_TOKENS, "decode-0", source="computed") == 0
            cluster.check_baseline()
            check_waits(receiver, shape)


def check_answers(cluster: Cluster, demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompts = [tokenizer(text)["input_ids"] for text in DEMO_TEXTS]
    with cluster.client() as client:
        for prompt in [*prompts, prompts[-1]]:  # The last one's pages are there already.
            answer = client.generate(token_ids=prompt, **OPTIONS | {"max_tokens": 10})
            want = references(demo_model)(prompt, 10, past_end=True)
            assert min(want.margins) > NOISE, "noise decides nothing"
            assert list(answer.token_ids) == want.tokens


def check_waits(receiver: OtlpReceiver, shape: tuple[int, int]) -> None:
    """Spans tell how long ranks waited for the slowest, where there are several."""
    counts = dict(zip(("prefill.compute", "decode.generate"), shape, strict=True))
    wait_until(lambda: counts.keys() <= receiver.spans.keys())
    for name, count in counts.items():
        skew_ms = attributes(receiver.spans[name]).get(Attr.RANK_SKEW_MS, 0.0)
        assert isinstance(skew_ms, float)
        assert (skew_ms > 0) == (count > 1), name


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["tp", "pp"])
def test_a_rank_that_is_killed_ends_its_worker_and_requests_go_on(
    kind: str, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model", **EIGHT_HEADS)
    own = {name: {kind: 2} for name in ("prefill-0", "decode-0")}
    cluster = make_cluster(model, tmp_path / "logs", own=own, prefill=1, decode=2)
    with cluster.started():
        check(cluster, model)
        for name in ("decode-0", "prefill-0"):
            (rank,) = ranks_of(cluster, name)
            rank.send_signal(signal.SIGKILL)
            assert cluster.wait_gone(name) == EXIT_DEVICE_LOST
            assert "rank 1 was killed by SIGKILL" in cluster.logged()
            check(cluster, model)
            cluster.start(name)
            cluster.wait_attached(name)
            check(cluster, model, (41, 201))
            (rank,) = ranks_of(cluster, name)
            cluster.kill(name)
            wait_until(lambda rank=rank: not psutil.pid_exists(rank.pid), GONE_S)
            check(cluster, model)
            cluster.start(name)
            cluster.wait_attached(name)
        cluster.check_baseline()
