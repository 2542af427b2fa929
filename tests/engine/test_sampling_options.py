"""Every option against the plain reference, over random requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_reference import (
    EOS,
    FOREVER,
    NOISE,
    NONE,
    VOCAB,
    expected,
    random_request,
    take_slot,
)

from engine.sampling import Sampler, score
from engine.types import SamplingParams, StopRules


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_choose_the_references_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, steps, compared = 48, 6, 0
    requests = [random_request(rng) for _ in range(rows)]
    said = [rng.integers(0, VOCAB, int(rng.integers(0, 5))).tolist() for _ in range(rows)]
    sampler = Sampler(64, VOCAB, "cpu", EOS, record_margins=True)
    slots = rng.permutation(64)[:rows].astype(np.int32)
    for slot, request, generated in zip(slots, requests, said, strict=True):
        take_slot(sampler, int(slot), request, generated)
    for _ in range(steps):
        logits = torch.from_numpy(rng.normal(0, 3, (rows, VOCAB)).astype(np.float32))
        indices = np.array([len(generated) for generated in said])
        result = sampler.sample(logits, sampler.plan(slots, indices))
        assert result.finite.all()
        assert result.margin is not None
        for row, request in enumerate(requests):
            hoped = expected(logits[row].double().numpy(), request, said[row], len(said[row]), EOS)
            if min(hoped.margin, hoped.edge) > NOISE:
                compared += 1
                assert result.tokens[row] == hoped.token
                assert result.margin[row].item() == pytest.approx(hoped.margin, abs=NOISE)
            said[row].append(int(result.tokens[row]))
    assert compared > 0.97 * rows * steps


def choose(logits: list[float], params: SamplingParams, **stop: object) -> int:
    """One token of a sequence with no past."""
    rules = StopRules(100, **stop)
    sampler = Sampler(1, len(logits), "cpu", [0])
    sampler.assign(0, params, rules, 0, NONE, NONE)
    plan = sampler.plan(np.zeros(1, np.int32), np.zeros(1, np.int64))
    return int(sampler.sample(torch.tensor([logits]), plan).tokens[0])


GREEDY = SamplingParams(temperature=0)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert choose([1, 5, 5, 2], GREEDY) == 1


def test_ids_beyond_the_vocabulary_do_not_matter() -> None:
    biased = SamplingParams(0, logit_bias={4: 100.0, 2**31: 5.0})
    assert choose([9.0, 8, 7, 6], biased, min_tokens=1, token_ids=frozenset({7, 1})) == 2


def test_a_tie_with_the_last_token_kept_is_kept() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0]]).repeat(4000, 1)
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=0.2)):
        sampler = Sampler(1, 4, "cpu", [])
        sampler.assign(0, params, FOREVER, 0, NONE, NONE)
        plan = sampler.plan(np.zeros(4000, np.int32), np.arange(4000))
        seen = torch.bincount(sampler.sample(logits, plan).tokens, minlength=4)
        assert seen[0] == 0
        assert (seen[1:] > 1200).all()


def test_logprobs_are_of_the_models_own_distribution() -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(0, 3, (5, VOCAB)).astype(np.float32))
    sampler = Sampler(8, VOCAB, "cpu", EOS)
    wanted = (None, 3, 0, 5, None)
    for slot, top in enumerate(wanted):
        params = SamplingParams(
            0.5, top_k=4, frequency_penalty=1.0, logit_bias={7: 9.0}, top_logprobs=top
        )
        sampler.assign(slot, params, FOREVER, 0, NONE, NONE)
    result = sampler.sample(logits, sampler.plan(np.arange(5, dtype=np.int32), np.zeros(5, int)))
    exact = logits.double().log_softmax(-1)
    assert result.logprob is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    assert result.top_ids.shape == result.top_logprobs.shape == (5, 5)
    for row, top in enumerate(wanted):
        if top is None:
            assert result.logprob[row] == 0
            assert not result.top_logprobs[row].any()
            continue
        own = exact[row, result.tokens[row]].item()
        assert result.logprob[row].item() == pytest.approx(own, abs=1e-5)
        best = exact[row].topk(5)
        assert result.top_ids[row].tolist() == best.indices.tolist()
        assert result.top_logprobs[row].tolist() == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_of_the_token_alone() -> None:
    sampler = Sampler(1, VOCAB, "cpu", EOS)
    sampler.assign(0, SamplingParams(0, top_logprobs=0), FOREVER, 0, NONE, NONE)
    plan = sampler.plan(np.zeros(1, np.int32), np.zeros(1, int))
    result = sampler.sample(torch.zeros(1, VOCAB), plan)
    assert result.logprob is not None
    assert result.logprob.item() == pytest.approx(-np.log(VOCAB), abs=1e-5)
    assert result.top_ids is None
    assert result.top_logprobs is None


def test_prompt_scores() -> None:
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.normal(0, 3, (9, VOCAB)).astype(np.float32))
    following = torch.from_numpy(rng.integers(0, VOCAB, 9))
    exact = logits.double().log_softmax(-1)
    scores = score(logits, following, 4)
    torch.testing.assert_close(
        scores.logprob.double(), exact[torch.arange(9), following], atol=1e-5, rtol=0
    )
    best = exact.topk(4)
    assert torch.equal(scores.top_ids, best.indices)
    torch.testing.assert_close(scores.top_logprobs.double(), best.values, atol=1e-5, rtol=0)
    assert score(logits, following, 0).top_ids.shape == (9, 0)
