"""Beam search over shared pages: equal to transformers, by every path; and the pages it holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from beams_kit import Searches, check, counting_pages
from engine_kit import Run, build, check_baseline, finish, hand_off, held, running, stop, submit
from hooks_kit import ALL, QUEST, installed
from scheduler_bench import Bench, deliver
from tiny_models import write_tiny_model

from engine.beams.params import BeamParams, EarlyStopping
from engine.engine import Engine
from engine.types import FailureReason, Mode, SamplingParams

rng = np.random.default_rng(63)
PROMPTS = [rng.integers(5, 380, size).tolist() for size in (5, 16, 37, 150)]
ENDS = tuple(range(5, 380, 19))
"""So many that searches of a random model end."""
TOKENS = 18


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("beams") / "model", tokenizer=False)


@pytest.fixture(scope="module")
def searches(path: Path) -> Searches:
    return Searches(path)


@pytest.fixture(scope="module")
def engine(path: Path):
    with running(path) as engine:
        yield engine


def search(engine: Engine, prompt: list[int], params: BeamParams, tokens: int = TOKENS, **more):
    more = {"token_ids": frozenset(ENDS), "ignore_eos": True, **more}
    return submit(engine, prompt, tokens, beams=params, **more)


@pytest.mark.parametrize(
    ("params", "min_tokens"),
    [
        (BeamParams(1), 0),
        (BeamParams(2), 0),
        (BeamParams(4, 0.0), 0),
        (BeamParams(8, 2.0, EarlyStopping.AT_ONCE), 0),
        (BeamParams(4, -1.0, EarlyStopping.NEVER_BETTER), 0),
        (BeamParams(4, 1.5, EarlyStopping.NEVER_BETTER), 6),
        (BeamParams(8), 12),
    ],
)
def test_a_search_finds_what_transformers_finds(engine, searches, params, min_tokens):
    """Alone, then beside a crowd. Prompts end at a page's end and within a page."""
    runs: list[Run] = []
    for prompt in PROMPTS[1:3]:
        runs.append(search(engine, prompt, params, min_tokens=min_tokens))
        finish(runs[-1])
    with held(engine):
        beside = [submit(engine, PROMPTS[2], 30, choices=3, sampling=SamplingParams(seed=3))]
        beside += [submit(engine, PROMPTS[3], 30)]
        again = search(engine, PROMPTS[1], params, min_tokens=min_tokens)
    finish(again, *beside)
    for run in (*runs, again):
        prompt = run.request.prompt_ids.tolist()
        if params.width > 1:  # transformers calls one beam greedy, and has no score for it.
            check(run, searches.find(prompt, params, TOKENS, ENDS, min_tokens))
    assert again.tokens == runs[0].tokens
    check_baseline(engine)


def test_searches_end_in_each_way(engine):
    """Or the comparisons above would compare little."""
    reasons, lengths = set(), set()
    for prompt in PROMPTS:
        run = search(engine, prompt, BeamParams(8))
        finish(run)
        reasons |= {end.reason.value for end in run.ends.values()}
        lengths |= {len(tokens) for tokens in run.tokens}
    assert reasons == {"stop_token", "length"}
    assert len(lengths) > 4


def test_one_beam_is_greedy(engine):
    greedy, beam = submit(engine, PROMPTS[0], 12), search(engine, PROMPTS[0], BeamParams(1), 12)
    finish(greedy, beam)
    assert beam.tokens == greedy.tokens


def test_eight_beams_hold_the_pages_that_distinct_tokens_need(engine):
    """At each step of 256, with partial pages copied when beams part."""
    with counting_pages(engine) as counts:
        run = search(engine, PROMPTS[2], BeamParams(8), 256, token_ids=frozenset())
        finish(run, timeout_s=240)
    counts = [one for one in counts if one.pages]
    assert len(counts) > 250
    assert max(one.pages / one.needed for one in counts) <= 1.2
    assert sum(one.unshared for one in counts) > 2 * sum(one.pages for one in counts)
    assert engine._loop._scheduler.requests.choosing.forks > 50
    check_baseline(engine)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_step_tokens": 32}, id="in-chunks"),
        pytest.param({"prefix_cache": False}, id="without-cache"),
        pytest.param({"speculation": "suffix", "draft_tokens": 3}, id="beside-drafts"),
        pytest.param({"page_size": 4}, id="small-pages", marks=pytest.mark.slow),
        pytest.param({"tp": 2}, id="ranks", marks=pytest.mark.slow),
        pytest.param({"kv_host_bytes": 10**7}, id="host-tier"),
    ],
)
def test_a_search_composes(path, searches, options):
    with running(path, **options) as engine:
        params = BeamParams(4)
        with held(engine):
            runs = [search(engine, prompt, params) for prompt in PROMPTS]
            beside = submit(engine, [5, 6, 7] * 20, 40)
        finish(*runs, beside)
        for run in runs:
            check(run, searches.find(run.request.prompt_ids.tolist(), params, TOKENS, ENDS))


def test_a_hook_that_changes_nothing_changes_no_search(path, searches, tmp_path):
    with installed(tmp_path / "installed", ALL, QUEST):
        engine = build(path, hooks=("quiet?graphs=no",))
    run = search(engine, PROMPTS[2], BeamParams(4))
    finish(run)
    check(run, searches.find(PROMPTS[2], BeamParams(4), TOKENS, ENDS))
    stop(engine)


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}], ids=str)
def test_what_is_rounded_forks_as_others_do(path, options):
    """A search over FP8 pages or weights is the same behind a hand-off as alone, and scores are
    those of their tokens. transformers rounds neither."""
    engines = [build(path, **options) for _ in range(3)]
    more = {"token_ids": frozenset(ENDS), "ignore_eos": True}
    for prompt in PROMPTS:
        alone = search(engines[0], prompt, BeamParams(4), sampling=SamplingParams(top_logprobs=0))
        finish(alone)
        moved = hand_off(*engines[1:], prompt, TOKENS, beams=BeamParams(4), **more)
        check(moved, [(alone.tokens[n], alone.ends[n].score) for n in range(4)])
        for choice, records in enumerate(alone.records):
            mean = sum(record.logprob for record in records) / len(records)
            assert alone.ends[choice].score == pytest.approx(mean, abs=1e-4)
    stop(*engines)


def test_one_hand_off_serves_all_beams(path, searches):
    prefill, decode = build(path), build(path)
    for prompt in PROMPTS:
        run = hand_off(
            prefill,
            decode,
            prompt,
            TOKENS,
            beams=BeamParams(4),
            token_ids=frozenset(ENDS),
            ignore_eos=True,
        )
        check(run, searches.find(prompt, BeamParams(4), TOKENS, ENDS))
        assert run.reserved is not None
        assert len(run.reserved.pages) == -(-len(prompt) // 16)
    stop(prefill, decode)


def test_a_search_that_is_preempted_begins_again(path, searches):
    """Pages for some of four searches, once all have grown: the oldest stays."""
    with running(
        path, num_pages=34, prefix_cache=False, reserve_pages=0, page_watermark=1.0
    ) as engine:
        params = BeamParams(4)
        prompts = [[*PROMPTS[0], extra] for extra in range(5, 9)]
        with held(engine):
            runs = [search(engine, prompt, params, 96, token_ids=frozenset()) for prompt in prompts]
        finish(*runs, timeout_s=120)
        assert runs[0].ends[0].preemptions == 0
        assert runs[3].ends[0].preemptions > 0
        for run, prompt in zip((runs[0], runs[3]), (prompts[0], prompts[3]), strict=True):
            check(run, searches.find(prompt, params, 96, ()))


def test_what_never_fits_is_refused(path):
    """Eight beams are preempted together, so their pages must fit together."""
    with running(path, num_pages=34) as engine:
        run = submit(engine, PROMPTS[0], 96, beams=BeamParams(8))
        assert run.done.wait(30)
        assert run.failed is not None
        assert run.failed.reason.value == "too_large"


def test_a_search_that_is_cancelled_leaves_nothing(engine):
    run = search(engine, PROMPTS[2], BeamParams(8), 200)
    engine.cancel(run.request.id)
    other = search(engine, PROMPTS[2], BeamParams(8), 20)
    finish(other)
    check_baseline(engine)
    assert not any(run.tokens)


def test_log_probabilities_are_those_of_the_tokens(engine):
    """As many alternatives as the client wants, not as many as the search reads."""
    run = search(engine, PROMPTS[0], BeamParams(4), sampling=SamplingParams(top_logprobs=2))
    finish(run)
    for choice, records in enumerate(run.records):
        total = sum(record.logprob for record in records)
        assert run.ends[choice].score == pytest.approx(total / len(records), abs=1e-4)
        assert all(len(record.top_ids) == 2 for record in records)


@pytest.mark.parametrize(
    "family",
    ["gemma3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("lfm2", "qwen3_next"))],
)
def test_windows_and_states_fork_as_pages_do(tmp_path, family):
    from tiny_families import EVERY, HYBRIDS

    path = write_tiny_model(tmp_path / family, tokenizer=False, **{**EVERY, **HYBRIDS}[family])
    engine, searches = build(path), Searches(path)
    assert len(engine.pools) == 2
    for prompt in PROMPTS:
        run = search(engine, prompt, BeamParams(4), 40)
        finish(run)
        check(run, searches.find(prompt, BeamParams(4), 40, ENDS))
    stop(engine)


def test_a_search_whose_candidates_did_not_come_fails():
    """A notification may have no room for those of a wide search."""
    bench = Bench()
    request_id = bench.submit(PROMPTS[1], mode=Mode.RECEIVE, beams=BeamParams(2), choices=2)
    bench.turn()
    deliver(bench, request_id)
    bench.run()
    assert bench.failed == {request_id: FailureReason.INTERNAL}
    bench.check_baseline()
