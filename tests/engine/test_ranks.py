"""Several ranks on CPUs, by gloo: the tokens of one rank by every path; what a rank's end does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from engine_kit import Run, build, finish, held, running, submit
from nursery import the_nursery
from paths_kit import prompt_of
from precision_reference import Reference, Rule, by_channel
from quantised_checkpoints import FORMS
from quantised_folders import rule_of, write_quantised
from references import NOISE, References, first_difference, references
from safetensors.torch import load_file
from test_engine_structure import PERSON, grammar_of
from test_precision_paths import TINY_FLIP, Case
from test_precision_paths import run_all as run_quantised
from test_profiling import written
from tiny_families import EVERY, EXPERTS, IMAGES, LATENTS, OWN_GATES
from tiny_models import write_tiny_model
from waiting import wait_until

from baton import LLM
from bench.step_cost import NullExecutor
from engine.config import EngineConfig
from engine.eager.collective import GlooCollective
from engine.eager.meeting import meeting_in
from engine.engine import Engine, EngineError
from engine.model.best import BEST_NUMBERS, best_of_parts
from engine.model.shard import Shard
from engine.ranks import stats
from engine.ranks.executor import RankedExecutor
from engine.ranks.keeper import RankError
from engine.ranks.leader import HostRanks
from engine.types import FailureReason, SamplingParams

pytestmark = pytest.mark.timeout(300)

FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"family": "mistral", "sliding_window": 24},
    "qwen2": {"family": "qwen2", "use_sliding_window": False, "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    **EVERY,
}
QUICK = [("llama", 2)]
SMALL = {"num_pages": 18, "max_sequences": 6, "max_step_tokens": 64}
"""Chunks of 64 tokens, and too few pages for six requests: some are preempted."""
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
PENALISED = SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3)
SCORED = SamplingParams(temperature=0.0, top_logprobs=3)
FORMED = SamplingParams(temperature=1.5, seed=3, grammar=grammar_of(PERSON))
GONE_S = 5.0
"""No process of a rank is left after this many seconds."""


def pids_of(engine: Engine) -> dict[int, int]:
    assert isinstance(engine.ranks, HostRanks)
    return dict(engine.ranks.pids)


class Pair(NamedTuple):
    """One rank and several."""

    one: Engine
    several: Engine
    answers: References


def cases() -> list[Any]:
    """Two and four ranks in turns, and both of the first family."""
    every = [*QUICK, *((family, 2 + 2 * (i % 2 == 0)) for i, family in enumerate(FAMILIES))]
    return [
        pytest.param(
            each, id=f"{each[0]}-{each[1]}", marks=() if each in QUICK else pytest.mark.matrix
        )
        for each in every
    ]


@pytest.fixture(scope="module", params=cases())
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    family, count = request.param
    path = write_tiny_model(tmp_path_factory.mktemp(family), **FAMILIES[family])
    with running(path, **SMALL) as one, running(path, tp=count, **SMALL) as several:
        yield Pair(one, several, references(path))


def check(answers: References, runs: Sequence[Run], max_tokens: int, given: int = 0) -> None:
    """Each run has the tokens of transformers up to the first that noise may decide."""
    for run in runs:
        prompt = run.request.prompt_ids.tolist()
        want = answers(prompt, max_tokens, past_end=True)
        found = want.tokens[:given] + run.tokens[0]
        assert len(found) == max_tokens
        if found != want.tokens:
            at = first_difference(found, want.tokens)
            assert want.margins[at] < NOISE, f"{len(prompt)} tokens: token {at} differs"


def test_fingerprint_and_limits_do_not_depend_on_the_ranks(pair):
    assert pair.one.model == pair.several.model
    of_one, of_each = pair.one.pool.num_kv_heads, pair.several.pool.num_kv_heads
    assert of_each < of_one or of_one == 1  # Latents, and one head of Gemma 4, are on all ranks.


def test_whole_in_chunks_from_the_cache_and_resumed(pair):
    speaks(pair, (1, 15, 16, 17, 65, 150))


def speaks(pair: Pair, lengths: Sequence[int]) -> None:
    """Prompts of these lengths: computed, found again, and begun by another worker."""
    several, answers = pair.several, pair.answers
    prompts = [prompt_of(length) for length in lengths]
    before = several.load().prompt_tokens_cached
    for _ in range(2):
        for prompt in prompts:
            run = submit(several, prompt, 8, ignore_eos=True)
            finish(run)
            check(answers, [run], 8)
    assert several.load().prompt_tokens_cached > before
    given = [answers(prompt, 8, past_end=True).tokens[:3] for prompt in prompts]
    for prompt, tokens in zip(prompts, given, strict=True):
        run = submit(several, prompt, 8, generated=[tokens], ignore_eos=True)
        finish(run)
        check(answers, [run], 8, given=3)


def test_preempted(pair):
    before = pair.several.load().preemptions
    with held(pair.several):
        runs = [submit(pair.several, prompt_of(20 + i), 40, ignore_eos=True) for i in range(6)]
    finish(*runs)
    # With few pages of windows fewer run at once.
    assert pair.several.load().preemptions > before or len(pair.several.pools) > 1
    check(pair.answers, runs, 40)


@pytest.mark.parametrize(
    "sampling", [SAMPLED, PENALISED, FORMED], ids=["drawn", "penalties", "form"]
)
def test_rank_0_samples_for_all(pair, sampling):
    """Two choices, in a batch with others."""
    prompt, found = prompt_of(37), []
    for engine in (pair.one, pair.several):
        others = [submit(engine, prompt_of(20 + i), 12) for i in range(2)]
        run = submit(engine, prompt, 24, sampling=sampling, choices=2)
        finish(run, *others)
        found.append([run.tokens, *(other.tokens for other in others)])
    assert found[0] == found[1]


def test_greedy_steps_tell_best_tokens_and_not_logits(pair, monkeypatch):
    """One row of another kind makes a step of whole logits."""
    widths: list[int] = []
    collective = pair.several.ranks.collective
    gather = collective.gather
    monkeypatch.setattr(
        collective, "gather", lambda x, width: (widths.append(width), gather(x, width))[1]
    )
    finish(submit(pair.several, prompt_of(21), 8, ignore_eos=True))
    assert set(widths) == {BEST_NUMBERS * collective.size}
    for sampling in (SAMPLED, PENALISED, FORMED, SCORED):
        widths.clear()
        finish(submit(pair.several, prompt_of(21), 8, sampling=sampling))
        assert set(widths) == {pair.several.model.vocab_size}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_best_of_parts_is_that_of_whole_rows(count, tmp_path):
    """Real ranks, as threads; few different logits, so that most rows have several best."""
    generator = torch.Generator().manual_seed(count)
    logits = torch.randint(-3, 4, (200, 101), generator=generator).float()
    logits[:100] += torch.randint(0, 2, (100, 101), generator=generator)
    logits[7, 50], logits[8, 3], logits[9, 100] = torch.nan, torch.inf, -torch.inf
    config = SimpleNamespace(vocab_size=logits.shape[1])

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        group = GlooCollective(rank, count)
        group.join(meeting_in(tmp_path / "store", count))
        own = Shard(rank, count).vocab(config)
        return best_of_parts(logits[:, own.slice], own.start, group)

    with ThreadPoolExecutor(count) as threads:
        (tokens, finite), *_ = threads.map(run, range(count))
    assert torch.equal(finite, logits.isfinite().all(1))
    assert (~finite).nonzero().flatten().tolist() == [7, 8, 9]
    assert torch.equal(tokens, logits.argmax(1))


def test_log_probabilities_of_prompt_and_output(pair):
    records = []
    for engine in (pair.one, pair.several):
        run = submit(engine, prompt_of(70), 6, sampling=SCORED, prompt_logprobs=True)
        finish(run)
        assert run.scored is not None
        records.append([*run.scored.records, *run.records[0]])
    assert len(records[0]) == len(records[1]) == 69 + len(run.records[0])
    for one, other in zip(*records, strict=True):
        assert (one.token_id, one.top_ids) == (other.token_id, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_profile_tells_the_time_of_sums_over_ranks(pair, tmp_path):
    pair.several.profile(6, tmp_path)
    finish(submit(pair.several, prompt_of(40), 20, ignore_eos=True))
    assert written(tmp_path)["gloo:all_reduce"] > 6


# -- precisions ---------------------------------------------------------------------------------


def sliced(source: Path, count: int) -> Reference:
    """What `quantization="fp8"` makes of a model for so many ranks: output and down are rounded by
    slices, weights and inputs."""

    def parts_of(module: str) -> int:
        return count if module.endswith(("o_proj", "down_proj")) else 1

    weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            parts = weight.chunk(parts_of(module), 1)
            weights[module] = torch.cat([by_channel(part) for part in parts], 1)
    sizes = {module: weight.shape[1] for module, weight in weights.items()}
    return Reference(source, weights, lambda module: Rule(group=sizes[module] // parts_of(module)))


def fp8_cases() -> list[Any]:
    others = (*EXPERTS, *IMAGES, *LATENTS, "gemma4_shared", "gemma4_experts", "lfm2", "lfm2_moe")
    others += ("lfm2_vl", "gemma4_unified")
    others += tuple(family for family, of in OWN_GATES.items() if "num_experts" in of)
    dense = [family for family in FAMILIES if family not in others]
    every = [("qwen3", 2), *((family, 2 + 2 * (i % 2)) for i, family in enumerate(dense))]
    slow = pytest.mark.matrix
    return [pytest.param(*each, marks=() if each == ("qwen3", 2) else slow) for each in every]


@pytest.mark.parametrize(("family", "count"), fp8_cases())
def test_fp8_rounds_by_slices_and_fp8_kv_does_not(family, count, tmp_path):
    source = write_tiny_model(tmp_path / "float", **FAMILIES[family], tokenizer=False, hidden=128)
    load = partial(sliced, source, count)
    answers = References(source, f"fp8 by {count} slices", lambda: load().model, TINY_FLIP)
    prompts = [prompt_of(length) for length in (70, 64, 17, 5)]
    options = {"quantization": "fp8", "tp": count}
    case = Case(source, options, answers, prompts, load, is_demo=False)
    with case.engine(max_step_tokens=40) as engine:
        case.check(run_quantised(engine, prompts))
        case.check(run_quantised(engine, prompts))


@pytest.mark.matrix
@pytest.mark.parametrize("count", [2, 4])
def test_fp8_kv_is_that_of_one_rank(count, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False)
    found = []
    for tp in (1, count):
        with running(path, tp=tp, kv_cache_dtype="fp8") as engine:
            runs = [submit(engine, prompt_of(length), 12) for length in (5, 40, 100)]
            finish(*runs)
            found.append([run.tokens for run in runs])
    assert found[0] == found[1]


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
def test_quantised_checkpoints(form, tmp_path):
    """Two ranks, each form; FP8 inputs without a given scale are rounded by slices."""
    source = write_tiny_model(tmp_path / "float", tokenizer=False, hidden=256, head_dim=128)
    checkpoint = write_quantised(source, tmp_path / form, form)
    of_one = rule_of(form, checkpoint)

    def rule(module: str) -> Rule | None:
        found = of_one(module)
        if found == Rule() and module.endswith(("o_proj", "down_proj")):
            return Rule(group=checkpoint.weights[module].shape[1] // 2)
        return found

    load = partial(Reference, source, checkpoint.weights, rule)
    answers = References(tmp_path / form, f"{form} by 2 slices", lambda: load().model, TINY_FLIP)
    prompts = [prompt_of(length) for length in (70, 17, 5)]
    case = Case(tmp_path / form, {"tp": 2}, answers, prompts, load, is_demo=False)
    with case.engine(max_step_tokens=40) as engine:
        case.check(run_quantised(engine, prompts))


@pytest.mark.matrix
@pytest.mark.model
def test_the_demo_model_at_three_ranks(demo_model):
    """9 query heads and 3 KV heads: one KV head a rank."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    texts = ("The capital of France is", "Zwölf Boxkämpfer jagen", "1, 2, 3, 4,", "🏃 baton 🥖" * 8)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    with running(demo_model, tp=3, max_step_tokens=32) as engine:
        for _ in range(2):
            runs = [submit(engine, prompt, 10, ignore_eos=True) for prompt in prompts]
            finish(*runs, timeout_s=120)
            check(references(demo_model), runs, 10)


# -- the end of a rank --------------------------------------------------------------------------


def all_gone(pids: Sequence[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_an_llm_says_that_a_rank_was_killed(tmp_path):
    """While it idles, and while it generates; the user's process goes on, and no rank is left."""
    path = write_tiny_model(tmp_path)
    settings = {"device": "cpu", "debug": {"num_pages": 40}, "max_sequences": 4}
    with LLM(path, tp=2, **settings) as llm:
        assert llm.generate("One, two,", max_tokens=8, temperature=0).usage.output_tokens == 8
        (pid,) = pids_of(llm.engine).values()
        with llm.stream("One, two,", max_tokens=500, ignore_eos=True) as stream:
            next(iter(stream))
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="rank 1 was killed by SIGKILL"):
                list(stream)
        with pytest.raises(EngineError, match="rank 1 was killed by SIGKILL"):
            llm.generate("One, two,", max_tokens=8)
        wait_until(lambda: all_gone([pid]), GONE_S)


@pytest.mark.matrix
def test_all_ranks_end_with_the_first(tmp_path):
    """Killed, and stopped and then killed, and rank 0 itself."""
    path = write_tiny_model(tmp_path, tokenizer=False)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with running(path, tp=4) as engine:
            lost: list[float] = []
            engine.ranks.call_when_lost(lambda _, lost=lost: lost.append(time.monotonic()))
            pids = pids_of(engine)
            run = submit(engine, prompt_of(20), 1000, ignore_eos=True)
            os.kill(pids[2], number)
            if number == signal.SIGSTOP:
                time.sleep(0.5)
                os.kill(pids[2], signal.SIGKILL)
            assert run.done.wait(GONE_S)
            assert run.failed is not None
            assert run.failed.reason is FailureReason.INTERNAL
            assert len(lost) == 1
            assert engine.lost == "rank 2 was killed by SIGKILL"
            wait_until(lambda pids=pids: all_gone(list(pids.values())), GONE_S)
            again = submit(engine, prompt_of(20), 8)
            assert again.done.wait(GONE_S)
            assert again.failed is not None


def test_a_draw_that_waits_for_masks_ends_when_the_ranks_are_lost():
    """A step that runs gets its masks, though the ranks are lost meanwhile. One that was launched
    later does not run, and fails."""

    class Keeping:
        lost = ""

    own, keeper, sent = NullExecutor(), Keeping(), []
    masks: list[object] = []
    own.sample = masks.append
    executor = RankedExecutor(own, keeper, sent.append)
    plan = SimpleNamespace(sample_slots=[0])
    assert executor.launch(plan).result().tokens.tolist() == [0]
    keeper.lost = "rank 1 ended with code 1"
    executor.sample(None)
    assert masks == [None]
    with pytest.raises(RankError, match="rank 1 ended with code 1"):
        executor.launch(plan).result()
    executor.sample(None)
    assert (masks, sent) == ([None], [plan])


def test_a_step_that_ends_after_the_ranks_are_lost_fails():
    """On a GPU it may: the device is let go, and what it computed has no meaning."""
    own: Future[Any] = Future()
    keeper = SimpleNamespace(lost="", reason=lambda _: "")
    rank_0 = SimpleNamespace(shaped=lambda plan: plan, launch=lambda _: own)
    executor = RankedExecutor(rank_0, keeper, lambda _: None)
    launched = executor.launch(SimpleNamespace())
    keeper.lost = "rank 1 was killed by SIGKILL"
    own.set_result("tokens")
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        launched.result(1)


def test_an_owner_is_told_of_lost_ranks_though_the_device_cannot_be(tmp_path):
    """A device with an error takes no more copies."""
    ranks = HostRanks(EngineConfig(model=str(tmp_path), device="cpu", tp=2))
    told: list[str] = []
    keeper = SimpleNamespace(call_when_lost=lambda on_lost: told.append(on_lost))

    def let_go() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    ranks._keeper, ranks._group = keeper, SimpleNamespace(let_go=let_go, close=lambda: None)
    lost: list[str] = []
    ranks.call_when_lost(lost.append)
    with pytest.raises(RuntimeError, match="illegal memory"):
        told[0]("rank 1 was killed by SIGKILL")
    assert lost == ["rank 1 was killed by SIGKILL"]
    ranks._keeper = None
    ranks.close()


@pytest.mark.matrix
def test_ranks_end_with_the_process_of_rank_0(tmp_path):
    import subprocess
    import sys

    path = write_tiny_model(tmp_path, tokenizer=False)
    code = (
        "import sys, threading, time; from engine_kit import build; from pathlib import Path\n"
        "engines = []\n"
        "maker = threading.Thread(target=lambda: engines.append(build(Path(sys.argv[1]), tp=4)))\n"
        "maker.start(); maker.join(); time.sleep(1)\n"
        "assert not engines[0].lost, 'ranks must outlive the thread that made the engine'\n"
        "print(*engines[0].ranks.pids.values(), flush=True); time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=environment
    )
    assert child.stdout is not None
    pids = [int(pid) for pid in child.stdout.readline().split()]
    assert len(pids) == 3
    os.kill(pids[0], signal.SIGSTOP)
    child.kill()
    wait_until(lambda: all_gone(pids), GONE_S)
    child.wait()


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_fails_to_load_is_named(how, tmp_path, monkeypatch):
    path = write_tiny_model(tmp_path, tokenizer=False)
    monkeypatch.setenv("BATON_DEBUG_FAILPOINTS", f"rank.load={how}~2")
    why = "rank 2: FailpointError: " if how == "raise" else "rank 2 was killed by SIGKILL"
    with pytest.raises(EngineError, match=why):
        build(path, tp=4)


LATE = [
    (2, "rank.join", "stop", "rank 1 is stopped"),
    (4, "rank.join", "stop", "rank 3 is stopped"),
    (4, "rank.joined", "stop", "rank 3 is stopped"),
    (4, "rank.load", "stop", "rank 3 is stopped"),
    (4, "rank.join", "hang", "rank 3 is not going on"),
    (4, "rank.joined", "hang", "rank 3 is not going on"),
]


@pytest.mark.parametrize(
    ("count", "point", "how", "why"),
    [pytest.param(*one, marks=() if one is LATE[0] else pytest.mark.matrix) for one in LATE],
)
def test_a_rank_whose_start_does_not_go_on_is_named(count, point, how, why, tmp_path, monkeypatch):
    """Between its load and READY, where all others wait for it. None is left."""
    path = write_tiny_model(tmp_path, tokenizer=False)
    monkeypatch.setattr(stats, "STOPPED_S", 2.0)
    if how == "hang":  # It is longer than a busy machine takes to import torch.
        monkeypatch.setattr(stats, "START_S", 60.0)
    monkeypatch.setenv("BATON_DEBUG_FAILPOINTS", f"{point}={how}~{count - 1}")
    the_nursery()  # It stays.
    before = set(psutil.Process().children())
    after_s = 2 if how == "stop" else 60
    with pytest.raises(EngineError, match=f"has not gone on for {after_s} s: {why}"):
        build(path, tp=count)
    wait_until(lambda: set(psutil.Process().children()) <= before, GONE_S)


@pytest.mark.matrix
def test_an_idle_rank_costs_nothing(tmp_path):
    with running(write_tiny_model(tmp_path, tokenizer=False), tp=2) as engine:
        finish(submit(engine, prompt_of(20), 8))
        (pid,) = pids_of(engine).values()
        before = sum(psutil.Process(pid).cpu_times()[:2])
        time.sleep(3)
        assert sum(psutil.Process(pid).cpu_times()[:2]) - before <= 0.03


def test_what_ranks_cannot_do_is_refused(tmp_path, monkeypatch):
    path = write_tiny_model(tmp_path, tokenizer=False)
    with pytest.raises(EngineError, match="tp 0 must be at least 1"):
        build(path, tp=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(EngineError, match="tp 2 needs 2 GPUs, and 1 can be seen here: set tp to"):
        build(path, tp=2, device="cuda")
    with pytest.raises(EngineError, match="pp 2 times tp 1 need 2 GPUs, and 1 can be seen"):
        build(path, pp=2, device="cuda")
    with pytest.raises(EngineError, match="cuda:1 names one GPU for 2 ranks: set device to cuda"):
        build(path, tp=2, device="cuda:1")


@pytest.mark.parametrize(
    ("count", "how"),
    [(2, "stop"), *(pytest.param(4, how, marks=pytest.mark.matrix) for how in ("stop", "hang"))],
)
def test_an_llm_says_that_a_rank_hangs(count, how, tmp_path, monkeypatch):
    """The user's process goes on, and the rank that is the reason is named."""
    last = count - 1
    if how == "hang":
        monkeypatch.setenv("BATON_DEBUG_FAILPOINTS", f"rank.step=hang~{last}@20")
    path = write_tiny_model(tmp_path)
    after_s = 2 if how == "stop" else 20
    with LLM(path, tp=count, device="cpu", debug={"num_pages": 40}, max_sequences=4) as llm:
        pids = pids_of(llm.engine)
        why = f"no step has ended for {after_s} s: rank {last} is "
        why += "stopped" if how == "stop" else "not going on"
        with llm.stream("One, two,", max_tokens=500, ignore_eos=True) as stream:
            next(iter(stream))
            if how == "stop":
                os.kill(pids[last], signal.SIGSTOP)
            # Not before: on a busy machine a step may take as long.
            llm.engine._step_timeout_s = float(after_s)
            with pytest.raises(EngineError, match=why):
                list(stream)
        wait_until(lambda: all_gone(list(pids.values())), GONE_S)


def test_time_is_told_by_rank(tmp_path, monkeypatch):
    """A rank that begins late makes the other wait."""
    monkeypatch.setenv("BATON_DEBUG_FAILPOINTS", "rank.step=sleep:0.03~1")
    with running(write_tiny_model(tmp_path, tokenizer=False), tp=2) as engine:
        assert isinstance(engine.ranks, HostRanks)
        began_ns = time.time_ns()
        finish(submit(engine, prompt_of(20), 12, ignore_eos=True))
        ended_ns = time.time_ns()
        rank_0, rank_1 = engine.ranks.loads()
        assert (rank_0.rank, rank_1.rank) == (0, 1)
        assert rank_0.steps == rank_1.steps >= 12
        assert min(rank_0.busy_s, rank_1.busy_s) > 0
        assert rank_0.waited_s > 0.03 * rank_0.steps
        assert engine.ranks.skew_s > 0.02 * rank_0.steps
        assert engine.rank_skew_s(began_ns, ended_ns) == pytest.approx(engine.ranks.skew_s)
        assert engine.rank_skew_s(ended_ns, time.time_ns()) == 0
        slowest = engine.ranks.stats.slowest
        assert sum(slowest) == rank_0.steps
        assert slowest[1] > slowest[0]
