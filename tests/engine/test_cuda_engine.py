"""The engine on a GPU: graphs against kernels one by one, and both against transformers."""

from __future__ import annotations

import gc
import re
import threading
import time

import numpy as np
import pytest
import torch
from engine_kit import Run, build, finish, hand_off, stop, submit
from hooks_kit import ALL, QUEST, installed
from llguidance import LLMatcher
from paths_kit import prompt_of
from tiny_families import DENSE
from tiny_models import write_tiny_model
from tokenizers import Tokenizer

from engine.types import SamplingParams, TokenRecord

pytestmark = pytest.mark.gpu

SHAPES = {
    "gqa4-128": {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 128},
    "gqa8-64": {"hidden": 512, "heads": 8, "kv_heads": 1, "head_dim": 64},
    "mha-64-tied": {"heads": 4, "kv_heads": 4, "head_dim": 64, "tie_word_embeddings": True},
    "qk-norm": {"family": "qwen3", "heads": 8, "kv_heads": 2, "head_dim": 128},
    "window": {"family": "mistral", "sliding_window": 24, "head_dim": 64},
    "experts": {
        "family": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 128,
        "moe_intermediate_size": 64, "norm_topk_prob": True,
    },
    "shared-expert": {
        "family": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "hidden": 256,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128,
    },
    "gpt-oss": {
        "family": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 4, "head_dim": 64,
        "sliding_window": 24, "swiglu_limit": 1.5,
    },
    "biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 64},
    **{name: {**DENSE[name], "head_dim": 64} for name in ("gemma2", "gemma3", "phi3", "granite")},
    "odd": {"family": "olmo2", "head_dim": 96},
}  # fmt: skip
LENGTHS = (1, 15, 16, 17, 64, 200, 300)


def build_on_gpu(path, **options):
    defaults = {"device": "cuda", "max_step_tokens": 256, "max_sequences": 40, "num_pages": 600}
    return build(path, **{**defaults, **options})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, **SHAPES["gqa4-128"])


@pytest.fixture(scope="module")
def engine(model_path):
    engine = build_on_gpu(model_path)
    yield engine
    stop(engine)


def run_all(engine, lengths=LENGTHS, max_tokens=40, **options) -> list[Run]:
    """All are there before the first step: how many rows a step has decides the last bits."""
    all_there = threading.Event()
    engine._loop.post(lambda _: all_there.wait(10))
    runs = [
        submit(engine, prompt_of(n), max_tokens, min_tokens=max_tokens, **options) for n in lengths
    ]
    all_there.set()
    finish(*runs)
    return runs


def logprobs_of(path, dtype, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        logits = model.to("cuda")(torch.tensor([tokens], device="cuda")).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_log_probabilities_are_as_near_as_transformers(shape, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **SHAPES[shape])
    engine = build_on_gpu(path, prefix_cache=False)
    sampling = SamplingParams(temperature=0.0, top_logprobs=0)
    scored, plain = (
        submit(engine, prompt_of(70), 30, sampling=sampling, min_tokens=30, prompt_logprobs=score)
        for score in (True, False)
    )
    finish(scored, plain)
    engine.stop()
    assert scored.scored is not None
    check_log_probabilities(path, scored, [*scored.scored.records, *scored.records[0]])
    check_log_probabilities(path, plain, plain.records[0])


@pytest.mark.parametrize(
    "spec", ["quiet?graphs=yes", "quiet?graphs=no", "quest?sparse_tokens=1024"]
)
def test_hooks_that_change_nothing_keep_log_probabilities(spec, tmp_path):
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **SHAPES["gqa4-128"])
    with installed(tmp_path / "installed", ALL, QUEST):
        engine = build_on_gpu(path, hooks=(spec,), prefix_cache=False)
        sampling = SamplingParams(temperature=0.0, top_logprobs=0)
        run = submit(engine, prompt_of(70), 30, sampling=sampling, min_tokens=30)
        finish(run)
        assert not engine.load().hook_failures
        engine.stop()
    check_log_probabilities(path, run, run.records[0])


def check_log_probabilities(path, run: Run, records: list[TokenRecord]) -> None:
    """Of the last tokens: the mean error is about that of transformers in the same precision."""
    tokens = [*run.request.prompt_ids.tolist(), *run.tokens[0]]
    ids = torch.tensor(tokens[1:], device="cuda")[:, None]
    exact, theirs = (
        logprobs_of(path, dtype, tokens)[:-1].gather(1, ids).squeeze(1)[-len(records) :]
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours = torch.tensor([record.logprob for record in records], device="cuda")
    error, bound = (ours - exact).abs().mean(), (theirs - exact).abs().mean()
    assert error <= 1.6 * bound + 2e-3, (error, bound)


def test_graphs_give_what_the_kernels_give(engine, model_path):
    plain = build_on_gpu(model_path, cuda_graphs=False)
    options = {"sampling": SamplingParams(temperature=0.0, top_logprobs=2)}
    for lengths in ((200,), LENGTHS):
        with_graphs, without = (run_all(e, lengths, **options) for e in (engine, plain))
        for a, b in zip(with_graphs, without, strict=True):
            assert a.records == b.records
    plain.stop()


@pytest.mark.parametrize("shape", ["gpt-oss", "gemma2", "gemma3"])
def test_windows_that_free_their_pages(shape, tmp_path):
    """With graphs, without, and where windows keep all pages: other divisions of the same sums."""
    path = write_tiny_model(tmp_path, tokenizer=False, **SHAPES[shape])
    options = {"sampling": SamplingParams(temperature=0.0, top_logprobs=0), "choices": 2}
    found = []
    for how in ({}, {"cuda_graphs": False}, {"kv_host_bytes": 1 << 24}):
        engine = build_on_gpu(path, poison_freed_pages=True, **how)
        assert len(engine.pools) == (1 if "kv_host_bytes" in how else 2)
        # Prompts in one step, then in chunks, then from the cache.
        found.append([run_all(engine, (*LENGTHS, 700), **options) for _ in range(2)])
        assert engine.load().damaged_pages == 0
        stop(engine)
    for again in range(2):
        for other in found[1:]:
            for a, b in zip(found[0][again], other[again], strict=True):
                same = np.array(a.tokens[0]) == np.array(b.tokens[0])
                alike = len(same) if same.all() else int(same.argmin())
                assert alike > 3, "the first tokens differ"
                for mine, theirs in list(zip(a.records[0], b.records[0], strict=True))[:alike]:
                    assert abs(mine.logprob - theirs.logprob) < 0.1


def test_greedy_kernel_agrees_with_the_sampler(engine):
    scored = run_all(engine, sampling=SamplingParams(temperature=0.0, top_logprobs=0))
    for a, b in zip(run_all(engine), scored, strict=True):
        assert a.tokens == b.tokens


def test_a_seed_decides_what_is_drawn(engine):
    sampling = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=7)
    first, again = (run_all(engine, (64,), sampling=sampling)[0].tokens for _ in range(2))
    assert first == again
    other = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=8)
    assert run_all(engine, (64,), sampling=other)[0].tokens != first


def test_penalties_bias_and_choices_run(engine):
    sampling = SamplingParams(
        temperature=0.7, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={5: 2.0}, seed=1
    )
    run = submit(engine, prompt_of(33), 20, choices=3, sampling=sampling, min_tokens=20)
    finish(run)
    assert [len(tokens) for tokens in run.tokens] == [20, 20, 20]


ALLOWED = tuple(range(40, 90))


def test_rows_with_masks_leave_the_others_alone(model_path):
    """Of one step, with graphs and without, greedy and sampled. Cached pages would differ in their
    last bits, since other steps wrote them."""
    engine, plain = (
        build_on_gpu(model_path, cuda_graphs=graphs, prefix_cache=False) for graphs in (True, False)
    )
    for temperature in (0.0, 0.9):
        free = SamplingParams(temperature=temperature, seed=3)
        held = SamplingParams(temperature=temperature, seed=3, allowed_token_ids=ALLOWED)
        before = run_all(engine, sampling=free)
        found = [run_mixed(e, free, held) for e in (engine, plain)]
        assert [run.tokens for run in found[0]] == [run.tokens for run in found[1]]
        for run, was in zip(found[0][::2], before[::2], strict=True):
            assert run.tokens == was.tokens
        for run in found[0][1::2]:
            assert set(run.tokens[0]) <= set(ALLOWED)
            assert len(set(run.tokens[0])) > 3
    stop(engine, plain)


def run_mixed(engine, free: SamplingParams, held: SamplingParams) -> list[Run]:
    """Every second row has a mask."""
    all_there = threading.Event()
    engine._loop.post(lambda _: all_there.wait(10))
    runs = [
        submit(engine, prompt_of(n), 40, min_tokens=40, sampling=held if i % 2 else free)
        for i, n in enumerate(LENGTHS)
    ]
    time.sleep(0.3)  # Matchers are made on a thread.
    all_there.set()
    finish(*runs)
    return runs


def test_grammars_hold_through_graphs_and_hand_offs(tmp_path):
    path = write_tiny_model(tmp_path, **SHAPES["gqa4-128"])
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    grammar = LLMatcher.grammar_from_regex(r"[a-d]{5,9}-[0-9]{3}(, [a-z]+){2,4}")
    sampling = SamplingParams(temperature=1.2, seed=5, grammar=grammar)
    first, second = build_on_gpu(path), build_on_gpu(path)
    whole = submit(first, prompt_of(90), 60, choices=3, sampling=sampling)
    finish(whole)
    for end, tokens in zip(whole.ends, whole.tokens, strict=True):
        text = tokenizer.decode(tokens)
        assert re.match(r"[a-d]{5,9}-[0-9]{3}(, [a-z]+)*", text), text
        assert end is not None
    handed = hand_off(second, first, prompt_of(90), 60, choices=3, sampling=sampling)
    assert handed.tokens == whole.tokens
    stop(first, second)


def test_hand_off_between_engines(engine, model_path):
    other = build_on_gpu(model_path)
    run = hand_off(other, engine, prompt_of(100), 20, min_tokens=20)
    assert len(run.tokens[0]) == 20
    other.stop()


def test_a_model_that_allows_endless_contexts_leaves_room_for_the_pool(tmp_path):
    """Its tables have rows for what the pool can hold, and are made in little more memory."""
    tokens = []
    for longest in (1 << 24, 1 << 20):
        path = write_tiny_model(
            tmp_path / str(longest), tokenizer=False, max_positions=longest, **SHAPES["gqa4-128"]
        )
        gc.collect()
        torch.cuda.empty_cache()
        engine = build_on_gpu(path, num_pages=0, gpu_memory_utilization=0.2)
        tokens.append(16 * (engine.pool.num_pages - 1))
        assert engine.model.max_context_tokens == min(longest, tokens[-1])
        run_all(engine)
        stop(engine)
    assert tokens[0] > tokens[1] / 2


def test_the_pool_takes_what_the_device_has_left(model_path):
    gc.collect()
    torch.cuda.empty_cache()
    engine = build_on_gpu(model_path, num_pages=0, gpu_memory_utilization=0.5)
    used = torch.cuda.memory_reserved()
    total = torch.cuda.mem_get_info()[1]
    assert 0.3 * total < used < 0.5 * total
    run_all(engine)
    stop(engine)
