"""A long wait of streams is told, with what the loop did meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest
from engine_kit import finish, submit
from tiny_models import write_tiny_model

from engine.config import EngineConfig
from engine.engine import Engine

WAIT_S = 1.0
"""Far longer than a step of the tiny model, on a busy machine too."""


@pytest.fixture
def engine(tmp_path) -> Iterator[Engine]:
    model = write_tiny_model(tmp_path, tokenizer=False)
    engine = Engine.build(EngineConfig(model=str(model), num_pages=50, max_step_tokens=128))
    engine.start()
    yield engine
    engine.stop()


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, float]]:
    return [vars(one) for one in caplog.records if one.message.startswith("streams waited")]


def test_a_command_that_holds_up_the_streams_is_named(engine: Engine, caplog) -> None:
    caplog.set_level(logging.WARNING)
    finish(submit(engine, range(5, 25), 30, ignore_eos=True))
    stream = submit(engine, range(5, 25), 400, ignore_eos=True)
    while len(stream.records[0]) < 5:
        time.sleep(0.001)
    engine._loop.post(lambda _: time.sleep(WAIT_S))
    finish(stream)
    (one,) = [each for each in told(caplog) if each["gap_ms"] >= 1e3 * WAIT_S]
    assert one["commands_ms"] >= 1e3 * WAIT_S
    verbs = ("receive", "admit", "plan", "launch", "settle")
    outer_ms = sum(one.get(f"{verb}_ms", 0.0) for verb in verbs)
    assert 0.9 * one["gap_ms"] < outer_ms < 1.05 * one["gap_ms"]
    assert one["decodes"] == 1
    assert one["usual_ms"] < one["gap_ms"] / 5


def test_a_pause_without_streams_is_not_told(engine: Engine, caplog) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        finish(submit(engine, range(5, 25), 30, ignore_eos=True))
        time.sleep(WAIT_S)
    finish(submit(engine, range(5, 25), 30, ignore_eos=True))
    assert not [each for each in told(caplog) if each["gap_ms"] >= 1e3 * WAIT_S]
