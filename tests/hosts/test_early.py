"""Ranks' processes that start before there is an order for them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from engine.hosts import early


def test_one_that_has_ended_gets_no_order(tmp_path: Path) -> None:
    early.start(1)
    (waiting,) = early._waiting
    waiting.kill()
    os.waitid(os.P_PID, waiting.pid, os.WEXITED | os.WNOWAIT)
    assert early.take(tmp_path, {}) is None
    assert waiting.returncode is not None, "it is reaped"


def test_one_whose_worker_is_gone_imports_nothing_more() -> None:
    """A worker that is started again and again would else leave each time some that import for
    seconds."""
    worker = "import os; from engine.hosts import early; early.start(1); "
    worker += "print(early._waiting[0].pid, flush=True); os._exit(0)"
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", worker], env=os.environ | path, stdout=subprocess.PIPE, check=True
    )
    try:
        rank = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return
    try:
        while not select.select([rank], [], [], 0.01)[0]:
            with suppress(OSError):  # It has ended meanwhile.
                maps = Path(f"/proc/{int(done.stdout)}/maps").read_text()
                assert "libtorch" not in maps, "it imports for nobody"
    finally:
        os.close(rank)
