"""One model by every path of an engine, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from engine_kit import build, finish, hand_off, held, running, stop, submit
from references import references

from engine.engine import Engine
from engine.loads import EngineLoad

MAX_TOKENS = 24
Pair = tuple[Engine, Engine]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * seed + length).integers(1, 384, length).tolist()


@contextmanager
def two_engines(path: Path, **options: Any) -> Iterator[Pair]:
    """Two whose steps differ; everything is back in the end."""
    defaults: dict[str, Any] = {"max_sequences": 6, "poison_freed_pages": True, **options}
    one, other = (build(path, max_step_tokens=tokens, **defaults) for tokens in (64, 32))
    yield one, other
    stop(one, other)


def check_every_path(engines: Pair, path: Path, length: int) -> None:
    """Whole, in chunks, from the cache, forked, handed off and resumed."""
    one, other = engines
    answers = references(path)
    for engine in engines:
        for choices in (1, 1, 3):
            before = engine.load().prompt_tokens_cached
            run = submit(engine, prompt_of(length), MAX_TOKENS, choices=choices, ignore_eos=True)
            finish(run)
            answers.check(run, MAX_TOKENS)
        assert engine.load().prompt_tokens_cached - before == (length - 1) // 16 * 16
    run = hand_off(other, one, prompt_of(length, 1), MAX_TOKENS, choices=2, ignore_eos=True)
    answers.check(run, MAX_TOKENS)
    given = run.tokens[0][:7]
    run = submit(one, prompt_of(length, 1), MAX_TOKENS, generated=[given], ignore_eos=True)
    finish(run)
    answers.check(run, MAX_TOKENS, given=7)


def check_crowd(path: Path, **options: Any) -> EngineLoad:
    """Six requests that outgrow a small pool; what the engine said of itself at the end."""
    with running(path, max_sequences=6, max_step_tokens=64, **options) as engine:
        with held(engine):
            runs = [submit(engine, prompt_of(20 + i), 80, ignore_eos=True) for i in range(6)]
        finish(*runs)
        for run in runs:
            references(path).check(run, 80)
        load = engine.load()
        assert (load.preemptions > 0) is ("num_pages" in options)
        loaded = load.tiers is not None and load.tiers.loaded_tokens.total() > 0
        assert loaded is bool(options.get("kv_host_bytes"))
    return load
