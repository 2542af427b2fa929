"""The page on several hosts does what it says, on two namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts_kit import NEEDS, can_have_hosts
from tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not can_have_hosts(), reason=NEEDS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_one_command_a_host_to_a_trace(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", layers=4)
    script = Path(__file__).with_name("follow_page.py")
    found = subprocess.run(
        ["unshare", "-n", "-m", sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    logs = [path.read_text(errors="replace") for path in sorted(tmp_path.glob("*.log"))]
    assert found.returncode == 0, (found.stderr, logs)
    for part in ("prefill.compute", "kv.send", "prefill-0", "decode.generate", "decode-0"):
        assert part in found.stdout
    assert not [log for log in logs if "connections refused" in log], logs
    assert "ranks started" in logs[2]
