"""Layers with states on a GPU: kernels against the reference, and whole engines."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch
from engine_kit import build, finish, hand_off, running, stop, submit
from tiny_families import HYBRIDS
from tiny_models import reference_model, write_tiny_model

pytestmark = pytest.mark.gpu
NEAR, FAR = 0.5, 0.25
"""How far a token's logit may be from the best one of float32, where bfloat16 chooses; the share of
tokens that may be farther, since they took other experts (on a CPU to 0.13; without a state 1)."""


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_kernels_give_what_the_reference_gives(kind):
    """Decode rows, prompts, chunks at the grid bit by bit, and the states that they leave."""
    from bench.states import check

    with torch.inference_mode():
        check(kind)


EAGER = "nemotron_h_experts"
"""Experts without gates have no fused kernels."""


@pytest.fixture(params=HYBRIDS)
def folder(request, tmp_path):
    return write_tiny_model(tmp_path / request.param, tokenizer=False, **HYBRIDS[request.param])


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, 384, length).tolist()


reference = cache(partial(reference_model, dtype=torch.float32))


def gaps(path, prompt: list[int], answer: list[int]) -> list[float]:
    """How far each token's logit is from the best, in a pass of transformers over all before it."""
    with torch.inference_mode():
        ids = torch.tensor([prompt + answer[:-1]])
        logits = reference(path)(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return (logits.max(1).values - chosen).tolist()


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_answers_as_on_a_cpu(folder, graphs):
    """Together, in chunks, cached, forked and handed off; the second time from the cache."""
    from engine.cuda.executor import CudaExecutor

    options = {"dtype": "bfloat16", "device": "cuda", "max_sequences": 12, "cuda_graphs": graphs}
    engine = build(folder, max_step_tokens=128, **options)
    assert isinstance(engine._loop._executor, CudaExecutor) is (EAGER not in folder.parts)
    prompts = [prompt_of(length) for length in (5, 64, 129, 300)]
    off = []
    for choices in (1, 1, 3):
        runs = [submit(engine, each, 12, choices=choices, ignore_eos=True) for each in prompts]
        finish(*runs)
        for prompt, run in zip(prompts, runs, strict=True):
            for answer in run.tokens:
                off += gaps(folder, prompt, answer)
    assert engine.load().prompt_tokens_cached >= 2 * (128 + 256)
    other = build(folder, max_step_tokens=512, **options)
    run = hand_off(other, engine, prompt_of(200), 12, ignore_eos=True)
    off += gaps(folder, prompt_of(200), run.tokens[0])
    assert np.mean(np.array(off) > NEAR) < FAR
    stop(engine, other)


def test_a_wrong_stamp_is_found(tmp_path):
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **HYBRIDS["qwen3_5"])
    with running(path, dtype="bfloat16", device="cuda", max_step_tokens=128) as engine:
        finish(submit(engine, prompt_of(130), 4, ignore_eos=True))
        for layer in range(2):
            engine.pools[1].stamps(layer).add_(1)
        again = submit(engine, prompt_of(130), 4, ignore_eos=True)
        finish(again)
        assert max(gaps(path, prompt_of(130), again.tokens[0])) < NEAR
        assert engine.load().preemptions == 1, "it was computed again"
