"""Greedy output equals transformers, token for token, by every path through the engine."""

from __future__ import annotations

import flash_attn_like
import pytest
import torch
from engine_kit import build, check_baseline, finish, hand_off, running, submit
from paths_kit import prompt_of
from references import references

from engine.attention.fa2 import Fa2Backend
from engine.engine import EngineError
from engine.model.decoder import Model
from engine.pages.watch import CacheEvent, CacheEventKind
from engine.types import EndReason, Mode, SamplingParams

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 200)


@pytest.fixture(scope="module")
def reference(tiny_path):
    """Greedy continuation by transformers, without stopping."""
    answers = references(tiny_path)
    return lambda prompt, max_tokens: answers(prompt, max_tokens, past_end=True).tokens


@pytest.fixture(scope="module")
def engine(tiny_path):
    with running(tiny_path) as engine:
        yield engine


@pytest.fixture(scope="module")
def other(tiny_path):
    with running(tiny_path, max_step_tokens=32) as engine:
        yield engine


@pytest.mark.parametrize("length", LENGTHS)
def test_whole(engine, reference, length):
    prompt = prompt_of(length)
    run = submit(engine, prompt, 24, ignore_eos=True)
    finish(run)
    assert run.tokens == [reference(prompt, 24)]
    assert run.ends[0].reason is EndReason.LENGTH


def test_from_the_prefix_cache(engine, reference):
    prompt = prompt_of(100, seed=1)
    before = engine.load().prompt_tokens_cached
    for _ in range(2):
        run = submit(engine, prompt, 24, ignore_eos=True)
        finish(run)
        assert run.tokens == [reference(prompt, 24)]
    assert engine.load().prompt_tokens_cached - before == 96


def test_a_request_is_waited_for_once(engine):
    """A test that waits again fails at once: it would wait for a minute."""
    run = submit(engine, list(range(40, 60)), 4)
    finish(run)
    with pytest.raises(AssertionError, match="waited for before"):
        finish(run)


@pytest.mark.parametrize(("length", "choices"), [*zip(LENGTHS, [1, 3] * 4, strict=True)])
def test_handed_off(engine, other, reference, length, choices):
    prompt = prompt_of(length, seed=3)
    run = hand_off(other, engine, prompt, 24, choices=choices, ignore_eos=True)
    assert run.tokens == [reference(prompt, 24)] * choices
    check_baseline(engine)
    check_baseline(other)


def test_choices_of_a_seeded_request_differ_and_repeat(engine):
    sampling = SamplingParams(temperature=1.0, seed=7)
    runs = [submit(engine, prompt_of(30), 12, choices=3, sampling=sampling) for _ in range(2)]
    finish(*runs)
    assert runs[0].tokens == runs[1].tokens
    assert len({tuple(tokens) for tokens in runs[0].tokens}) == 3


def test_a_seeded_request_draws_the_same_alone_in_a_batch_and_handed_off(engine, other):
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
    prompt = prompt_of(37)
    solo = submit(engine, prompt, 16, sampling=sampling)
    finish(solo)
    crowd = [submit(engine, prompt_of(20 + i, seed=5), 30) for i in range(8)]
    batched = submit(engine, prompt, 16, sampling=sampling)
    finish(batched, *crowd)
    handed = hand_off(other, engine, prompt, 16, sampling=sampling)
    assert solo.tokens == batched.tokens == handed.tokens


def test_penalties_go_on_across_the_hand_off(engine, other):
    sampling = SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3)
    prompt = prompt_of(30, seed=6)
    whole = submit(engine, prompt, 24, sampling=sampling)
    finish(whole)
    handed = hand_off(other, engine, prompt, 24, sampling=sampling)
    assert whole.tokens == handed.tokens
    plain = submit(engine, prompt, 24)
    finish(plain)
    assert plain.tokens != whole.tokens


def test_log_probabilities_of_prompt_and_output(engine, tiny_path):
    from transformers import AutoModelForCausalLM

    prompt = prompt_of(70, seed=8)
    sampling = SamplingParams(temperature=0.0, top_logprobs=3)
    run = submit(engine, prompt, 6, sampling=sampling, prompt_logprobs=True, min_tokens=6)
    finish(run)
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    ids = [*prompt, *run.tokens[0]]
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert run.scored is not None
    records = [*run.scored.records, *run.records[0]]
    assert [record.token_id for record in records] == ids[1:]
    for position, record in enumerate(records):
        best = logprobs[position].topk(3)
        assert record.logprob == pytest.approx(
            float(logprobs[position, ids[position + 1]]), abs=1e-4
        )
        assert list(record.top_ids) == best.indices.tolist()
        assert record.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


def test_end_of_sequence_stop_ids_and_min_tokens(engine, reference):
    prompt = prompt_of(33, seed=9)
    free = reference(prompt, 24)
    stop = free[5]
    first = free.index(stop)
    run = submit(engine, prompt, 24, token_ids=frozenset({stop}), ignore_eos=True)
    finish(run)
    assert run.tokens == [free[: first + 1]]
    assert run.ends[0].reason is EndReason.STOP_TOKEN
    late = submit(engine, prompt, 24, token_ids=frozenset({stop}), min_tokens=10)
    finish(late)
    assert len(late.tokens[0]) > 10
    assert stop not in late.tokens[0][:10]


def test_a_first_token_that_ends_it_is_told_with_the_prefill(engine, reference):
    prompt = prompt_of(33, seed=9)
    stop = frozenset({reference(prompt, 24)[0]})
    run = submit(engine, prompt, 24, mode=Mode.PREFILL, token_ids=stop)
    finish(run)
    assert run.prefilled is not None
    assert run.prefilled.ends == (EndReason.STOP_TOKEN,)
    engine.release(run.request.id)


def test_a_pool_that_cannot_be_is_refused_in_words(tiny_path):
    with pytest.raises(EngineError, match="num_pages"):
        build(tiny_path, num_pages=10**9)
    with pytest.raises(EngineError, match="max_step_tokens"):
        build(tiny_path, max_step_tokens=8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_in_words(tiny_path):
    with pytest.raises(EngineError, match="cannot be cuda: the PyTorch that is installed"):
        build(tiny_path, device="cuda")


def test_flash_attention_2_over_a_stand_in_for_its_library(tiny_path, reference, monkeypatch):
    """Chunks, decode rows and a prefix from the cache, pages of 256 tokens."""
    monkeypatch.setattr(
        "engine.parts.building.choose_backend",
        lambda _name, pool, specs, **_: Fa2Backend(pool, specs, flash_attn_like),
    )
    with running(tiny_path, page_size=256, num_pages=40, max_step_tokens=300) as engine:
        prompt = prompt_of(700, seed=9)
        for _ in range(2):
            run = submit(engine, prompt, 12, ignore_eos=True)
            finish(run)
            assert run.tokens == [reference(prompt, 12)]
        assert engine.load().prompt_tokens_cached == 512


def test_prompt_log_probabilities_read_no_cache_and_are_computed_in_row_chunks(
    engine, tiny_path, monkeypatch
):
    """A cached prefix has no logits left to score, and a long prompt's would not fit at once."""
    prompt = prompt_of(90, seed=12)
    plain = submit(engine, prompt, 4)
    finish(plain)
    rows: list[int] = []
    of_model = Model.logits

    def logits(self, hidden):
        rows.append(len(hidden))
        return of_model(self, hidden)

    whole = submit(engine, prompt, 4, prompt_logprobs=True)
    finish(whole)
    before = engine.load().prompt_tokens_cached
    monkeypatch.setattr("engine.eager.steps.SCORE_ROWS", 7)
    monkeypatch.setattr(Model, "logits", logits)
    chunked = submit(engine, prompt, 4, prompt_logprobs=True)
    finish(chunked)
    monkeypatch.undo()
    assert engine.load().prompt_tokens_cached == before
    assert max(rows) == 7
    assert sum(rows) == 89 + 4
    assert chunked.tokens == whole.tokens == plain.tokens
    assert chunked.scored is not None
    assert whole.scored is not None
    ids = [[record.token_id for record in run.scored.records] for run in (chunked, whole)]
    assert ids == [prompt[1:]] * 2
    for one, other in zip(chunked.scored.records, whole.scored.records, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_whoever_subscribes_hears_of_the_cache(tiny_path):
    engine = build(tiny_path, num_pages=12)
    heard: list[CacheEvent] = []
    try:
        engine.subscribe(heard.append)
        prompt = prompt_of(40, seed=13)
        for _ in range(2):
            finish(submit(engine, prompt, 4))
        for seed in range(3):
            finish(submit(engine, prompt_of(90, seed=14 + seed), 4))
        check_baseline(engine)
    finally:
        engine.stop()
    assert [event.sequence for event in heard] == list(range(1, len(heard) + 1))
    stored = [event.key for event in heard if event.kind is CacheEventKind.STORED]
    hits = [event.key for event in heard if event.kind is CacheEventKind.HIT]
    evicted = [event.key for event in heard if event.kind is CacheEventKind.EVICTED]
    assert hits == stored[:2], "the pages of the first prompt, the second time"
    assert set(hits) <= set(evicted), "others needed them"
