"""`baton doctor` against real processes, whose paths are all called slow."""

from __future__ import annotations

import re
from pathlib import Path

from cluster import make_cluster
from tiny_models import write_tiny_model
from typer.testing import CliRunner

from console.cli import app


def test_the_doctor_names_every_slow_path_and_the_cluster_serves_all_the_same(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model")
    cluster = make_cluster(model, tmp_path / "logs", slow_peer_gigabytes_per_s=1e6)
    try:
        cluster.start_all()
        with cluster.client() as client:
            answer = client.generate(token_ids=list(range(5, 60)), max_tokens=4, ignore_eos=True)
        assert len(answer.token_ids) == 4
        for name, peer in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
            cluster.wait_measured(name, peer)
        result = CliRunner().invoke(
            app, ["doctor", "--no-self-test", "--admin", cluster.plan.admin_address]
        )
    finally:
        cluster.stop()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", result.output).splitlines()
    assert result.exit_code == 1, result.output
    assert max(map(len, lines)) <= 100
    assert any(re.search(r"ok +router +2 workers attached", line) for line in lines)
    for source, target in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
        row = rf" {source} +{target} +nixl/shm +\d+\.\d\d +\d+ +slow$"
        assert any(re.search(row, line) for line in lines), result.output
        assert any(f"ERROR {source}" in line and f"to {target}: slow" in line for line in lines)
