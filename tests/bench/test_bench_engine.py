"""What `bench.engine` does beside the GPU: cases, their figures, and the table."""

from __future__ import annotations

import sys

import pytest
import torch
from engine_kit import check_baseline, running
from tiny_models import write_tiny_model

from bench import engine as bench
from bench import speculation
from engine.types import SamplingParams

CASE = bench.Case(prompts=6, prompt_tokens=20, output_tokens=9, vllm=50, floor=100, target=80)


def test_a_case_is_run_counted_and_shown(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(bench.CASES, "tiny", CASE)
    with running(
        write_tiny_model(tmp_path / "model", tokenizer=False), prefix_cache=False
    ) as engine:
        outcome = bench.measure(engine, "tiny", repeats=2)
        for _ in range(2):  # the load is told at the end of a turn
            check_baseline(engine)
        warm_up = 6 * 4
        assert engine.load().tokens_sampled == warm_up + 2 * CASE.counted_tokens
        whole, decode = speculation.run(engine, CASE, 7)
        sampled = bench.measure(engine, "tiny", 1, SamplingParams(temperature=0.8, top_p=0.9))
    assert len(outcome.rates) == 2
    assert outcome.steps >= 2
    assert 0 < outcome.step_p50_ms <= outcome.step_p99_ms
    assert sampled.rate > 0
    assert whole > 0
    assert decode > 0
    outcome.rates = [90.0, 110.0]
    words = bench.report(outcome).split()
    assert words[:6] == ["tiny", "100.0", "80.0", "50.0", "100.0", "2.000"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.engine"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert "this measures a GPU, and there is none" in capsys.readouterr().err
