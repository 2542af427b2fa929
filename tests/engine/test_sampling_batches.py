"""What shares a batch, a slot or a moment with a sequence does not matter to it."""

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
    Request,
    expected,
    random_request,
    take_slot,
)

from engine.sampling import Sampler
from engine.types import SamplingParams, StopRules

GREEDY = SamplingParams(temperature=0)


def random_logits(rng: np.random.Generator, rows: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, 3, (rows, VOCAB)).astype(np.float32))


def test_a_request_draws_the_same_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(11)
    rows, near = 40, 0
    requests, logits = [random_request(rng) for _ in range(rows)], random_logits(rng, rows)
    alone = []
    for row, request in enumerate(requests):
        sampler = Sampler(1, VOCAB, "cpu", EOS, record_margins=True)
        take_slot(sampler, 0, request)
        plan = sampler.plan(np.zeros(1, np.int32), np.zeros(1, np.int64))
        result = sampler.sample(logits[row : row + 1], plan)
        assert result.margin is not None
        near += int(result.margin[0] < NOISE)
        alone.append(int(result.tokens[0]))
    for _ in range(5):
        order, slots = rng.permutation(rows), rng.permutation(64)[:rows].astype(np.int32)
        sampler = Sampler(64, VOCAB, "cpu", EOS)
        for slot, row in zip(slots, order, strict=True):
            take_slot(sampler, int(slot), requests[row])
        result = sampler.sample(logits[order], sampler.plan(slots, np.zeros(rows, np.int64)))
        assert near == 0
        assert result.tokens.tolist() == [alone[row] for row in order]


def test_choices_of_one_prompt_share_a_slot_at_the_first_token() -> None:
    """As a prefill worker draws them; each is what its choice draws in a slot of its own."""
    rng = np.random.default_rng(12)
    params = SamplingParams(seed=99, repetition_penalty=1.5)
    logits = random_logits(rng, 1).repeat(4, 1)
    prompt = np.arange(50, dtype=np.int32)
    shared = Sampler(4, VOCAB, "cpu", EOS)
    shared.assign(2, params, FOREVER, 0, prompt, NONE)
    choices, firsts = np.arange(4), np.zeros(4, np.int64)
    together = shared.sample(logits, shared.plan(np.full(4, 2, np.int32), firsts, choices)).tokens
    apart = Sampler(4, VOCAB, "cpu", EOS)
    for choice in range(4):
        apart.assign(choice, params, FOREVER, choice, prompt, NONE)
    assert torch.equal(together, apart.sample(logits, apart.plan(choices, firsts)).tokens)
    assert len(set(together.tolist())) > 1


def test_steps_in_flight_equal_one_after_another() -> None:
    """Step N + 1 is planned before step N is sampled, and slots change hands on the way."""
    rng = np.random.default_rng(13)
    slots, steps = np.arange(6, dtype=np.int32), 24
    requests = {int(slot): penalised(rng) for slot in slots}
    said: dict[int, list[int]] = {slot: [] for slot in requests}
    planned = dict.fromkeys(requests, 0)
    sampler = Sampler(6, VOCAB, "cpu", EOS)
    for slot, request in requests.items():
        take_slot(sampler, slot, request)
    in_flight, compared = [], 0
    for step in range(steps):
        if step in (7, 8, 15):
            # The slot's last draw is still in flight, and comes to nothing.
            slot = step % 6
            requests[slot], planned[slot], said[slot] = penalised(rng), 3, [4, 5, 4]
            take_slot(sampler, slot, requests[slot], [4, 5, 4])
        indices = np.array([planned[int(slot)] for slot in slots])
        in_flight.append((sampler.plan(slots, indices), indices, dict(requests)))
        for slot in planned:
            planned[slot] += 1
        if len(in_flight) < 2:
            continue
        plan, drawn, owners = in_flight.pop(0)
        logits = random_logits(rng, 6)
        tokens = sampler.sample(logits, plan).tokens.tolist()
        for slot, request in owners.items():
            if request is not requests[slot]:
                continue
            row = logits[slot].double().numpy()
            hoped = expected(row, request, said[slot], int(drawn[slot]), EOS)
            if min(hoped.margin, hoped.edge) > NOISE:
                compared += 1
                assert tokens[slot] == hoped.token
            said[slot].append(tokens[slot])
    assert compared > 0.95 * (6 * (steps - 1) - 3)


def penalised(rng: np.random.Generator) -> Request:
    params = SamplingParams(
        temperature=float(rng.choice([0, 1])),
        frequency_penalty=1.0,
        presence_penalty=0.5,
        repetition_penalty=1.3,
        seed=int(rng.integers(2**32)),
    )
    return Request(params, FOREVER, tuple(rng.integers(0, VOCAB, 30).tolist()))


def test_a_slot_forgets_everything() -> None:
    """After any number of other tenants, a sequence draws as in a new sampler."""
    rng = np.random.default_rng(14)
    sampler, slot = Sampler(2, VOCAB, "cpu", EOS), np.zeros(1, np.int32)
    for _ in range(60):
        request = random_request(rng)
        take_slot(sampler, 0, request)
        fresh = Sampler(2, VOCAB, "cpu", EOS)
        take_slot(fresh, 0, request)
        for index in range(int(rng.integers(0, 4))):
            logits, at = random_logits(rng, 1), np.array([index])
            used, new = (s.sample(logits, s.plan(slot, at)).tokens for s in (sampler, fresh))
            assert torch.equal(used, new)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_row_is_flagged_and_disturbs_no_other(bad: float) -> None:
    rng = np.random.default_rng(15)
    rows = 24
    requests, logits = [random_request(rng) for _ in range(rows)], random_logits(rng, rows)
    broken = logits.clone()
    broken[[3, 10], [100, 0]] = bad
    broken[17] = bad
    results = []
    for values in (logits, broken):
        sampler = Sampler(rows, VOCAB, "cpu", EOS)
        for slot, request in enumerate(requests):
            take_slot(sampler, slot, request)
        plan = sampler.plan(np.arange(rows, dtype=np.int32), np.zeros(rows, np.int64))
        results.append(sampler.sample(values, plan))
    hurt = torch.zeros(rows, dtype=torch.bool)
    hurt[[3, 10, 17]] = True
    assert results[0].finite.all()
    assert torch.equal(results[1].finite, ~hurt)
    assert torch.equal(results[0].tokens[~hurt], results[1].tokens[~hurt])
    assert ((results[1].tokens >= 0) & (results[1].tokens < VOCAB)).all()


def test_a_greedy_batch_pays_for_nothing() -> None:
    """Not for its neighbours in other slots, nor for filters that cannot change an argmax."""
    sampler = Sampler(8, VOCAB, "cpu", EOS)
    for slot in range(4):
        params = SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1)
        sampler.assign(slot, params, StopRules(10, ignore_eos=True, min_tokens=5), 0, NONE, NONE)
    sampler.assign(5, SamplingParams(frequency_penalty=1.0), FOREVER, 0, NONE, NONE)
    plan = sampler.plan(np.arange(4, dtype=np.int32), np.zeros(4, np.int64))
    assert plan.draw is plan.penalties is plan.adjustments is plan.logprobs is None
    logits = torch.randn(4, VOCAB)
    result = sampler.sample(logits, plan)
    assert torch.equal(result.tokens, logits.argmax(-1))
    assert result.logprob is result.top_ids is result.top_logprobs is result.margin is None
    assert sampler._history is None


def test_only_rows_that_ask_are_planned_for() -> None:
    sampler, slots = Sampler(6, VOCAB, "cpu", EOS), np.array([5, 0, 3, 1], np.int32)
    for slot in range(6):
        sampler.assign(slot, GREEDY, FOREVER, 0, NONE, NONE)
    sampler.assign(3, SamplingParams(top_p=0.5), FOREVER, 0, NONE, NONE)
    sampler.assign(0, SamplingParams(0, top_logprobs=2), StopRules(9, 2), 0, NONE, NONE)
    plan = sampler.plan(slots, np.array([0, 1, 0, 0]))
    assert plan.draw is not None
    assert plan.draw.rows.tolist() == [2]
    assert plan.draw.floor is None
    assert plan.logprobs is not None
    assert plan.logprobs.rows.tolist() == [1]
    assert plan.adjustments is not None
    assert set(plan.adjustments.rows.tolist()) == {1}
    assert sampler.plan(slots, np.array([0, 2, 0, 0])).adjustments is None


def test_logits_are_left_as_they_are() -> None:
    rng = np.random.default_rng(16)
    sampler, logits = Sampler(24, VOCAB, "cpu", EOS), random_logits(rng, 24)
    for slot in range(24):
        take_slot(sampler, slot, random_request(rng))
    before = logits.clone()
    sampler.sample(logits, sampler.plan(np.arange(24, dtype=np.int32), np.zeros(24, np.int64)))
    assert torch.equal(logits, before)


@pytest.mark.gpu
def test_a_gpu_draws_the_same_and_is_never_waited_for() -> None:
    rng = np.random.default_rng(17)
    requests, logits = [random_request(rng) for _ in range(40)], random_logits(rng, 40)
    slots, near, drawn = np.arange(40, dtype=np.int32), torch.zeros(5, 40, dtype=torch.bool), []
    for device in ("cpu", "cuda"):
        sampler, rows, tokens = Sampler(40, VOCAB, device, EOS, True), logits.to(device), []
        for slot, request in enumerate(requests):
            take_slot(sampler, slot, request)
        for index in range(5):
            plan = sampler.plan(slots, np.full(40, index))
            torch.cuda.set_sync_debug_mode("error")
            result = sampler.sample(rows, plan)
            torch.cuda.set_sync_debug_mode("default")
            assert result.margin is not None
            near[index] |= result.margin.cpu() < NOISE
            tokens.append(result.tokens.cpu())
        drawn.append(torch.stack(tokens))
    near = near.cumsum(0) > 0  # once the draws may part, penalties part them further
    assert torch.equal(drawn[0][~near], drawn[1][~near])
    assert near.float().mean() < 0.1
