"""What `baton bench` plans to send: traces as they were recorded, arrivals, prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from console.loadgen.errors import BenchError
from console.loadgen.sender import target_of
from console.loadgen.trace_files import BLOCK_TOKENS, BUILT_IN, TraceRow, read_trace
from console.loadgen.workload import (
    FIRST_ID,
    Planned,
    Workload,
    prompt_ids,
    scaled,
    shared_prefix_tokens,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:59.9999999,374,44
2023-11-16 18:16:00.5000000,396,109
2023-11-16 18:16:03,2,7
"""
MOONCAKE = [
    {"timestamp": 5_000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 6_500, "input_length": 1024, "output_length": 9, "hash_ids": [7, 9]},
]


def test_azure_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    rows = read_trace(str(path))
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [
        (374, 44),
        (396, 109),
        (2, 7),
    ]
    assert [row.at_s for row in rows] == pytest.approx([0, 0.5, 3.0], abs=1e-6)


def test_mooncake_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, MOONCAKE)).encode()))
    assert read_trace(str(path)) == (
        TraceRow(0.0, 600, 5, (7, 8)),
        TraceRow(1.5, 1024, 9, (7, 9)),
    )


def test_the_traces_that_come_along() -> None:
    azure = read_trace("azure-conversation")
    assert len(azure) == 19_366
    assert azure[-1].at_s == pytest.approx(3501.72, abs=0.01)
    assert np.mean([row.prompt_tokens for row in azure]) == pytest.approx(1154.7, abs=0.1)
    assert np.median([row.prompt_tokens for row in azure]) == 1020
    mooncake = read_trace("mooncake-conversation")
    assert len(mooncake) == 600
    assert all(-(-row.prompt_tokens // BLOCK_TOKENS) == len(row.blocks) for row in mooncake)
    folder = next(iter(BUILT_IN.values())).parent
    readme = (folder / "README.md").read_text()
    for name, path in BUILT_IN.items():
        assert name in readme
        assert path.name in readme


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n", "not the csv trace"),
        ("a.csv", AZURE.replace("374", "none"), "not the csv trace"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "is empty"),
        ("a.jsonl", "[1]\n", "not the jsonl trace"),
        ("a.jsonl", json.dumps(MOONCAKE[0] | {"hash_ids": [1]}), "1 blocks for 600 tokens"),
        ("a.jsonl", json.dumps(MOONCAKE[0] | {"output_length": 0}), "600 \\+ 0 tokens"),
        ("a.csv.gz", "no gzip", "cannot read"),
        ("a.parquet", "", "neither one of azure-conversation"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, name: str, content: str, complaint: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(BenchError, match=complaint):
        read_trace(str(path))


def test_a_trace_that_is_not_there() -> None:
    with pytest.raises(BenchError, match="cannot read"):
        read_trace("/nowhere/trace.csv")


def test_arrivals_are_a_poisson_process() -> None:
    plan = Workload(4000, 10, 1).plan(50.0, seed=3)
    gaps = np.diff([request.due_s for request in plan.requests])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential
    assert plan.rate == pytest.approx(50, rel=0.05)
    assert plan == Workload(4000, 10, 1).plan(50.0, seed=3)
    assert plan.requests != Workload(4000, 10, 1).plan(50.0, seed=4).requests


def test_a_run_can_be_cut() -> None:
    whole = Workload(100, 10, 1).plan(10.0, seed=1).requests
    cut = Workload(100, 10, 1, duration_s=3.0).plan(10.0, seed=1).requests
    assert cut == tuple(request for request in whole if request.due_s <= 3.0)
    with pytest.raises(BenchError, match="no request is due"):
        Workload(100, 10, 1, duration_s=1e-9).plan(10.0, seed=1)


TRACE = tuple(TraceRow(2.0 * i, 100 + i, 10) for i in range(50))


def test_a_trace_at_its_own_times() -> None:
    plan = Workload(5, trace=TRACE, trace_arrivals=True).plan(0.0, seed=1)
    assert [request.due_s for request in plan.requests] == [0, 2, 4, 6, 8]
    assert not plan.in_turn
    faster = Workload(5, trace=scaled(TRACE, 0.25), trace_arrivals=True).plan(0.0, seed=1)
    assert [request.due_s for request in faster.requests] == [0, 0.5, 1, 1.5, 2]
    stretched = Workload(0, trace=TRACE, trace_arrivals=True).plan(10.0, seed=1)
    assert stretched.rate == pytest.approx(10.0)
    assert len(stretched.requests) == 50


def test_lengths_of_a_trace_with_arrivals_of_ours() -> None:
    runs = [Workload(20, trace=TRACE).plan(5.0, seed) for seed in range(8)]
    firsts = {run.requests[0].prompt_tokens for run in runs}
    assert len(firsts) > 1
    for run in runs:
        lengths = [request.prompt_tokens for request in run.requests]
        assert lengths == list(range(lengths[0], lengths[0] + 20))


def test_one_after_another() -> None:
    assert Workload(3, 10, 1).plan(0.0, seed=1).in_turn


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num": 51, "trace": TRACE}, "50 requests that fit, not 51"),
        ({"num": 5, "trace_arrivals": True}, "only a trace"),
        ({"num": 0}, "needs requests"),
    ],
)
def test_workloads_that_cannot_be(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(BenchError, match=complaint):
        Workload(**options)


def test_prompts_are_new_for_every_request_and_run() -> None:
    prompts = {
        tuple(prompt_ids(Planned(number, 0.0, 40, 1), seed, 500))
        for number in range(20)
        for seed in range(5)
    }
    assert len(prompts) == 100
    assert all(len(ids) == 40 and min(ids) >= FIRST_ID and max(ids) < 500 for ids in prompts)
    same = prompt_ids(Planned(3, 0.0, 40, 1), 2, 500)
    assert tuple(same) in prompts


def test_equal_blocks_are_equal_prefixes() -> None:
    requests = (
        Planned(0, 0.0, 1500, 1, (1, 2, 3)),
        Planned(1, 0.0, 1300, 1, (1, 2, 4)),
        Planned(2, 0.0, 600, 1, (5, 6)),
    )
    one, two, three = (prompt_ids(request, 9, 30_000).tolist() for request in requests)
    assert [len(ids) for ids in (one, two, three)] == [1500, 1300, 600]
    assert one[: 2 * BLOCK_TOKENS] == two[: 2 * BLOCK_TOKENS]
    assert one[2 * BLOCK_TOKENS :] != two[2 * BLOCK_TOKENS :]
    assert one[:20] != three[:20]
    assert one[:20] != prompt_ids(requests[0], 10, 30_000).tolist()[:20]
    assert shared_prefix_tokens(requests) == 2 * BLOCK_TOKENS


@pytest.mark.parametrize("senders", range(1, 9))
@pytest.mark.parametrize("targets", range(1, 9))
def test_every_sender_uses_every_target_and_targets_take_turns(senders: int, targets: int) -> None:
    turns = [target_of(number, senders, targets) for number in range(senders * targets)]
    pairs = {(number % senders, target) for number, target in enumerate(turns)}
    assert len(pairs) == senders * targets
    assert turns[:targets] == list(range(targets))
