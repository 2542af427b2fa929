"""Many streams at once, some cancelled at random: the others equal their solo runs, and when all
are over no page and no slot is missing."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from engine_kit import GREEDY, Run, finish, hand_off, held, running

from engine.engine import Engine
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


def large(path: Path, **options) -> AbstractContextManager[Engine]:
    defaults = {"num_pages": 1500, "max_sequences": 64, "max_step_tokens": 160}
    return running(path, **defaults | options)


@pytest.fixture(scope="module")
def solo(tiny_path):
    """Output of a stream alone in an engine that caches nothing."""
    known: dict[Stream, list[list[int]]] = {}
    with large(tiny_path, prefix_cache=False) as engine:

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
def test_survivors_equal_their_solo_runs(tiny_path, solo, seed):
    streams = mixed_streams(seed)
    with large(tiny_path) as engine:
        for _ in range(2):  # the second time from the cache
            check_survivors(streams, run_crowd(engine, streams), solo)


def test_growth_in_a_pool_of_a_third_of_the_need_preempts(tiny_path, solo):
    """Short prompts and long outputs: what was admitted outgrows the pool."""
    rng = np.random.default_rng(8)
    streams = [Stream(prompt_of(rng, int(rng.integers(1, 20))), 60) for _ in range(16)]
    need = sum(stream.pages for stream in streams)
    with large(tiny_path, num_pages=need // 3 + 1) as engine:
        runs = run_crowd(engine, streams)
        assert engine.load().preemptions > 0
        check_survivors(streams, runs, solo)


def test_a_crowd_beside_hand_offs(tiny_path, solo):
    """A decode worker that also runs requests of its own gives both their solo output."""
    streams = mixed_streams(seed=11)[:20]
    rng = np.random.default_rng(12)
    with large(tiny_path) as prefill, large(tiny_path) as decode:
        runs = [start(decode, stream) for stream in streams]
        for length in (1, 16, 17, 100, 230):
            stream = Stream(prompt_of(rng, length), 20, choices=2)
            run = hand_off(prefill, decode, stream.prompt, stream.max_tokens, choices=2)
            assert run.tokens == solo(stream)
        finish(*(r for r, s in zip(runs, streams, strict=True) if s.cancel_after is None))
        check_survivors(streams, runs, solo)
