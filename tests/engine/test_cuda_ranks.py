"""Ranks on GPUs: kernels over the memory of several ranks on one device, and engines of two."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import Run, build, finish, stop, submit
from ranks_kit import (
    Ranks,
    check_best,
    check_gather,
    check_halves_take_turns,
    check_sums,
    check_waits,
    parts_of,
)
from references import NOISE, first_difference, references
from test_profiling import written
from tiny_models import write_tiny_model

from engine.types import SamplingParams, TokenRecord

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
CUDA = torch.device("cuda")
ROWS = (1, 2, 3, 7, 8, 33, 64, 256, 1000, 8192)
PLAIN = SamplingParams(temperature=0.0)
SCORED = SamplingParams(temperature=0.0, top_logprobs=2)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
PENALISED = SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3)
CLOSE = 0.15
"""Logits of bf16 differ by less between one rank and two: sums are rounded once more."""
PROGRAMS = 16
"""Of each rank: those of four ranks fit one device at once."""
SLEEP_CYCLES = 10_000_000
MOST_GHZ = 2.5
"""Clocks of GPUs are slower, so that a sleep takes longer."""
two_gpus = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("size", [5120, 576])
def test_sums_of_ranks_on_one_device(count, size):
    """Every size from a row to the largest step of prompts, with one shot and with two."""
    ranks = Ranks(count, CUDA, programs=128, half_bytes=8192 * 5120 * 2)
    for rows in ROWS:
        for shots in (1, 2):
            check_sums(ranks, rows, size, torch.bfloat16, shots, seed=rows)
    if size == 576:
        check_sums(ranks, 9, size, torch.float32, 1)
        check_sums(ranks, 9, size, torch.float16, 2)
    check_gather(ranks, 256, 3)
    check_waits(ranks)


def test_halves_take_turns_on_one_device():
    check_halves_take_turns(CUDA)


@pytest.mark.parametrize("count", [2, 3])
def test_the_best_token_of_parts(count):
    for vocab in (701, 9001, 151936):
        check_best(count, vocab, torch.bfloat16, CUDA)


@pytest.mark.parametrize("count", [2, 4])
def test_programs_meet(count):
    """All phases in one launch, on a stream for each rank: here programs wait for each other."""
    ranks = Ranks(count, CUDA, programs=PROGRAMS)
    streams = [torch.cuda.Stream() for _ in ranks.all]
    for rows in (1, 50, 3, 90):
        for shots in (1, 2):
            parts = parts_of(count, rows, 512, torch.bfloat16, CUDA, rows)
            want = [part.clone() for part in parts]
            with_phases = Ranks(count, CUDA, programs=PROGRAMS)
            with_phases.all_reduce(want, shots)
            torch.cuda.synchronize()
            for own, x, stream in zip(ranks.all, parts, streams, strict=True):
                with torch.cuda.stream(stream):
                    own.all_reduce(x, two_shots=shots == 2)
            wait(streams, ranks)
            for x, sums in zip(parts, want, strict=True):
                assert torch.equal(x, sums)


def test_a_rank_tells_how_long_its_device_waited():
    """The others come late, one after the other. So the first waits longest, and the last least."""
    count, rounds = 3, 5
    ranks = Ranks(count, CUDA, programs=PROGRAMS)
    streams = [torch.cuda.Stream() for _ in ranks.all]
    parts = parts_of(count, 8, 512, torch.bfloat16, CUDA, 0)
    torch.cuda.synchronize()
    began_s = time.monotonic()
    for turn in range(rounds):
        for rank, (own, x, stream) in enumerate(zip(ranks.all, parts, streams, strict=True)):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES * rank)
                own.all_reduce(x, two_shots=turn % 2 == 1)
    wait(streams, ranks)
    took_ns = 1e9 * (time.monotonic() - began_s)
    first, second, last = ranks.all[1].waits().tolist()
    each_ns = SLEEP_CYCLES / MOST_GHZ
    assert rounds * each_ns < first - second < took_ns
    assert rounds * each_ns < second - last < took_ns
    assert last < each_ns, "it hardly waits"


def wait(streams: list[torch.cuda.Stream], ranks: Ranks) -> None:
    until_s = time.monotonic() + 30
    while not all(stream.query() for stream in streams):
        if time.monotonic() > until_s:
            ranks.word[0] = 1
            torch.cuda.synchronize()
            raise AssertionError("programs have not met")
        time.sleep(0.001)


def test_a_rank_that_waits_can_be_let_go():
    """A rank whose peer never comes, as when it was killed."""
    ranks = Ranks(2, CUDA, programs=PROGRAMS)
    x = parts_of(1, 8, 512, torch.bfloat16, CUDA, 0)[0]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ranks.all[0].all_reduce(x, two_shots=True)
    time.sleep(0.2)
    assert not stream.query()
    ranks.word[0] = 1
    until_s = time.monotonic() + 10
    while not stream.query():
        assert time.monotonic() < until_s
        time.sleep(0.001)


# -- two GPUs -----------------------------------------------------------------------------------


@two_gpus
def test_ranks_in_processes_of_their_own(tmp_path):
    """Real memory of two GPUs: sums against float64, and in graphs that are replayed."""
    script = Path(__file__).with_name("ranks_process.py")
    tests = script.parent.parent
    places = os.pathsep.join([*map(str, (tests.parent, tests, script.parent)), *sys.path])
    environment = {**os.environ, "PYTHONPATH": places}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / "store", str(rank), "2"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            said, errors = rank.communicate(timeout=300)
            assert rank.returncode == 0, errors[-3000:]
            assert said.splitlines()[-1] == "symmetric memory", errors[-3000:]
    finally:
        for rank in ranks:
            rank.kill()


WHOLE = "whole experts"
EXPERTS = {
    "family": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 128,
    "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip
SHAPES = {
    "llama": {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 128},
    "qk-norm": {"family": "qwen3", "heads": 8, "kv_heads": 2, "head_dim": 128},
    "tied": {"heads": 4, "kv_heads": 4, "head_dim": 64, "tie_word_embeddings": True},
    "one-kv-head": {"hidden": 512, "heads": 8, "kv_heads": 1, "head_dim": 64},
    "experts": EXPERTS,
    WHOLE: EXPERTS,
}  # fmt: skip
LENGTHS = (1, 15, 17, 64, 200, 300)
TOKENS = 24


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, 384, length).tolist()


def build_on_gpus(path, tp: int, **options):
    defaults = {"max_step_tokens": 256, "max_sequences": 40, "num_pages": 600}
    return build(path, device="cuda", tp=tp, **{**defaults, **options})


def runs_of(engine, sampling: SamplingParams, lengths: Sequence[int] = LENGTHS) -> list[Run]:
    runs = [
        submit(engine, prompt_of(n), TOKENS, min_tokens=TOKENS, sampling=sampling) for n in lengths
    ]
    finish(*runs, timeout_s=120)
    return runs


def run_all(engine, sampling: SamplingParams = PLAIN) -> list[list[int]]:
    return [run.tokens[0] for run in runs_of(engine, sampling)]


def margin_of(record: TokenRecord) -> float:
    """Best minus second best log probability."""
    return record.top_logprobs[0] - record.top_logprobs[1]


@two_gpus
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_have_the_tokens_of_one(shape, graphs, tmp_path):
    """Up to the first token that rounding decides: greedy by parts, greedy by whole rows."""
    path = write_tiny_model(tmp_path, tokenizer=False, **SHAPES[shape])
    one = build_on_gpus(path, 1)
    want = runs_of(one, SCORED)
    one.stop()
    two = build_on_gpus(path, 2, cuda_graphs=graphs, expert_parallel=shape == WHOLE)
    found = [run_all(two), run_all(two, SCORED)]
    for answers in found:
        same = 0
        for got, run in zip(answers, want, strict=True):
            at = first_difference(got, run.tokens[0])
            assert at == TOKENS or margin_of(run.records[0][at]) < CLOSE, (len(got), at)
            same += at
        assert same > TOKENS * len(LENGTHS) // 4
    sampled = [runs_of(two, SAMPLED, (64,))[0].tokens for _ in "ab"]
    assert sampled[0] == sampled[1]
    assert all(len(tokens) == TOKENS for tokens in run_all(two, PENALISED))
    stop(two)
    assert two.lost == ""


@two_gpus
def test_two_ranks_in_float32_have_the_tokens_of_transformers(tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False)
    answers = references(path)
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = build_on_gpus(path, 2, dtype="float32")
    for length, tokens in zip(LENGTHS, run_all(engine), strict=True):
        want = answers(prompt_of(length), TOKENS, past_end=True)
        at = first_difference(tokens, want.tokens)
        assert at == TOKENS or want.margins[at] < 10 * NOISE, (length, at)
    engine.stop()


@two_gpus
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_fp8_with_two_ranks(kv, tmp_path):
    """Weights that are rounded while they are read, and their sums."""
    path = write_tiny_model(tmp_path, tokenizer=False, **SHAPES["llama"])
    engine = build_on_gpus(path, 2, quantization="fp8", kv_cache_dtype=kv)
    first, again = run_all(engine), run_all(engine, SCORED)
    agree = sum(first_difference(a, b) for a, b in zip(first, again, strict=True))
    assert agree > TOKENS * len(LENGTHS) // 4
    stop(engine)


@two_gpus
def test_a_killed_rank_lets_rank_0_go(tmp_path):
    """Within a few seconds, though rank 0's device waits for it."""
    import signal

    path = write_tiny_model(tmp_path, tokenizer=False, **SHAPES["llama"])
    engine = build_on_gpus(path, 2)
    run = submit(engine, prompt_of(20), 2000, min_tokens=2000)
    time.sleep(0.5)
    (pid,) = engine.ranks.pids.values()
    os.kill(pid, signal.SIGKILL)
    assert run.done.wait(5)
    assert run.failed is not None
    assert engine.lost == "rank 1 was killed by SIGKILL"
    engine.stop()
    torch.cuda.synchronize()


@two_gpus
def test_a_profile_tells_the_time_of_sums_over_ranks(tmp_path):
    """Of each step from a graph: two sums a layer, and the best tokens."""
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **SHAPES["llama"])
    engine = build_on_gpus(path, 2)
    engine.profile(8, tmp_path / "profiles")
    # With `min_tokens` some tokens are forbidden, and whole rows would be gathered.
    finish(submit(engine, prompt_of(64), TOKENS, ignore_eos=True, sampling=PLAIN), timeout_s=120)
    names = written(tmp_path / "profiles")
    engine.stop()
    assert names["all_reduce_one_shot"] >= 2 * 8
    assert names["all_gather"] >= 4


@two_gpus
@pytest.mark.parametrize("graphs", [True, False])
def test_the_wait_for_the_slowest_rank_is_told(graphs, tmp_path, monkeypatch):
    """Rank 1 begins each step late. So rank 0's device waits for it, which no host sees."""
    monkeypatch.setenv("BATON_DEBUG_FAILPOINTS", "rank.step=sleep:0.03~1")
    path = write_tiny_model(tmp_path, tokenizer=False, **SHAPES["llama"])
    engine = build_on_gpus(path, 2, cuda_graphs=graphs)
    began_ns = time.time_ns()
    for sampling in (PLAIN, SCORED):
        runs_of(engine, sampling, (64,))
    engine.stop()
    ended_ns = time.time_ns()
    ranks = engine.ranks
    rank_0, rank_1 = ranks.loads()
    assert rank_0.steps >= 2 * TOKENS
    assert rank_0.busy_s is None
    assert rank_0.waited_s - rank_1.waited_s > 0.02 * rank_0.steps
    assert 0.02 * rank_0.steps < ranks.skew_s < (ended_ns - began_ns) / 1e9
    assert engine.rank_skew_s(began_ns, ended_ns) == pytest.approx(ranks.skew_s)
    assert ranks.stats.slowest[1] > 0.8 * rank_0.steps


@two_gpus
def test_nobody_looks_for_the_store_once_its_folder_is_gone(tmp_path):
    """A thread of torch's would do so 100 times a second, with an error and a stack each minute."""
    path = write_tiny_model(tmp_path, tokenizer=False, **SHAPES["llama"])
    engine = build_on_gpus(path, 2)
    pids = [os.getpid(), *engine.ranks.pids.values()]
    time.sleep(2)  # It begins after a second.
    before = [wake_ups(pid, "pt_nccl_heartbt") for pid in pids]
    time.sleep(1)
    after = [wake_ups(pid, "pt_nccl_heartbt") for pid in pids]
    engine.stop()
    assert max(np.subtract(after, before)) < 20, (before, after)


def wake_ups(pid: int, name: str) -> int:
    """Of a process's threads of that name."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            status = (task / "status").read_text()
            found += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return found


@two_gpus
@pytest.mark.parametrize("point", ["rank.join", "rank.joined"])
def test_a_rank_stopped_before_it_is_ready_lets_rank_0_go(point, tmp_path, monkeypatch):
    """Rank 0 waits for it in NCCL, or in the kernels before its first graph."""
    from engine.engine import EngineError
    from engine.ranks import stats

    path = write_tiny_model(tmp_path, tokenizer=False, **SHAPES["llama"])
    monkeypatch.setattr(stats, "STOPPED_S", 5.0)
    monkeypatch.setenv("BATON_DEBUG_FAILPOINTS", f"{point}=stop~1")
    with pytest.raises(EngineError, match="has not gone on for 5 s: rank 1 is stopped"):
        build_on_gpus(path, 2)
    torch.cuda.synchronize()
    monkeypatch.delenv("BATON_DEBUG_FAILPOINTS")
    engine = build_on_gpus(path, 2)
    run_all(engine)
    engine.stop()
