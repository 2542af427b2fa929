"""What a stranger's tools read of the repository: workflow, forms, hooks of git, stable names."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_the_workflow_runs_what_continuous_integration_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    run = [step["run"] for step in job["steps"] if "run" in step]
    assert run[-1] == ".ci/run"
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_github_demands(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        return
    assert {"name", "description", "body"} <= form.keys()
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields)
    assert all(part["attributes"]["label"] for part in fields)


def test_what_runs_before_a_commit_is_there() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]:
        program, *words = shlex.split(hook["entry"])
        assert (ROOT / program).name in ("ruff", "buf", "pytest")
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


def test_stable_names_of_python_are_there_and_documented() -> None:
    page = (ROOT / "docs/releasing.md").read_text()
    named = re.findall(r"^- `([a-z_.]+)`:", page, re.MULTILINE)
    assert named == ["baton", "engine.hooks.protocol", "engine.tiers.stores.protocol"]
    for name in named:
        module = importlib.import_module(name)
        assert module.__doc__
        for shown in getattr(module, "__all__", ()):
            assert getattr(module, shown).__doc__, f"{name}.{shown}"


def test_every_decision_is_listed_and_says_what_would_change_our_mind() -> None:
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"\]\(([a-z-]+\.md)\)", (folder / "index.md").read_text())
    records = {path.name for path in folder.glob("*.md")} - {"index.md"}
    assert sorted(listed) == sorted(records)
    assert all(f"decisions/{name}" in (ROOT / "mkdocs.yml").read_text() for name in records)
    for name in records:
        text = (folder / name).read_text()
        for part in ("Decision", "Why", "Costs", "Other ways", "Would change our mind"):
            assert f"\n**{part}." in text, (name, part)
