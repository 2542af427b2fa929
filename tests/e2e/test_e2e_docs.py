"""Everything that the quick start and the README tell a newcomer to type, typed: line by line, as
it stands there, against what the page's own `baton up` started.

Only this differs: the model is a tiny one, and ports are free ones, so that addresses are replaced.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import debian
import pytest
from docs_kit import DOCS, ROOT, Block, blocks, commands, section
from tiny_models import write_tiny_model
from waiting import wait_until

pytestmark = pytest.mark.timeout(300)
QUICKSTART = (DOCS / "quickstart.md").read_text()
README = (ROOT / "README.md").read_text()
TEXTS = {"quickstart": QUICKSTART, "readme": section(README, "Try it") + section(README, "Use it")}
PROMPT_S = 120.0
"""Longest wait for `baton up` to be ready, and to stop."""
SHOWN = {
    "baton demo": "decode.generate",
    "baton models": "2,048",
    "baton generate": "output tokens",
    "baton trace": "kv.send",
    "baton top": "prefill-0",
    "baton doctor": "workers attached",
    "baton health": "SERVING",
    "curl": '"choices"',
}
"""What must be seen of each command; one that has no entry here is a mistake of this table."""


class Served(NamedTuple):
    """What `baton up` said."""

    model: Path
    folder: Path
    log: Path
    grpc: str
    http: str
    admin: str

    def adapted(self, text: str) -> str:
        """A command or program of a page, for the addresses and the model here."""
        text = text.replace("127.0.0.1:50051", self.grpc).replace("127.0.0.1:8000", self.http)
        here = f'LLM("{self.model}", device="cpu", debug={{"num_pages": 400}})'
        text = text.replace('LLM("demo")', here)
        return text.replace("baton demo", f"baton demo --model {self.model} --device cpu")

    @property
    def environment(self) -> dict[str, str]:
        routers = {"BATON_ROUTER": self.grpc, "BATON_ROUTER_ADMIN": self.admin}
        cache = {"BATON_CACHE": str(self.folder / "cache"), "COLUMNS": "120"}
        return {**os.environ, **routers, **cache}


def of(text: str, language: str) -> list[Block]:
    return [block for block in blocks(text) if block.language == language]


def typed(text: str) -> list[str]:
    return [line for block in of(text, "sh") for line in commands(block.content)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The page's own `baton up`; at the end the page's Ctrl-C."""
    folder = tmp_path_factory.mktemp("quickstart")
    model = write_tiny_model(folder / "model")
    (bin_folder := folder / ".venv" / "bin").mkdir(parents=True)
    (bin_folder / "activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    (up,) = [line for line in typed(QUICKSTART) if line.startswith("baton up")]
    here = f"--model {model} --device cpu --port 0 --http-port 0 --admin-port 0"
    log = folder / "up.log"
    environment = {**os.environ, "BATON_DEBUG_NUM_PAGES": "400", "COLUMNS": "120"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"source .venv/bin/activate; exec {up} {here}"],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        said = wait_for(log, "Ctrl-C", process)
        grpc, http, admin = (
            re.search(pattern, said)[1]
            for pattern in (r"gRPC +(\S+)", r"OpenAI +http://(\S+)/v1", r"metrics +http://(\S+)/")
        )
        yield Served(model, folder, log, grpc, http, admin)
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(PROMPT_S)
    assert code == 0, log.read_text()[-3000:]
    assert "everything has stopped" in log.read_text()


def wait_for(log: Path, words: str, process: subprocess.Popen[bytes]) -> str:
    def said() -> str:
        return log.read_text(errors="replace")

    wait_until(lambda: words in said() or process.poll() is not None, PROMPT_S, show=said)
    assert process.poll() is None, said()
    return said()


@pytest.mark.parametrize("page", TEXTS)
def test_commands(page: str, served: Served) -> None:
    elsewhere = typed(QUICKSTART) if page == "readme" else []
    for line in typed(TEXTS[page]):
        if line.startswith(("make ", "baton up", "source ")) or line in elsewhere:
            continue  # the fixture runs `baton up` and `source`; `make` has a test of its own
        if line.startswith("curl"):
            debian.program("curl")
        said = run(line, served)
        (shown,) = [words for start, words in SHOWN.items() if line.startswith(start)]
        assert shown in said, f"{line}\n{said}"


def run(line: str, served: Served) -> str:
    """Types a line into a shell; what it says."""
    script = f"source .venv/bin/activate; {served.adapted(line)}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=served.folder,
        env=served.environment,
        capture_output=True,
        text=True,
    )
    # A doctor may find something wrong with this machine; that it looked is what counts here.
    assert done.returncode == 0 or line.startswith("baton doctor"), f"{line}\n{done.stderr}"
    return done.stdout + done.stderr


PROGRAMS = [
    (page, index) for page, text in TEXTS.items() for index in range(len(of(text, "python")))
]


@pytest.mark.parametrize(("page", "index"), PROGRAMS)
def test_programs(page: str, index: int, served: Served) -> None:
    program = of(TEXTS[page], "python")[index].content
    done = subprocess.run(
        [sys.executable, "-c", served.adapted(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", TEXTS)
def test_make_demo_asks_what_it_is_told_to(page: str) -> None:
    """Without installing anything: what make would run."""
    made = [line for line in typed(TEXTS[page]) if line.startswith("make ")]
    assert made[0] == "make demo"
    for line in made:
        shown = subprocess.run(
            ["bash", "-c", f"{line} --dry-run"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert '/baton demo "$PROMPT"' in shown.stdout
