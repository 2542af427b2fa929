"""The deliberate faults of `breakages` follow the code: each has its text, and tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from breakages import BREAKAGES, ROOT, Breakage, break_it


@pytest.mark.parametrize("breakage", BREAKAGES, ids=[breakage.name for breakage in BREAKAGES])
def test_a_fault_can_be_applied(tmp_path: Path, breakage: Breakage) -> None:
    file = tmp_path / breakage.file
    file.parent.mkdir(parents=True)
    file.write_bytes((ROOT / breakage.file).read_bytes())
    whole = break_it(breakage, tmp_path)
    assert file.read_text(encoding="utf-8") != whole
    assert [name for name in breakage.tests if not (ROOT / "tests" / name).exists()] == []


def test_each_has_a_name_of_its_own() -> None:
    assert len({breakage.name for breakage in BREAKAGES}) == len(BREAKAGES)
