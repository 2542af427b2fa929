"""Loading is told of: to who sits at a terminal, and in logs."""

from __future__ import annotations

import io
import logging
import os
import re
import sys

import pytest
from rich.console import Console

from worker.loading import loading_progress, terminal


def load(progress) -> None:
    for done in range(1, 201):
        progress("weights", done, 200)
    progress("graphs", 0, 4)


def test_a_log_gets_a_line_a_quarter(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), loading_progress(None) as progress:
        load(progress)
    told = [(record.phase, record.percent) for record in caplog.records]
    assert told == [("weights", percent) for percent in (0, 25, 50, 75, 100)] + [("graphs", 0)]


def test_a_terminal_gets_a_bar_a_phase_and_logs_above_it(monkeypatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        with loading_progress(Console(file=screen, force_terminal=True, width=80)) as progress:
            load(progress)
            logging.getLogger("attention").warning("fa3")
            assert handler.stream is not screen
        assert handler.stream is screen
    finally:
        logging.getLogger().removeHandler(handler)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()))
    shown = [line.strip() for line in lines if line.strip()]
    assert "fa3" in shown, "a line of its own"
    weights, graphs = shown[-2:]
    assert re.match(r"weights ━+ 100% \d:\d\d:\d\d$", weights)
    assert re.match(r"graphs\s+[━╺╸ ]* 0% \d:\d\d:\d\d$", graphs)


def test_only_who_sits_there_gets_a_bar(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    theirs, ours = os.openpty()
    reader, writer = os.pipe()
    with open(ours, "w") as screen, open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        assert terminal("text") is None
        monkeypatch.setattr(sys, "stderr", screen)
        assert terminal("text") is not None
        assert terminal("json") is None
        monkeypatch.setenv("TERM", "dumb")
        assert terminal("text") is None
    os.close(theirs)
    os.close(reader)
