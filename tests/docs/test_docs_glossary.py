"""The glossary: each word stands once, and the file that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| `([^`]+)` \|$", re.MULTILINE)


def test_each_word_stands_once_and_names_a_file() -> None:
    rows = ROW.findall((ROOT / "docs" / "glossary.md").read_text())
    words = [word for word, _, _ in rows]
    assert len(words) > 20
    assert len(set(words)) == len(words)
    assert [place for _, _, place in rows if not (ROOT / place).exists()] == []
