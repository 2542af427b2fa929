"""The site builds strictly, is complete without a network, and its generated pages are current."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from docs_kit import DOCS, ROOT, blocks
from pymdownx.superfences import SuperFencesException

sys.path.insert(0, str(DOCS))
import sequence
from reference import shapes

LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""Attributes by which a page makes a browser fetch something."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


class Loads(HTMLParser):
    """Addresses that a page loads something from."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if address := dict(attrs).get(LOADS.get(tag, "")):
            self.addresses.append(address)


def test_every_page_is_in_the_site_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.relative_to(site) for path in site.rglob("*.html")}
    assert {Path(f"{path.stem}.html") for path in DOCS.glob("*.md")} <= pages
    assert Path("repository/bench/index.html") in pages
    for page in pages:
        loads = Loads()
        loads.feed(content := (site / page).read_text())
        assert loads.addresses
        assert [one for one in loads.addresses if re.match(r"(?:[a-z]+:)?//", one)] == [], page
        assert 'class="mermaid"' not in content, page
        assert "iframe-worker.js" in content, "the search works from files"
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), style


def test_generated_pages_are_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DOCS / "generate.py", tmp_path], check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"configuration.md", "commands.md", "api.md"} <= made.keys()
    assert [name for name in made if made[name] != (DOCS / name).read_text()] == [], "make docs"


def test_shapes_take_what_the_engine_takes() -> None:
    """The formula of the sizing page, and the pool's own arithmetic."""
    import torch

    from engine.pool.kv_pool import PlainPool

    config = json.loads((ROOT / "bench" / "shapes" / "llama-8b" / "config.json").read_text())
    shape = next(shape for shape in shapes.SHAPES if shape.name == "Llama-3.1-8B")
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    keys += ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
    assert shape[1:] == tuple(config[key] for key in keys)
    pool = PlainPool(
        num_pages=1,
        num_layers=shape.layers,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_size=16,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert pool.page_bytes == 16 * shape.kv_bytes_per_token


def test_rates_on_the_sizing_page_are_those_of_the_benchmarks() -> None:
    measured = (ROOT / "bench" / "README.md").read_text()
    page = (DOCS / "sizing.md").read_text()
    rates = ["45,478", "40,405", "4.14 ms", "7.12 ms", "10.8 ms", "23.7 ms", "175 GB/s", "0.77 ms"]
    rates += ["29-40", "104-127", "6.16-6.52", "220-327", "924-1210", "10.3 ms"]
    assert [rate for rate in rates if rate not in page or rate not in measured] == []


DIAGRAMS = [
    block.content
    for path in (DOCS / "protocol.md", ROOT / "README.md")
    for block in blocks(path.read_text())
    if block.language == "mermaid"
]


@pytest.mark.parametrize("source", DIAGRAMS)
def test_a_diagram_shows_all_its_words_within_its_frame(source: str) -> None:
    drawn = sequence.fence(source)
    width = float(re.search(r'viewBox="0 0 (\d+)', drawn)[1])
    said = re.findall(r'text-anchor="(\w+)">((?:<tspan.*?</tspan>)+)', drawn)
    assert len(said) > 5
    for anchor, spans in said:
        for x, text in re.findall(r'<tspan x="(-?\d+)".*?>(.*?)</tspan>', spans):
            length = len(text) * sequence.CHAR_PX
            left = float(x) - (length / 2 if anchor == "middle" else 0)
            assert left >= 0
            assert left + length <= width, text
    words = {word for text in re.findall(r"(?:: | as |loop )(.+)", source) for word in text.split()}
    shown = " ".join(re.findall(r"<tspan.*?>(.*?)</tspan>", drawn))
    assert not {word for word in words if word not in shown}


@pytest.mark.parametrize("line", ["P->>Q: who is Q", "alt something", "P~~>P: what"])
def test_a_diagram_that_is_not_understood_is_an_error(line: str) -> None:
    with pytest.raises(SuperFencesException):
        sequence.fence(f"sequenceDiagram\nparticipant P as prefill\n{line}\n")
