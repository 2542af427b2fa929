"""What benchmarks share, and that the pages name only commands that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.harness import read_json, table, write_json

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "bench/README.md", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_benchmarks_that_a_page_names_are_there(page: Path) -> None:
    """Or say the commit that has them."""
    text = page.read_text()
    here = re.sub(r"`[^`]*`\s+\(at [0-9a-f]{8}\)", "", text)
    named = re.findall(r"\bbench[./](?:history/)?([a-z_]+)\b(?=[^a-z_])", here)
    gone = [
        name
        for name in named
        if not any((ROOT / "bench").glob(f"{name}*")) and f"bench/history/{name}" not in here
    ]
    assert gone == []


def test_a_file_says_where_its_figures_come_from(tmp_path: Path) -> None:
    write_json(None, 1)
    write_json(tmp_path / "found.json", [{"ms": 1.5}])
    assert read_json(tmp_path / "found.json") == [{"ms": 1.5}]
    about = json.loads((tmp_path / "found.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", about["commit"])
    assert about["command"].startswith("python -m bench.")
    assert about["torch"]


def test_a_table_has_its_numbers_to_the_right() -> None:
    assert table([["rows", "ms"], ["one", 1.0], ["sixteen", 22.34567]]) == (
        "rows        ms\none          1\nsixteen  22.35"
    )
