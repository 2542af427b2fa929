"""Lines that install work as written: none is of an index, and torch comes from the CPU's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_kit import PAGES

from serving import installing
from serving.installing import TORCH_INDEX, install_line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pip_lines(page: Path) -> None:
    for line in re.findall(r"pip install [^`\n]*", page.read_text()):
        assert "baton-llm" not in line, "it is on no index"
        assert "baton-client" not in line, "it is on no index"
        if re.search(r"\[[a-z0-9,]*(worker|gguf|dev)", line) and "gpu" not in line:
            assert TORCH_INDEX in line


def test_messages_install_from_where_this_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    assert install_line("router") == f"pip install -e '{root}[router]'"
    monkeypatch.setattr(installing, "_origin", lambda: "file:///dist/baton_llm-1-py3-none-any.whl")
    assert "'baton-llm[router] @ file:///dist/" in install_line("router")
    monkeypatch.setattr(installing, "_origin", lambda: "")
    assert install_line() == "pip install 'baton-llm'"
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    assert install_line("worker").endswith(f"--extra-index-url {TORCH_INDEX}")
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    assert TORCH_INDEX not in install_line("worker")
