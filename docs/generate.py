"""Writes the reference pages from what they describe: `python docs/generate.py [OUTPUT_FOLDER]`.

`configuration.md` comes from the settings models, `commands.md` from the command line, `api.md`
and `worker-api.md` from the protos and their comments, one table of `sizing.md` from models'
shapes. The output folder defaults to this one; a test compares the pages here with what would be
written now.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
# What lies beside this file, and the packages of this checkout.
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from reference import commands, protos, settings, shapes  # noqa: E402 - found by the line above


def pages() -> dict[str, str]:
    """Contents by file name."""
    return {
        "configuration.md": settings.page(),
        "commands.md": commands.page(),
        "api.md": protos.page("baton.inference.v1", protos.CLIENTS),
        "worker-api.md": protos.page("baton.worker.v1", protos.WORKERS),
        "sizing.md": _filled_in("sizing.md", "shapes", shapes.shapes_table()),
    }


def _filled_in(name: str, mark: str, content: str) -> str:
    """A page of ours, with new content between `<!-- MARK: ... -->` and `<!-- /MARK -->`."""
    page = (DOCS / name).read_text(encoding="utf-8")
    between = re.compile(f"(<!-- {mark}: .*-->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    filled, count = between.subn(lambda found: f"{found[1]}\n{content}\n{found[2]}", page)
    assert count == 1, f"{name}: marks of {mark}"
    return filled


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    for name, content in pages().items():
        (folder / name).write_text(content, encoding="utf-8")
