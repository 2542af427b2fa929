"""Helpers that run whole engines in tests."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from engine.beams.params import BeamParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.group_pages import GroupPages
from engine.pooling.requests import Pooled, Pooling
from engine.schedule.scheduler import Scheduler
from engine.step.attention import AttentionSpec, Specs
from engine.types import (
    Event,
    Mode,
    NewTokens,
    PeerFetch,
    Prefilled,
    PromptScored,
    Request,
    RequestFailed,
    Reserved,
    SamplingParams,
    SequenceEnded,
    StopRules,
    TokenRecord,
)

GREEDY = SamplingParams(temperature=0.0)


def specs_of(windows: Sequence[int | None], dim: int) -> Specs:
    """Plain attention of layers with these windows, over heads of `dim` numbers."""
    return tuple(AttentionSpec(dim**-0.5, window) for window in windows)


class Run:
    """One request's events, gathered."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.records: list[list[TokenRecord]] = [[] for _ in range(request.choices)]
        self.ends: dict[int, SequenceEnded] = {}
        self.failed: RequestFailed | None = None
        self.reserved: Reserved | None = None
        self.prefilled: Prefilled | None = None
        self.scored: PromptScored | None = None
        self.pooled: Pooled | None = None
        self.done = threading.Event()
        """Ended, failed, prefilled or reserved. `finish` clears it."""
        self.is_over = False
        """Ended or failed: it will not be done again."""

    @property
    def tokens(self) -> list[list[int]]:
        return [[record.token_id for record in records] for records in self.records]

    def heard_so_far(self) -> str:
        """Why a test waits no longer."""
        prompt, came = len(self.request.prompt_ids), [len(records) for records in self.records]
        return f"a request with a prompt of {prompt} did not finish: {came} tokens came"

    def sink(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case NewTokens():
                    for row, choice in enumerate(event.choices.tolist()):
                        assert event.request_ids[row] == self.request.id
                        self.records[choice].append(event.record(row))
                case SequenceEnded():
                    self.ends[event.choice] = event
                    if event.last:
                        self.done.set()
                        self.is_over = True
                case RequestFailed():
                    self.failed = event
                    self.done.set()
                    self.is_over = True
                case Reserved():
                    self.reserved = event
                    self.done.set()
                case Prefilled():
                    self.prefilled = event
                    self.done.set()
                case PromptScored():
                    self.scored = event
                case Pooled():
                    self.pooled = event
                    self.done.set()
                    self.is_over = True


def build(path: Path, **options) -> Engine:
    defaults = {"num_pages": 200, "max_sequences": 16, "max_step_tokens": 128}
    engine = Engine.build(EngineConfig(model=str(path), **{**defaults, **options}))
    engine.start()
    return engine


def stop(*engines: Engine) -> None:
    """Ends engines. Everything must be back."""
    for engine in engines:
        check_baseline(engine)
        engine.stop()


@contextmanager
def running(path: Path, **options) -> Iterator[Engine]:
    """An engine. Everything must be back when the block ends."""
    engine = build(path, **options)
    try:
        yield engine
        check_baseline(engine)
    finally:
        engine.stop()


def submit(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int = 16,
    *,
    mode: Mode = Mode.WHOLE,
    choices: int = 1,
    sampling: SamplingParams = GREEDY,
    prompt_logprobs: bool = False,
    generated: Sequence[Sequence[int]] = (),
    first_choice: int = 0,
    extensions: Mapping[str, bytes] | None = None,
    cache_salt: bytes = b"",
    adapter: bytes = b"",
    speculates: bool = True,
    pooling: Pooling | None = None,
    beams: BeamParams | None = None,
    fetch: PeerFetch | None = None,
    **stop,
) -> Run:
    if beams is not None:
        choices = 1 if mode is Mode.PREFILL else beams.width
    request = Request(
        secrets.token_bytes(16),
        np.array(prompt, np.int32),
        sampling,
        StopRules(max_tokens, **stop),
        mode,
        choices,
        first_choice=first_choice,
        generated=tuple(np.array(tokens, np.int32) for tokens in generated),
        prompt_logprobs=prompt_logprobs,
        extensions=extensions or {},
        cache_salt=cache_salt,
        adapter=adapter,
        speculates=speculates,
        pooling=pooling,
        beams=beams,
        fetch=fetch,
    )
    run = Run(request)
    engine.submit(request, run.sink)
    return run


def finish(*runs: Run, timeout_s: float = 60.0) -> None:
    """Waits until the requests are done. One that is over is waited for once."""
    for run in runs:
        assert run.done.is_set() or not run.is_over, "it was waited for before"
        assert run.done.wait(timeout_s), run.heard_so_far()
        assert run.failed is None, run.failed
        run.done.clear()


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """The step loop stands still, so that it hears of all that is submitted meanwhile at once."""
    stands, on = threading.Event(), threading.Event()

    def stand(_scheduler: Scheduler) -> None:
        stands.set()
        assert on.wait(60)

    engine._loop.post(stand)
    assert stands.wait(60)
    try:
        yield
    finally:
        on.set()


def hand_off(
    prefill: Engine, decode: Engine, prompt: Sequence[int], max_tokens: int, **more
) -> Run:
    """Runs a request on two engines; the pages go over by hand."""
    first = submit(prefill, prompt, max_tokens, mode=Mode.PREFILL, **more)
    second = submit(decode, prompt, max_tokens, mode=Mode.RECEIVE, **more)
    finish(first, second)
    assert first.prefilled is not None
    assert second.reserved is not None
    grant = second.reserved
    sources, targets = prefill_pages(prefill, first), [(0, grant.pages, grant.held_pages)]
    targets += grant.others
    for group, ((has, source, _), (wants, target, held)) in enumerate(
        zip(sources, targets, strict=True)
    ):
        source = source[wants - has :]
        assert len(source) == len(target), "what is wanted is held"
        decode.pools[group].data[torch.from_numpy(target[held:]).long()] = prefill.pools[
            group
        ].data[torch.from_numpy(source[held:]).long()]
    drafts = bool(decode.pools.drafts_digest)
    drafts = drafts and decode.pools.drafts_digest == prefill.pools.drafts_digest
    if drafts:  # What a head keeps follows group 0.
        source, target, held = sources[0].pages, grant.pages, grant.held_pages
        decode.pools.drafts.data[torch.from_numpy(target[held:]).long()] = (
            prefill.pools.drafts.data[torch.from_numpy(source[held:]).long()]
        )
    if second.request.beams is None:
        for choice, record in enumerate(first.prefilled.records):
            second.records[choice].append(record)
    drafted_from = first.prefilled.drafted_from if drafts else None
    decode.deliver(second.request.id, first.prefilled.records, drafted_from)
    finish(second)
    prefill.release(first.request.id)
    return second


def prefill_pages(engine: Engine, run: Run) -> list[GroupPages]:
    """The pages of each group that a prefilled request holds, read on the step loop's thread."""
    found: list[GroupPages] = []
    ready = threading.Event()

    def look(scheduler) -> None:
        active = scheduler.requests.by_id[run.request.id]
        found.extend([GroupPages(0, active.held_pages), *active.other_held])
        ready.set()

    engine._loop.post(look)
    assert ready.wait(60)
    return found


def check_baseline(engine: Engine) -> None:
    """Every page is free or evictable again, and the books agree."""
    problems: list[BaseException] = []
    ready = threading.Event()

    def look(scheduler) -> None:
        try:
            scheduler.check_invariants()
            assert not scheduler.requests.by_id, "a request was left behind"
            managers = [scheduler.blocks, *(group.blocks for group in scheduler.others.groups)]
            for blocks in managers:
                assert blocks.available == blocks.total, "a page was left behind"
        except AssertionError as error:
            problems.append(error)
        ready.set()

    deadline = time.monotonic() + 10  # A step in flight may still hold a page: look again.
    while True:
        problems.clear()
        ready.clear()
        engine._loop.post(look)
        assert ready.wait(60)
        if not problems:
            return
        if time.monotonic() > deadline:
            raise problems[0]
        time.sleep(0.005)
