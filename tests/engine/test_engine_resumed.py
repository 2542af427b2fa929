"""A choice that goes on in another engine ends as it would have in the first."""

from __future__ import annotations

import pytest
from engine_kit import build, finish, hand_off, held, running, stop, submit
from paths_kit import prompt_of

from engine.types import SamplingParams

PENALISED = SamplingParams(
    temperature=1.0,
    top_p=0.95,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    repetition_penalty=1.2,
    seed=23,
    top_logprobs=2,
)
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def engines(tiny_path):
    pair = build(tiny_path), build(tiny_path, max_step_tokens=32)
    yield pair
    stop(*pair)


@pytest.fixture(scope="module", params=[SamplingParams(temperature=0.0), PENALISED])
def unbroken(request, engines):
    """Three choices, run from prompt to end at one go."""
    run = submit(
        engines[0], prompt_of(45), MAX_TOKENS, choices=3, sampling=request.param, min_tokens=30
    )
    finish(run)
    return run


@pytest.mark.parametrize(
    ("kept", "choice", "by_hand_off"),
    [(0, 2, False), (0, 0, True), (1, 2, True), (3, 0, False), (19, 2, True), (38, 2, False)],
)
def test_goes_on_as_if_nothing_had_happened(engines, unbroken, kept, choice, by_hand_off):
    """Noise by choice and index, penalties and min_tokens by what was generated before."""
    records = unbroken.records[choice]
    kept = min(kept, len(records) - 1)
    how = {
        "sampling": unbroken.request.sampling,
        "min_tokens": 30,
        "generated": [[record.token_id for record in records[:kept]]],
        "first_choice": choice,
    }
    prompt = prompt_of(45)
    if by_hand_off:
        run = hand_off(*engines, prompt, MAX_TOKENS, **how)
    else:
        run = submit(engines[1], prompt, MAX_TOKENS, **how)
        finish(run)
    assert run.tokens == [[record.token_id for record in records[kept:]]]
    assert run.ends[0].output_tokens == len(records)
    assert run.ends[0].reason is unbroken.ends[choice].reason
    for record, before in zip(run.records[0], records[kept:], strict=True):
        if before.logprob is not None:
            assert record.logprob == pytest.approx(before.logprob, abs=1e-3)
            assert record.top_ids[0] == before.top_ids[0]


def test_what_was_begun_before_is_admitted_before_new_work(tiny_path):
    """One slot: of three that wait, the resumed one goes first though it came last."""
    with running(tiny_path, max_sequences=1) as engine:
        busy = submit(engine, prompt_of(20), 200, min_tokens=200)
        with held(engine):  # All three are there before the next one is chosen.
            waiting = {
                "first": submit(engine, prompt_of(21), 2),
                "second": submit(engine, prompt_of(22), 2),
                "resumed": submit(engine, prompt_of(23), 4, generated=[[5, 6]]),
            }
        finish(busy, *waiting.values())
        ended = {name: run.ends[0].at_ns for name, run in waiting.items()}
        assert min(ended, key=lambda name: ended[name]) == "resumed"


def test_a_resume_that_no_pool_could_hold_is_refused(tiny_path):
    """Prompt and generated tokens count, where the prompt alone would have fitted."""
    from engine.types import FailureReason, Mode

    with running(tiny_path, num_pages=10, max_sequences=2) as engine:
        run = submit(engine, prompt_of(60), 120, mode=Mode.PREFILL, generated=[[7] * 100])
        assert run.done.wait(10)
        assert run.failed is not None
        assert run.failed.reason is FailureReason.TOO_LARGE
