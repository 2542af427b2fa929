"""Ranks' processes that start before there is an order for them."""

from __future__ import annotations

import os
from pathlib import Path

from engine.hosts import early


def test_one_that_has_ended_gets_no_order(tmp_path: Path) -> None:
    early.start(1)
    (waiting,) = early._waiting
    waiting.kill()
    os.waitid(os.P_PID, waiting.pid, os.WEXITED | os.WNOWAIT)
    assert early.take(tmp_path, {}) is None
    assert waiting.returncode is not None, "it is reaped"
