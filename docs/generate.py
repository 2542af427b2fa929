"""Writes the reference pages: `python docs/generate.py [OUTPUT_FOLDER]`.

`configuration.md` comes from the settings models, `commands.md` from the command line, `api.md`
and `worker-api.md` from the protos and their comments, and one table of `sizing.md` from the shapes
of models. The output folder defaults to this one. A test checks that the pages here are up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
# The folder of this file, and the root of this checkout.
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from reference import commands, protos, settings, shapes  # noqa: E402 - found by the line above


def pages() -> dict[str, str]:
    """The contents of all pages, by file name."""
    return {
        "configuration.md": settings.page(),
        "commands.md": commands.page(),
        "api.md": protos.page("baton.inference.v1", protos.CLIENTS),
        "worker-api.md": protos.page("baton.worker.v1", protos.WORKERS),
        "sizing.md": _filled_in("sizing.md", "shapes", shapes.shapes_table()),
    }


def _filled_in(name: str, mark: str, content: str) -> str:
    """Replaces the part of a page between `<!-- MARK: ... -->` and `<!-- /MARK -->`."""
    page = (DOCS / name).read_text(encoding="utf-8")
    between = re.compile(f"(<!-- {mark}: .*-->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    filled, count = between.subn(lambda found: f"{found[1]}\n{content}\n{found[2]}", page)
    assert count == 1, f"{name}: marks of {mark}"
    return filled


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    for name, content in pages().items():
        (folder / name).write_text(content, encoding="utf-8")
