"""Many streams at once, some cancelled at random: the others equal their solo runs, and when all
are over no page and no slot is missing."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from engine_kit import GREEDY, Run, check_baseline, finish, hand_off, held
from tiny_models import write_tiny_model

from engine.config import EngineConfig
from engine.engine import Engine
from engine.step.executor import Executor, Launched
from engine.step.plan import StepPlan
from engine.types import Event, NewTokens, Request, SamplingParams, StopRules

PAGE = 16
STREAMS = 40
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=5)


@dataclass(frozen=True)
class Stream:
    """One request, and when its client goes away."""

    prompt: tuple[int, ...]
    max_tokens: int
    seeded: bool = False
    """Drawn at a temperature; else greedy."""
    choices: int = 1
    cancel_after: int | None = None
    """Tokens of its first choice; None: never. 0: as soon as it is submitted."""

    @property
    def pages(self) -> int:
        """Held at its end, by all choices."""
        return self.choices * -(-(len(self.prompt) + self.max_tokens) // PAGE)


class WatchedExecutor:
    """Keeps the plans that were launched."""

    def __init__(self, executor: Executor) -> None:
        self.plans: list[StepPlan] = []
        self._executor = executor

    def launch(self, plan: StepPlan) -> Launched:
        self.plans.append(plan)
        return self._executor.launch(plan)

    def shutdown(self) -> None:
        self._executor.shutdown()


@contextmanager
def running(path: Path, **options) -> Iterator[tuple[Engine, list[StepPlan]]]:
    """An engine and the plans that it launches; everything must be back when the test ends."""
    defaults = {"num_pages": 1500, "max_sequences": 64, "max_step_tokens": 160}
    engine = Engine.build(EngineConfig(model=str(path), **{**defaults, **options}))
    watched = WatchedExecutor(engine._loop._executor)
    engine._loop._executor = watched
    engine.start()
    try:
        yield engine, watched.plans
        check_baseline(engine)
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture(scope="module")
def solo(path):
    """Output of a stream alone in an engine that caches nothing."""
    known: dict[Stream, list[list[int]]] = {}
    with running(path, prefix_cache=False) as (engine, _):

        def run(stream: Stream) -> list[list[int]]:
            alone = replace(stream, cancel_after=None)
            if alone not in known:
                started = start(engine, alone)
                finish(started)
                known[alone] = started.tokens
            return known[alone]

        yield run


def start(engine: Engine, stream: Stream) -> Run:
    """Submits a stream whose cancellation comes from its own events."""
    request = Request(
        secrets.token_bytes(16),
        np.array(stream.prompt, np.int32),
        SEEDED if stream.seeded else GREEDY,
        StopRules(stream.max_tokens),
        choices=stream.choices,
    )
    run = Run(request)

    def sink(events: Sequence[Event]) -> None:
        run.sink(events)
        for event in events:
            if (
                isinstance(event, NewTokens)
                and (event.choices == 0).any()
                and event.indices[event.choices == 0][0] + 1 == stream.cancel_after
            ):
                engine.cancel(request.id)

    engine.submit(request, sink)
    if stream.cancel_after == 0:
        engine.cancel(request.id)
    return run


def prompt_of(rng: np.random.Generator, length: int, shared: int = 0) -> tuple[int, ...]:
    return (*range(1, shared + 1), *rng.integers(1, 384, length - shared).tolist())


def mixed_streams(seed: int) -> list[Stream]:
    """Mixed lengths, a third shares a prefix, a third is cancelled, some seeded, some n = 3."""
    rng = np.random.default_rng(seed)
    streams = []
    for i in range(STREAMS):
        length, max_tokens = int(rng.integers(1, 240)), int(rng.integers(1, 40))
        streams.append(
            Stream(
                prompt_of(rng, length, shared=length // 2 if i % 3 == 0 else 0),
                max_tokens,
                i % 4 == 0,
                3 if i % 9 == 0 else 1,
                int(rng.integers(0, max_tokens)) if rng.random() < 1 / 3 else None,
            )
        )
    return streams


def check_survivors(streams: Sequence[Stream], runs: Sequence[Run], solo) -> None:
    for stream, run in zip(streams, runs, strict=True):
        want = solo(stream)
        if stream.cancel_after is None:
            assert run.tokens == want
        else:
            for got, whole in zip(run.tokens, want, strict=True):
                assert got == whole[: len(got)], "wrong before it was cancelled"


def run_crowd(engine: Engine, streams: Sequence[Stream]) -> list[Run]:
    with held(engine):
        runs = [start(engine, stream) for stream in streams]
    finish(*(r for r, s in zip(runs, streams, strict=True) if s.cancel_after is None))
    return runs


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_survivors_equal_their_solo_runs(path, solo, seed):
    streams = mixed_streams(seed)
    with running(path) as (engine, plans):
        for _ in range(2):  # the second time from the cache
            check_survivors(streams, run_crowd(engine, streams), solo)
        assert max(len(plan.row_slots) for plan in plans) > 20, "there was no crowd"


def test_a_pool_of_a_third_of_the_need(path, solo):
    streams = mixed_streams(seed=7)
    need = sum(stream.pages for stream in streams)
    with running(path, num_pages=need // 3 + 1, scheduling="fair") as (engine, _):
        check_survivors(streams, run_crowd(engine, streams), solo)


def test_growth_in_a_pool_of_a_third_of_the_need_preempts(path, solo):
    """Short prompts and long outputs: what was admitted outgrows the pool."""
    rng = np.random.default_rng(8)
    streams = [Stream(prompt_of(rng, int(rng.integers(1, 20))), 60) for _ in range(16)]
    need = sum(stream.pages for stream in streams)
    with running(path, num_pages=need // 3 + 1) as (engine, _):
        runs = run_crowd(engine, streams)
        assert engine.load().preemptions > 0
        check_survivors(streams, runs, solo)


def test_giants_among_dwarfs(path, solo):
    """One giant fits at a time, beside a few dwarfs."""
    rng = np.random.default_rng(9)
    streams = []
    for i in range(24):
        giant = i % 8 == 3
        length = int(rng.integers(1400, 1700) if giant else rng.integers(1, 6))
        streams.append(Stream(prompt_of(rng, length), 12 if giant else 30))
    with running(path, num_pages=120) as (engine, _):
        check_survivors(streams, run_crowd(engine, streams), solo)


def test_chunks_and_decodes_share_steps(path, solo):
    """A worker of both roles: long prompts are computed in chunks beside rows that decode."""
    rng = np.random.default_rng(10)
    streams = [Stream(prompt_of(rng, 5), 60) for _ in range(8)]
    streams += [Stream(prompt_of(rng, 700), 20) for _ in range(4)]
    with running(path, max_step_tokens=128, mixed_prefill_tokens=64) as (engine, plans):
        check_survivors(streams, run_crowd(engine, streams), solo)
    mixed = [plan for plan in plans if plan.num_decodes and len(plan.row_slots) > plan.num_decodes]
    prompts = [
        (plan.query_lens[plan.num_decodes :], plan.context_lens[plan.num_decodes :])
        for plan in mixed
    ]
    assert any(((ends > new) & (ends < 700)).any() for new, ends in prompts), "in the middle"
    assert all(plan.num_tokens - plan.num_decodes <= 64 for plan in mixed)
    assert len(mixed) >= 4 * 700 // 64, "prompts were not computed beside decodes"


def test_a_crowd_beside_hand_offs(path, solo):
    """A decode worker that also runs requests of its own gives both their solo output."""
    streams = mixed_streams(seed=11)[:20]
    rng = np.random.default_rng(12)
    with running(path) as (prefill, _), running(path) as (decode, _):
        runs = [start(decode, stream) for stream in streams]
        for length in (1, 16, 17, 100, 230):
            stream = Stream(prompt_of(rng, length), 20, choices=2)
            run = hand_off(prefill, decode, stream.prompt, stream.max_tokens, choices=2)
            assert run.tokens == solo(stream)
        finish(*(r for r, s in zip(runs, streams, strict=True) if s.cancel_after is None))
        check_survivors(streams, runs, solo)
