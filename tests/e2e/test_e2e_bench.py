"""`baton bench` and `baton top` on real processes, as one uses them."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from cluster import running
from tiny_models import write_tiny_model
from typer.testing import CliRunner, Result

from console.cli import app

VOCABULARY = "380"
OUTPUT_TOKENS = 12
NUM = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    model = write_tiny_model(folder / "model")
    with running(model, folder / "logs", trace=True, ends_well=True) as cluster:
        yield cluster


def baton(*arguments: str, columns: int = 100) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def bench(*arguments: str) -> dict[str, object]:
    common = ("--vocabulary", VOCABULARY, "--warm-ups", "1", "--max-lag-ms", "10000", "--json")
    done = baton("bench", *common, *arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def over_grpc(cluster):
    lengths = ("--prompt-tokens", "70", "--output-tokens", str(OUTPUT_TOKENS))
    arrivals = ("--num", str(NUM), "--rate", "20", "--slo-e2e-ms", "60000")
    admin = ("--admin", cluster.plan.admin_address)
    url = f"grpc://{cluster.plan.router_address}"
    return bench("--url", url, *lengths, *arrivals, *admin)


def check(result, forced: bool = True) -> dict:
    (run,) = result["runs"]
    assert run["statuses"] == {"OK": NUM}
    assert result["valid"]
    names = ("ttft_ms", "second_gap_ms", "itl_ms", "tpot_ms", "e2e_ms")
    assert all(0 <= run[name]["p50"] <= run[name]["p99"] <= run[name]["max"] for name in names)
    assert run["ttft_ms"]["max"] <= run["e2e_ms"]["max"]
    assert run["output_token_rate"] * run["wall_s"] == pytest.approx(NUM * OUTPUT_TOKENS, rel=1e-3)
    return run


def test_over_grpc(cluster, over_grpc):
    run = check(over_grpc)
    assert run["attainment"] == 1.0
    assert run["seed"] > 0
    spans = over_grpc["spans"]
    assert spans["requests"] == NUM
    assert spans["median_and_max"]["prefill.compute"]["baton.prefill.tokens"] == [70, 70]
    assert spans["transports"] == ["nixl/shm"]
    cluster.check_baseline()


def test_top_shows_what_was_run(cluster, over_grpc):
    admin = cluster.plan.admin_address
    deadline = time.monotonic() + 30
    while True:  # Each side counts a transfer when it hears that it is done.
        found = json.loads(baton("top", "--once", "--json", "--admin", admin).stdout)
        prefill, decode = found["workers"]
        if prefill["transfers"]["sent"] == decode["transfers"]["received"] >= NUM:
            break
        assert time.monotonic() < deadline, found["workers"]
    assert [(one["name"], one["state"]) for one in found["workers"]] == [
        ("prefill-0", "up"),
        ("decode-0", "up"),
    ]
    assert sum(decode["pages"].values()) == 399
    assert decode["max_running"] == 32
    assert prefill["step"]["count"] >= NUM * 70 / 128, "prompts that wait together share a step"
    assert found["latencies"]["TTFT"]["count"] >= NUM
    assert found["latencies"]["hand-off, exposed"]["count"] >= NUM
    assert found["latencies"]["second-token gap"]["count"] >= NUM
    measured = np.median([over_grpc["runs"][0]["ttft_ms"]["p50"]])
    assert 0 < found["latencies"]["TTFT"]["p50_ms"] < 50 * measured
