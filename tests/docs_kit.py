"""The pages people read, and what stands in them, for tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = (*sorted(DOCS.glob("*.md")), *(ROOT / f"{name}.md" for name in ("README", "SECURITY")))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


class Block(NamedTuple):
    """A fenced block."""

    language: str
    content: str


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in _BLOCK.findall(text)]


def spans(text: str) -> list[str]:
    """What stands between single backquotes, outside of blocks."""
    return [span.replace("\\|", "|") for span in _SPAN.findall(_BLOCK.sub("", text))]


def commands(content: str) -> list[str]:
    """Lines of a shell block, continued ones joined, without comments."""
    lines = re.sub(r"\\\n\s*", "", content).splitlines()
    return [line for line in (re.sub(r"\s+#.*|^#.*", "", line).strip() for line in lines) if line]


def section(text: str, title: str) -> str:
    """What stands below a heading of the second rank."""
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
