"""Classes of transformers through their own code: greedy tokens and logits equal those of one whole
forward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_kit import build, check_baseline, finish, hand_off, submit
from references import References
from test_model_logits import Runner, reference
from tiny_models import write_tiny_model
from tiny_wrapped import PATHS, WRAPPED

from engine.model import load_model

QUICK = "vaultgemma"
MAX_TOKENS = 12
every = pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each == QUICK else pytest.mark.matrix) for each in WRAPPED],
)


@every
def test_logits_equal_one_whole_pass(name, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **WRAPPED[name])
    ids = np.random.default_rng(1).integers(1, 384, 60).tolist()
    want = reference(path, ids)
    loaded = load_model(
        str(path), dtype=torch.float32, device=torch.device("cpu"), model_impl="transformers"
    )
    whole = Runner(loaded).step([(0, ids)])[0]
    torch.testing.assert_close(whole, want, atol=1e-4, rtol=1e-4)
    chunked, other = Runner(loaded, seed=2), list(reversed(ids))
    parts = [chunked.step([(0, ids[:16])])[0]]
    parts.append(chunked.step([(0, ids[16:35]), (1, other[:20])])[0])
    parts.append(chunked.step([(1, other[20:21]), (0, ids[35:52])])[1])
    parts += [
        chunked.step([(1, [one]), (0, [token])])[1]
        for one, token in zip(other[21:], ids[52:], strict=False)
    ]
    torch.testing.assert_close(torch.cat(parts), want, atol=1e-4, rtol=1e-4)


@every
def test_greedy_tokens(name, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **WRAPPED[name])
    answers = References(path, whole=True)
    options = {"num_pages": 40, "max_sequences": 4, "model_impl": "transformers"}
    one, other = build(path, **options, max_step_tokens=32), build(path, **options)
    try:
        prompt = np.random.default_rng(7).integers(1, 384, 70).tolist()
        for _ in range(2):
            run = submit(one, prompt, MAX_TOKENS, ignore_eos=True)
            finish(run)
            answers.check(run, MAX_TOKENS)
        assert one.load().prompt_tokens_cached > 0
        run = hand_off(one, other, prompt[:45], MAX_TOKENS, ignore_eos=True)
        answers.check(run, MAX_TOKENS)
        check_baseline(one)
        check_baseline(other)
    finally:
        one.stop()
        other.stop()


def test_so_many_classes() -> None:
    assert len(WRAPPED) >= 25
    assert set(PATHS) <= set(WRAPPED)
