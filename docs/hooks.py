"""What mkdocs does beside its usual work while it builds the site.

1. `on_config` draws sequence diagrams by `sequence.py`, without a script in the page.
2. `on_files` adds a page for every file outside of `docs/` that a page links to: Markdown as it is,
   pictures as they are, anything else as a listing. The site needs no other place to be complete.
3. `on_page_markdown` points the links at those pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

import sequence
from mkdocs.structure.files import File

ROOT: Final = Path(__file__).resolve().parent.parent
ELSEWHERE: Final = "repository"
"""Folder of the site for what lies outside of `docs/`."""
PICTURES: Final = (".png", ".svg")
LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: Any) -> Any:
    """Diagrams are drawn here."""
    drawn = {"name": "mermaid", "class": "mermaid", "format": sequence.fence}
    config["mdx_configs"].setdefault("pymdownx.superfences", {})["custom_fences"] = [drawn]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds pages for what is linked outside of `docs/`, and for what those link to in turn."""
    waiting = {file.src_uri: file.content_string for file in files.documentation_pages()}
    known = set(waiting)
    while waiting:
        uri, content = waiting.popitem()
        for link in LINK.findall(content):
            target = _target(uri, link)
            there = _uri(target)
            if there in known or not (ROOT / target).is_file() or target.startswith("docs/"):
                continue
            known.add(there)
            if there.endswith(PICTURES):
                files.append(File.generated(config, there, abs_src_path=str(ROOT / target)))
                continue
            waiting[there] = _page(target)
            files.append(File.generated(config, there, content=waiting[there]))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links at the pages that `on_files` made."""
    here = page.file.src_uri

    def rewritten(found: re.Match[str]) -> str:
        target = _target(here, found[1])
        if not (ROOT / target).is_file():
            return found[0]
        return posixpath.relpath(_uri(target), posixpath.dirname(here) or ".")

    return LINK.sub(rewritten, markdown)


def _target(uri: str, link: str) -> str:
    """What a link on a page of the site means, as a path from the repository's root."""
    inside = uri.startswith(f"{ELSEWHERE}/")
    source = uri.removeprefix(f"{ELSEWHERE}/") if inside else f"docs/{uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _uri(target: str) -> str:
    """Where a file of the repository is in the site."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"{ELSEWHERE}/{target}" + ("" if target.endswith((".md", *PICTURES)) else ".md")


def _page(target: str) -> str:
    content = (ROOT / target).read_text(encoding="utf-8")
    if target.endswith(".md"):
        return content
    language = {"mjs": "js"}.get(suffix := target.rpartition(".")[2], suffix)
    return f"# {target}\n\n`````{language}\n{content}\n`````\n"
