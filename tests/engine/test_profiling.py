"""A profile holds the loop's verbs and the operators of so many steps, and the loop goes on."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from pathlib import Path

from engine_kit import build, finish, submit
from tiny_models import write_tiny_model

from engine.engine import Engine

STEPS = 6
VERBS = ("receive", "admit", "plan", "launch", "settle")


def written(folder: Path) -> Counter[str]:
    """Names in the one trace of the folder, once it is whole."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for path in folder.glob("*.trace.json.gz"):
            try:
                events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            except (EOFError, ValueError, gzip.BadGzipFile):
                continue
            return Counter(event.get("name") for event in events if event.get("ph") == "X")
        time.sleep(0.05)
    raise AssertionError("no profile was written")


def answer(engine: Engine) -> list[list[int]]:
    run = submit(engine, range(5, 90), 30, ignore_eos=True)
    finish(run)
    return run.tokens


def test_a_profile_of_some_steps(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", tokenizer=False)
    engine, folder = build(model), tmp_path / "profiles"
    try:
        alone = answer(engine)
        assert not folder.exists()
        engine.profile(STEPS, folder)
        assert answer(engine) == alone
        names = written(folder)
        assert answer(engine) == alone
    finally:
        engine.stop()
    assert all(STEPS - 1 <= names[verb] <= STEPS + 1 for verb in VERBS), names
    products = (count for name, count in names.items() if "linear" in name or "mm" in name)
    assert sum(products) > STEPS
    assert len(list(folder.iterdir())) == 1, "nobody asked for a second one"
