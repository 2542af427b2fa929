"""Whoever observes the steps hears of each one that settled; one that failed ends its requests."""

from __future__ import annotations

from engine_kit import build, finish, submit
from tiny_models import write_tiny_model

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import FailureReason
from faults import failpoints


def test_prompt_steps_decode_nobody_and_the_others_do(tmp_path) -> None:
    model = write_tiny_model(tmp_path, tokenizer=False)
    engine = Engine.build(EngineConfig(model=str(model), num_pages=50, max_step_tokens=128))
    steps: list[tuple[float, int]] = []
    engine.start(lambda seconds, decoded: steps.append((seconds, decoded)))
    try:
        finish(submit(engine, range(5, 205), 8, ignore_eos=True))
    finally:
        engine.stop()
    decoded = [count for _, count in steps]
    assert all(seconds > 0 for seconds, _ in steps)
    assert decoded[:2] == [0, 0]
    # One step may be in flight when the last token is known.
    assert decoded[2:] in ([1] * 7, [1] * 8)


def test_a_step_that_fails_gives_up_its_requests_and_the_next_ones_run(tmp_path) -> None:
    engine = build(write_tiny_model(tmp_path, tokenizer=False))
    try:
        failpoints.arm("engine.step=raise@3")
        struck = submit(engine, range(5, 25), 8, ignore_eos=True)
        assert struck.done.wait(30), struck.heard_so_far()
        assert struck.failed is not None
        assert struck.failed.reason is FailureReason.INTERNAL
        finish(submit(engine, range(5, 25), 8, ignore_eos=True))
    finally:
        failpoints.arm("")
        engine.stop()
