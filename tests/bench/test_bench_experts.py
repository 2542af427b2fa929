"""What `bench.experts` does beside the GPU: which experts are read, and their bytes."""

from __future__ import annotations

import pytest
import torch
from engine_kit import running
from tiny_families import EXPERTS
from tiny_models import write_tiny_model

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for GPUs")

from bench import experts as bench
from bench.engine import Case


def test_bytes_are_those_of_the_published_shapes():
    qwen = bench.experts_of("qwen3-30b-a3b", {})
    assert (qwen.in_layer, qwen.chosen) == (128, 8)
    assert qwen.each_bytes == 48 * 3 * 768 * 2048 * 2
    assert bench.experts_read(qwen, 1) == pytest.approx(8)
    assert bench.experts_read(qwen, 64) == pytest.approx(125.9, abs=0.1)
    oss = bench.experts_of("gpt-oss-20b", {})
    weights, biases = 3 * 2880 * 2880, 3 * 2880
    assert oss.each_bytes == 24 * (weights / 2 + weights / 32 + 2 * biases)


def test_a_case_says_how_fast_experts_were_read(tmp_path, capsys):
    path = write_tiny_model(tmp_path, tokenizer=False, **EXPERTS["qwen3_moe"])
    with running(path, prefix_cache=False) as engine:
        experts = bench.Experts(8, 2, 1e6)
        row = bench.row_of(engine, "tiny", Case(6, 20, 9, 50, 100, 80), experts, 1)
    assert row["experts"] == pytest.approx(8 * (1 - 0.75**6))
    assert row["tb_per_s"] == pytest.approx(row["experts"] * 1e6 / row["p50_ms"] / 1e9)
    assert bench.line(row).split()[0] == "tiny"


def test_routing_is_even_whatever_the_logits_are(monkeypatch):
    from engine.model.experts import routing
    from engine.model.experts.config import Routing

    monkeypatch.setattr(bench, "route", lambda *given: routing.route(*given[:3]))
    of_engine = bench.feed_forward.route
    with bench.even_routing(16, 4000):
        chosen = bench.feed_forward.route(torch.zeros(4000, 16), Routing(16, 2), None)
    counts = torch.bincount(chosen.experts.flatten(), minlength=16)
    assert counts.min() > 400
    assert counts.max() < 600
    assert bench.feed_forward.route is of_engine
