"""`baton plan`: beside measured rows, its verdicts, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import write_tiny_model
from typer.testing import CliRunner

from console.cli import app
from console.loadgen.trace_files import read_trace
from console.planning.rates import GPUS, REFERENCE_KV_BYTES, REFERENCE_PARAMETERS, rates_of
from console.planning.shapes import shape_of
from console.planning.simulation import Asked, Plan, Served, simulate

SECONDS = 15
REFERENCE = ["--parameters", "8.03", "--kv-bytes", "131072"]


def asked(kind: str, rate: int) -> list[Asked]:
    """As bench/pd.sh draws them."""
    draw = np.random.default_rng(2)
    count = SECONDS * rate
    at_s = np.cumsum(draw.exponential(1 / rate, count)).tolist()
    if kind == "azure":
        rows = read_trace("azure-conversation")
        picks = [rows[pick] for pick in draw.integers(len(rows), size=count)]
        lengths = [(row.prompt_tokens, row.output_tokens) for row in picks]
    else:
        columns = [draw.lognormal(math.log(mean) - 0.32, 0.8, count) for mean in (2048, 28)]
        lengths = [
            tuple(row) for row in np.array(columns).round().clip(1, 8192).astype(int).T.tolist()
        ]
    return [Asked(when_s, *pair) for when_s, pair in zip(at_s, lengths, strict=True)]


def served(kind: str, rate: int, plan: Plan, gpu: str = "h100") -> Served:
    rates = rates_of(GPUS[gpu], REFERENCE_PARAMETERS, REFERENCE_KV_BYTES, 1, fp8=False)
    return simulate(asked(kind, rate), plan, rates)


@pytest.mark.parametrize(
    ("gpu", "kind", "rate", "plan", "kept_12", "kept_25", "first_ms"),
    [
        ("h100", "azure", 28, Plan(2, 2), 80, 100, 31),
        ("h100", "lognormal", 24, Plan(2, 2), 40, 100, 64),
        ("h100", "lognormal", 24, Plan(3, 1), 16, 100, 46),
        ("h200", "azure", 28, Plan(2, 2), 98, 100, 31),
        ("h200", "azure", 28, Plan(0, 0, 4), 100, 100, 39),
        ("h200", "azure", 12, Plan(0, 0, 2), 100, 100, 49),
        ("h200", "lognormal", 24, Plan(2, 2), 89, 100, 68),
        ("h200", "lognormal", 24, Plan(0, 0, 4), 100, 100, 52),
        ("h200", "lognormal", 8, Plan(0, 0, 2), 100, 100, 50),
    ],
)
def test_measured_rows(
    gpu: str, kind: str, rate: int, plan: Plan, kept_12: float, kept_25: float, first_ms: float
) -> None:
    """Four H100s and four H200s, bench/history/two-gpus.md, 2026-11-27. First tokens are within 30
    %."""
    found = served(kind, rate, plan, gpu)
    assert 100 * found.kept(0.4, 0.012) == pytest.approx(kept_12, abs=16)
    assert 100 * found.kept(0.4, 0.025) == pytest.approx(kept_25, abs=20)
    assert 1e3 * np.median(found.first_s) == pytest.approx(first_ms, rel=0.3)


def test_every_request_is_served_once() -> None:
    for plan in (Plan(1, 1), Plan(0, 0, 2)):
        few = [Asked(0.1 * n, 50, 1 + n % 5) for n in range(40)]
        rates = rates_of(GPUS["h200"], REFERENCE_PARAMETERS, REFERENCE_KV_BYTES, 1, fp8=False)
        found = simulate(few, plan, rates)
        assert (found.first_s > 0).all()
        assert [gap > 0 for gap in found.gap_s] == [one.output_tokens > 1 for one in few]


def test_stages_compute_prompts_at_once_and_rows_in_turns() -> None:
    """As the arithmetic of docs/sizing.md."""
    one, two = (
        rates_of(GPUS["h100"], 70e9, 327_680, 2, fp8=True, stages=stages) for stages in (1, 2)
    )
    assert one.prefill_token_s == pytest.approx(1.9 * two.prefill_token_s)
    assert one.lag_s(8000) == 0
    assert two.lag_s(8000) == pytest.approx(8000 * two.prefill_token_s / 6)
    assert two.decode_s(1, 0) == pytest.approx(one.decode_s(1, 0), rel=0.01)
    assert two.decode_s(64, 10**6) < 0.7 * one.decode_s(64, 10**6)
    assert two.kv_tokens > 3 * one.kv_tokens


def test_a_model_that_no_gpu_holds_gets_stages() -> None:
    load = ["--parameters", "70", "--kv-bytes", "327680", "--gpus", "4", "--rate", "1"]
    said = run(*load, "--tp", "1", "--prompt-tokens", "4000", "--token-ms", "60")
    assert said["options"]
    assert all("4 stages each" in one["plan"] for one in said["options"])


def run(*arguments: str) -> Any:
    found = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_it_may_say_do_not_disaggregate(tmp_path: Path) -> None:
    """Prompts of thousands, answers of two dozen, at 12 ms between tokens; at 25 ms they split."""
    (trace := tmp_path / "lengths.jsonl").write_text(
        "".join(
            json.dumps({"timestamp": 0, "input_length": one[1], "output_length": one[2]}) + "\n"
            for one in asked("lognormal", 24)
        )
    )
    load = [*REFERENCE, "--gpus", "4", "--tp", "1", "--trace", str(trace), "--rate", "24"]
    tight = run(*load, "--token-ms", "12")
    assert tight["why"].startswith("Do not disaggregate"), tight
    loose = run(*load, "--token-ms", "25")
    assert loose["why"].startswith("Disaggregate"), loose
    assert "a second" in loose["breaks_first"]


def test_a_models_folder_is_read(tmp_path: Path) -> None:
    folder = Path(write_tiny_model(tmp_path / "tiny", tokenizer=False))
    config = json.loads((folder / "config.json").read_text())
    assert shape_of(folder).layers == config["num_hidden_layers"]
    said = run("--model", str(folder), "--gpus", "2", "--rate", "2", "--output-tokens", "4")
    assert said["options"][0]["kept"] == "100 %"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model, or"),
        (["--model", "x", *REFERENCE], "--model, or"),
        (["--model", "/nowhere"], "config.json"),
        ([*REFERENCE, "--gpu", "a100"], "none of h100"),
        (["--parameters", "405", "--kv-bytes", "500000", "--gpus", "4"], "fits none"),
        ([*REFERENCE, "--trace", "no-such"], "is no trace"),
    ],
)
def test_what_cannot_be_planned(arguments: list[str], words: str) -> None:
    found = CliRunner().invoke(app, ["plan", *arguments])
    assert found.exit_code == 2
    assert words in found.output.replace("\n", " ")
