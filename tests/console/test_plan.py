"""`baton plan`: beside measured rows, its verdicts, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tiny_models import write_tiny_model
from typer.testing import CliRunner

from console.cli import app
from console.loadgen.trace_files import TraceRow, read_trace
from console.loadgen.workload import Workload
from console.planning import simulation
from console.planning.rates import GPUS, REFERENCE_KV_BYTES, REFERENCE_PARAMETERS, rates_of
from console.planning.shapes import shape_of
from console.planning.simulation import Asked, Plan, Served, simulate

REFERENCE = ["--parameters", "8.03", "--kv-bytes", "131072"]
OLDER_HAND_OFF_S = 6.5e-3
"""Of the rows on H100s, before READY went straight to the step loop."""


def asked(kind: str, rate: int, seconds: int, seed: int) -> list[Asked]:
    """The very requests of a row of bench/pd.sh."""
    if kind == "azure":
        rows = read_trace("azure-conversation")
    else:
        draw = np.random.default_rng(0).lognormal
        means = {"lognormal": (2048, 28), "long": (600, 300)}[kind]
        columns = [draw(math.log(mean) - 0.32, 0.8, 6000).round().clip(1, 8192) for mean in means]
        pairs = zip(*(column.astype(int).tolist() for column in columns), strict=True)
        rows = tuple(TraceRow(0.0, *pair) for pair in pairs)
    plan = Workload(6000, trace=rows, duration_s=seconds).plan(rate, seed)
    return [Asked(one.due_s, one.prompt_tokens, one.output_tokens) for one in plan.requests]


class Row(NamedTuple):
    """What was measured: bench/history/two-gpus.md, 2026-11-27."""

    gpu: str
    kind: str
    rate: int
    plan: Plan
    seconds: int
    seed: int
    kept_12: float
    kept_25: float
    first_ms: float
    token_ms: float | None = None


def served(one: Row) -> Served:
    rates = rates_of(GPUS[one.gpu], REFERENCE_PARAMETERS, REFERENCE_KV_BYTES, 1, fp8=False)
    return simulate(asked(one.kind, one.rate, one.seconds, one.seed), one.plan, rates)


MEASURED = (
    Row("h100", "azure", 28, Plan(2, 2), 15, 1001, 80, 100, 31),
    Row("h100", "lognormal", 24, Plan(2, 2), 15, 3001, 40, 100, 64),
    Row("h100", "lognormal", 24, Plan(3, 1), 15, 3001, 16, 100, 46),
    Row("h200", "azure", 28, Plan(2, 2), 12, 1001, 98, 100, 31, 5.18),
    Row("h200", "azure", 28, Plan(0, 0, 4), 12, 1001, 100, 100, 39, 5.13),
    Row("h200", "lognormal", 24, Plan(2, 2), 12, 3001, 89, 100, 68, 4.95),
    Row("h200", "lognormal", 24, Plan(0, 0, 4), 12, 3001, 100, 100, 52, 4.63),
    Row("h200", "azure", 12, Plan(0, 0, 2), 20, 1007, 100, 100, 49, 5.17),
    Row("h200", "lognormal", 8, Plan(0, 0, 2), 20, 2007, 100, 100, 50, 4.29),
    Row("h200", "azure", 64, Plan(2, 2), 12, 1001, 86, 100, 40, 5.84),
    Row("h200", "azure", 64, Plan(1, 3), 12, 1001, 4, 4, 1917, 5.23),
    Row("h200", "long", 16, Plan(2, 2), 12, 2001, 99, 100, 22, 4.91),
    Row("h200", "long", 16, Plan(1, 3), 12, 2001, 100, 100, 24, 4.76),
    Row("h200", "long", 16, Plan(0, 0, 4), 12, 2001, 99, 100, 30, 4.77),
)


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: f"{one.gpu}-{one.kind}-{one.plan}")
def test_measured_rows(one: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens come up to a third sooner than measured: event loops are not simulated."""
    if one.gpu == "h100":
        monkeypatch.setattr(simulation, "HAND_OFF_S", OLDER_HAND_OFF_S)
    found = served(one)
    assert 100 * found.kept(0.4, 0.012) == pytest.approx(one.kept_12, abs=16)
    assert 100 * found.kept(0.4, 0.025) == pytest.approx(one.kept_25, abs=1)
    assert 1e3 * np.median(found.first_s) == pytest.approx(one.first_ms, rel=0.3)
    if one.token_ms:
        token_s = np.median(found.token_s[found.gap_s > 0])
        assert 1e3 * token_s == pytest.approx(one.token_ms, rel=0.03)


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
    assert two.lag_s(8000) == pytest.approx(two.prompt_s(8000) / 6)
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
            for one in asked("lognormal", 24, 15, 3001)
        )
    )
    load = [*REFERENCE, "--gpus", "4", "--tp", "1", "--trace", str(trace), "--rate", "24"]
    tight = run(*load, "--token-ms", "12")
    assert tight["why"].startswith("Do not disaggregate"), tight
    loose = run(*load, "--token-ms", "25")
    assert loose["why"].startswith("Disaggregate"), loose
    assert "a second" in loose["breaks_first"]
    assert loose["routers"] == 1


def test_a_large_model_gets_other_ranks_for_prefill_than_for_decode() -> None:
    """Qwen3-32B on four H100s at 9 a second: two P of one rank and a D of two keep all, as they did
    when they were measured. One GPU has no room for the rows of a D."""
    load = ["--parameters", "32.76", "--kv-bytes", "262144", "--gpus", "4", "--pp", "1"]
    load += ["--prompt-tokens", "2048", "--output-tokens", "128", "--rate", "9"]
    said = run(*load, "--first-token-ms", "1000", "--token-ms", "40")
    assert said["options"][0]["plan"] == "2P1D, P of 1 rank, D of 2 ranks"
    assert said["options"][0]["kept"] == "100 %"


def test_long_answers_need_more_routers() -> None:
    """One of 40 chats a second was full, and two of 60 nearly."""
    load = [*REFERENCE, "--gpus", "4", "--tp", "1", "--output-tokens", "170", "--rate"]
    assert [run(*load, rate)["routers"] for rate in ("24", "60")] == [2, 3]


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
