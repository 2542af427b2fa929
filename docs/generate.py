"""Writes the reference pages: `python docs/generate.py [OUTPUT_FOLDER]`.

`configuration.md` comes from the settings models, `commands.md` from the command line, `api.md`
from the proto for clients and its comments. Two tables of `sizing.md` come from the shapes of
models, those of `models.md` from the tables of tests, and those of `coming-from-vllm.md` from the
parsers. The output folder defaults to this one. A test checks that the pages here are up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent
# The folder of this file, and the root of this checkout.
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from reference import commands, models, protos, settings, shapes, vllm  # noqa: E402 - found by the line above


def pages() -> dict[str, str]:
    """The contents of all pages, by file name."""
    return {
        "configuration.md": settings.page(),
        "commands.md": commands.page(),
        "api.md": protos.page(),
        "sizing.md": _filled_in(
            "sizing.md", {"shapes": shapes.shapes_table(), "ranks": shapes.ranks_table()}
        ),
        "models.md": _filled_in(
            "models.md",
            {
                "families": models.families_table(),
                "checkpoints": models.checkpoints_table(),
                "recipes": models.recipes_list(),
            },
        ),
        "coming-from-vllm.md": _filled_in(
            "coming-from-vllm.md",
            {
                "flags": vllm.flags_table(),
                "options": vllm.options_table(),
                "fields": vllm.fields_table(),
            },
        ),
    }


def _filled_in(name: str, parts: Mapping[str, str]) -> str:
    """Replaces the parts of a page between `<!-- MARK: ... -->` and `<!-- /MARK -->`."""
    page = (DOCS / name).read_text(encoding="utf-8")
    for mark, content in parts.items():
        between = re.compile(f"(<!-- {mark}: [^\n]*-->\n).*?(<!-- /{mark} -->)", re.DOTALL)
        pieces = between.split(page)
        assert len(pieces) == 4, f"{name}: marks of {mark}"
        page = f"{pieces[0]}{pieces[1]}\n{content}\n{pieces[2]}{pieces[3]}"
    return page


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    for name, content in pages().items():
        (folder / name).write_text(content, encoding="utf-8")
