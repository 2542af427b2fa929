"""Layers with states on a GPU: kernels against the reference, and whole engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_kit import build, check_baseline, finish, hand_off, submit
from test_model_logits import Runner, load
from tiny_families import HYBRIDS
from tiny_models import write_tiny_model

pytestmark = pytest.mark.gpu
NEAR = 0.5
"""How far a token's logit may be from the best one of float32, where bfloat16 chooses."""


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_kernels_give_what_the_reference_gives(kind):
    """Decode rows, prompts, chunks at the grid bit by bit, and the states that they leave."""
    from bench.states import check

    with torch.inference_mode():
        check(kind)


@pytest.fixture(params=HYBRIDS)
def folder(request, tmp_path):
    return write_tiny_model(tmp_path / "model", tokenizer=False, **HYBRIDS[request.param])


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, 384, length).tolist()


def check(path, prompt: list[int], answer: list[int]) -> None:
    tokens = prompt + answer
    logits = Runner(load(path)).step([(0, tokens[:-1])])[0][len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < NEAR


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_answers_as_on_a_cpu(folder, graphs):
    """Together, in chunks, cached, forked and handed off; the second time from the cache."""
    from engine.cuda.executor import CudaExecutor

    options = {"dtype": "bfloat16", "device": "cuda", "max_sequences": 6, "cuda_graphs": graphs}
    engine = build(folder, max_step_tokens=128, **options)
    assert isinstance(engine._loop._executor, CudaExecutor)
    prompts = [prompt_of(length) for length in (5, 64, 129, 300)]
    for choices in (1, 1, 3):
        runs = [submit(engine, each, 12, choices=choices, ignore_eos=True) for each in prompts]
        finish(*runs)
        for prompt, run in zip(prompts, runs, strict=True):
            for answer in run.tokens:
                check(folder, prompt, answer)
    assert engine.load().prompt_tokens_cached >= 2 * (128 + 256)
    other = build(folder, max_step_tokens=512, **options)
    run = hand_off(other, engine, prompt_of(200), 12, ignore_eos=True)
    check(folder, prompt_of(200), run.tokens[0])
    for each in (engine, other):
        check_baseline(each)
        each.stop()


def test_a_wrong_stamp_is_found(tmp_path):
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **HYBRIDS["qwen3_5"])
    engine = build(path, dtype="bfloat16", device="cuda", max_step_tokens=128)
    finish(submit(engine, prompt_of(130), 4, ignore_eos=True))
    for layer in range(2):
        engine.pools[1].stamps(layer).add_(1)
    again = submit(engine, prompt_of(130), 4, ignore_eos=True)
    finish(again)
    check(path, prompt_of(130), again.tokens[0])
    assert engine.load().preemptions == 1, "it was computed again"
    check_baseline(engine)
    engine.stop()
