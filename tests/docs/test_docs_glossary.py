"""The glossary: each word stands once, and the file that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| `([^`]+)` \|$", re.MULTILINE)

MOST_WORDS = 48
"""A reader learns no more of a house before its code. Eight are of workers that have several hosts,
or share experts, of which a single worker knows nothing."""


def test_each_word_stands_once_and_names_a_file() -> None:
    rows = ROW.findall((ROOT / "docs" / "glossary.md").read_text())
    words = [word for word, _, _ in rows]
    assert 20 < len(words) <= MOST_WORDS, "look for the field's word"
    assert len(set(words)) == len(words)
    assert [place for _, _, place in rows if not (ROOT / place).exists()] == []
