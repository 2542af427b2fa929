"""What the pages name is there: commands, flags, variables, metrics, alerts, reasons, files."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import grpc
import pytest
import typer
import yaml
from docs_kit import DOCS, PAGES, ROOT, blocks, commands, spans
from test_bars import ROOMS

from console.cli import app
from local import vllm_flags
from router.settings import RouterSettings
from serving.settings import fields
from telemetry.metrics.table import DECLARED
from telemetry.names import SpanName
from worker.settings import WorkerSettings

COMMANDS = typer.main.get_command(app).commands
FLAGS = {
    name: {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    for name, command in COMMANDS.items()
}
FOREIGN_FLAGS = {"--scale", "--summary", "--merge", "--profile", "--exact", "--help", "--version"}
"""Of Docker, of `python -m chaos` and of benchmarks. vLLM's are in a table of their own."""
SOURCES = {path: path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")}


@cache
def in_sources(pattern: str) -> set[str]:
    """What of the product a pattern finds."""
    return set(re.findall(pattern, "".join(SOURCES.values())))


@cache
def tracked() -> list[str]:
    """Files that git knows of."""
    return subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()


def every_page() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def code(page: Path) -> list[str]:
    """Command lines of the page's blocks, and what stands between backquotes."""
    text = page.read_text()
    shell = [block.content for block in blocks(text) if block.language == "sh"]
    return [line for content in shell for line in commands(content)] + spans(text)


@every_page()
def test_commands_and_flags(page: Path) -> None:
    wrong = []
    for line in code(page):
        if re.match(r"--[a-z]", line):
            flag = re.split(r"[ =]", line)[0]
            if flag not in FOREIGN_FLAGS.union(vllm_flags.FLAGS, *FLAGS.values()):
                wrong.append(line)
        elif found := re.match(r"(?:[A-Z_]+=\S+ )*baton ([a-z]+)\b(.*)", line):
            wrong += [line] if found[1] not in COMMANDS else unknown_flags(found[1], found[2])
    assert wrong == []


def unknown_flags(command: str, rest: str) -> list[str]:
    given = [word.split("=")[0] for word in shlex.split(rest) if re.match(r"--[a-z]", word)]
    return [f"{command} {flag}" for flag in given if flag not in FLAGS[command] | {"--help"}]


@every_page()
def test_variables(page: Path) -> None:
    known = {
        f"BATON_{name.replace('.', '_').upper()}"
        for kind in (WorkerSettings, RouterSettings)
        for name in fields(kind)
    }
    known |= in_sources(r"BATON_[A-Z_]+")
    compose = (ROOT / "compose" / "docker-compose.yml").read_text()
    known |= set(re.findall(r"BATON_[A-Z_]+", compose + (ROOT / "compose" / ".env").read_text()))
    assert set(re.findall(r"\bBATON_[A-Z_]*[A-Z]\b", page.read_text())) <= known


@every_page()
def test_metrics(page: Path) -> None:
    known = {name + end for name in DECLARED for end in ("", "_total", "_sum", "_count", "_bucket")}
    known |= {label for declared in DECLARED.values() for label in declared.labels}
    assert set(re.findall(r"\b(?:baton|gen_ai)_[a-z_]*[a-z]\b", page.read_text())) <= known


@every_page()
def test_alerts(page: Path) -> None:
    rules = yaml.safe_load((ROOT / "compose" / "prometheus" / "alerts.yml").read_text())
    known = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert {
        span for span in spans(page.read_text()) if re.fullmatch(r"Baton[A-Z]\w+", span)
    } <= known


@every_page()
def test_reasons(page: Path) -> None:
    known = {code.name for code in grpc.StatusCode}
    known |= in_sources(r'"([A-Z]+(?:_[A-Z]+)+)"')
    known |= {"MAX_TOKENS", "NOT_SERVING"}
    prose = re.sub(r"`[^`]*`", "", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", prose))
    assert {name for name in named if not re.match(r"PR_|UCX_|BATON_", name)} <= known


@every_page()
def test_files(page: Path) -> None:
    """Named from the root, or from the folder that the page is about."""
    pattern = r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md|sh|yml|json|proto|mjs|css)"
    text = page.read_text()
    if page.stem == "moved":
        text = re.sub(r"^\|.*?\|", "|", text, flags=re.MULTILINE)  # old paths
    named = [span for span in spans(text) if re.fullmatch(pattern, span)]
    assert [
        name for name in named if not any(f"/{one}".endswith(f"/{name}") for one in tracked())
    ] == []


@every_page()
def test_bodies_are_called_json(page: Path) -> None:
    """The HTTP API refuses others."""
    sent = re.findall(r"^(?:\$ )?curl (?:.*\\\n)*.* -d .*", page.read_text(), flags=re.MULTILINE)
    assert [each for each in sent if "content-type: application/json" not in each] == []


def test_spans_of_the_waterfall() -> None:
    known = {value for name, value in vars(SpanName).items() if name.isupper()}
    pages = [DOCS / name for name in ("troubleshooting.md", "quickstart.md", "how-it-works.md")]
    named = [span for page in pages for span in spans(page.read_text())]
    named = [span for span in named if re.fullmatch(r"(?:router|prefill|kv|decode)\.[a-z]+", span)]
    assert len(named) > 8
    assert set(named) <= known


def test_what_processes_say_is_quoted_as_they_say_it() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    table = text.split("| what its log says |", 1)[1].split("\n\n", 1)[0]
    said = [row.split("|")[1].strip(" .") for row in table.splitlines()[2:]]
    said += re.findall(r"says\s+\*(.+?)\*", text)
    assert len(said) >= 5
    everything = "".join(SOURCES.values())
    assert [words for words in said if words not in everything] == []


@cache
def defined(path: Path) -> set[str]:
    """Functions and classes of a module, and `Class.method`."""
    tree = ast.parse(SOURCES[path])
    named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tops = [node for node in tree.body if isinstance(node, named)]
    inner = [(top.name, node) for top in tops for node in top.body if isinstance(node, named)]
    return {top.name for top in tops} | {f"{name}.{node.name}" for name, node in inner}


def test_the_steps_of_a_request_name_functions_that_there_are() -> None:
    text = (DOCS / "architecture.md").read_text()
    lists = re.findall(r"\*\*Code:\*\*(.+?)\.\n(?=\d|\n)", text, re.DOTALL)
    assert len(lists) == 9
    for name in re.findall(r"`([^`]+)`", "".join(lists)):
        file, _, dotted = name.rpartition(":")
        files = [path for path in SOURCES if f"/{path}".endswith(f"/{file}" if file else ".py")]
        assert len(files) == 1 or not file, name
        assert any(dotted in defined(path) for path in files), name
