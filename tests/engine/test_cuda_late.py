"""On a GPU: a row that is offered while its step waits for the device draws what an early one
does, and is never in two steps, whenever it comes."""

from __future__ import annotations

import time

import pytest
import torch
from engine_kit import GREEDY, build, hand_off, stop, submit
from paths_kit import prompt_of
from tiny_models import write_tiny_model

from engine.cuda.steps.packing import PackedStep
from engine.engine import Engine
from engine.loop import step_loop
from engine.loop.pacing import LaunchPacer
from engine.types import SamplingParams

pytestmark = pytest.mark.gpu

SHAPE = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 128}
OPTIONS = {"device": "cuda", "max_step_tokens": 256, "max_sequences": 40, "num_pages": 900}
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=7, frequency_penalty=0.3)
STEP_CYCLES = 5_000_000
"""A step takes so many cycles of the device longer: some 3 ms."""
LENGTHS = (15, 16, 17, 100, 250)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, **SHAPE)
    early, late = build(path, late_rows=False, **OPTIONS), build(path, **OPTIONS)
    yield early, late
    stop(early, late)


@pytest.mark.parametrize("lead_s", [1.0, 1e-3], ids=["whole step", "1 ms"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_late_rows_draw_what_early_ones_do(engines, monkeypatch, sampling, lead_s) -> None:
    """Five to eight rows, whose bits do not depend on who else is there. A step is launched so long
    before the one before it ends."""
    from engine.cuda.steps.late import CudaLateRows  # It needs Triton.

    early, late = engines
    rows, drawn = late._loop._executor.late, []
    look, draw, wait_s = CudaLateRows.look, rows.draw, LaunchPacer.wait_s

    def slow_look(self: CudaLateRows, packed: PackedStep, row: int) -> None:
        look(self, packed, row)
        torch.cuda._sleep(STEP_CYCLES)

    monkeypatch.setattr(LaunchPacer, "wait_s", lambda *given: max(0.0, wait_s(*given) - lead_s))
    monkeypatch.setattr(step_loop, "HOLD_S", 1.0)
    monkeypatch.setattr(CudaLateRows, "look", slow_look)
    monkeypatch.setattr(rows, "draw", lambda plan: (drawn.append(plan), draw(plan))[1])
    wanted = [answered(early, early, length, sampling) for length in LENGTHS]
    for turn in range(6):
        for length, tokens in zip(LENGTHS, wanted, strict=True):
            time.sleep(0.0007 * turn)
            assert answered(early, late, length, sampling) == tokens
    print(f"{len(drawn)} of {6 * len(LENGTHS)} rows came late")
    assert len(drawn) > (15 if lead_s == 1.0 else 0)


def answered(prefill: Engine, decode: Engine, length: int, sampling: SamplingParams) -> list[int]:
    """What a row says that joins five others, which outlast it."""
    beside = [submit(decode, prompt_of(9, i), 200, ignore_eos=True) for i in range(5)]
    while min(len(run.records[0]) for run in beside) < 3:
        time.sleep(1e-4)
    run = hand_off(prefill, decode, prompt_of(length), 12, sampling=sampling, ignore_eos=True)
    assert not any(each.is_over for each in beside)
    for each in beside:
        decode.cancel(each.request.id)
    return run.tokens[0]
