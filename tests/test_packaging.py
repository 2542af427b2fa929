"""What an installation needs and holds: extras declare what the rooms import, and distributions
are complete."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from cluster import Cluster, running
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_bars import ROOMS
from tiny_models import write_tiny_model
from waiting import wait_until

import baton
from console import cli

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needs(*extras: str) -> set[str]:
    """Names of all distributions that an installation with these extras brings."""
    wanted = [Requirement(text) for text in PROJECT["dependencies"]]
    wanted += [Requirement(f"{PROJECT['name']}[{extra}]") for extra in extras]
    found: set[str] = set()
    seen: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        key = f"{name}{sorted(requirement.extras)}"
        if key in seen:
            continue
        seen.add(key)
        if name == PROJECT["name"]:
            lists = [PROJECT["optional-dependencies"][extra] for extra in requirement.extras]
            wanted += [Requirement(text) for texts in lists for text in texts]
            continue
        found.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):  # for another platform
            children = map(Requirement, metadata.requires(name) or [])
            wanted += [child for child in children if applies(child, requirement.extras)]
    return found


def applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""})


def foreign_modules(distributions: set[str]) -> set[str]:
    """Top-level modules of installed distributions that are none of these."""
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & (distributions | {PROJECT["name"]})
    }


def run_with(extras: tuple[str, ...], code: str) -> str:
    """Runs code in a process that can import what an installation with these extras has."""
    blocker = f"""
import sys
class Blocker:
    def find_spec(self, name, *_):
        if name.split('.')[0] in {foreign_modules(needs(*extras))!r}:
            raise ModuleNotFoundError(f'blocked: {{name}}', name=name)
sys.meta_path.insert(0, Blocker())
"""
    done = subprocess.run(
        [sys.executable, "-c", blocker + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


COMMANDS = """
import sys
from typer.testing import CliRunner
from console.cli import app
for arguments in {arguments!r}:
    result = CliRunner().invoke(app, arguments)
    print(result.exit_code, result.output)
"""


def test_a_client_needs_the_base_alone() -> None:
    brings = needs()
    assert not brings & {"torch", "numpy", "transformers", "opentelemetry-sdk", "starlette"}
    asks = [["--version"], ["--help"], ["models", "--router", "127.0.0.1:1"]]
    said = run_with((), "import baton.client\n" + COMMANDS.format(arguments=asks))
    assert f"0 {baton.__version__}" in said
    assert "3 error no router answers there" in said


def test_a_command_that_needs_more_says_which_extra() -> None:
    said = run_with((), COMMANDS.format(arguments=[["router"], ["worker", "--model", "x"]]))
    assert said.count("1 error ") == 2, said
    assert "[router]'" in " ".join(said.split())
    assert set(ROOMS) == cli.ROOMS  # a package that nobody else has


def test_a_model_in_ones_own_process_needs_what_servers_need() -> None:
    assert "local.llm" in run_with(("worker", "router"), "from baton import LLM; print(LLM)")
    hint = """
try:
    from baton import LLM
except ModuleNotFoundError as error:
    print(error, error.__notes__)
"""
    assert "[worker,router]" in run_with(("router",), hint)


def test_the_router_extra_is_what_a_router_imports() -> None:
    brings = needs("router")
    assert {"tokenizers", "jinja2", "opentelemetry-sdk"} <= brings
    assert not brings & {"torch", "nixl-cu13"}
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "router").rglob("*.py"))
    ]
    imports = "".join(f"import {module}\n" for module in modules)
    run_with(("router",), imports + "import baton.client, console.commands.serve\n")


def test_every_extra_is_declared() -> None:
    assert {"router", "worker", "gpu", "gguf", "dev"} <= set(PROJECT["optional-dependencies"])
    assert needs("worker") >= {"torch", "safetensors", "nixl-cu13"}
    assert needs("gpu") >= needs("worker")


def test_the_version_is_said_once() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", baton.__version__)


# From here on: distributions as users get them.


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows of."""
    folder = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(os.path.lexists, (ROOT / name for name in names.split("\0") if name)):
        copy = folder / name.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, copy, follow_symlinks=False)
    return folder


def build(source: Path, folder: Path) -> Path:
    """The folder, with an sdist, and a wheel that was built from it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and an sdist of the whole."""
    return build(source, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def client_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the client alone."""
    folder = build(source / "wheels" / "client", tmp_path_factory.mktemp("client-dist"))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(folder: Path, what: str) -> Path:
    """A virtual environment with that and no pip of its own; its python."""
    venv.create(folder)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", what],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return python


def packages(python: Path) -> set[str]:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "list", "--format", "json"],
        capture_output=True,
        check=True,
    )
    return {package["name"].lower() for package in json.loads(listed.stdout)}


def away_from_here() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_distributions_are_complete(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    held = set(archive.namelist())
    stem = f"baton_llm-{baton.__version__}"
    tracked = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".pyi", ".json", ".typed"} and "__pycache__" not in path.parts
    }
    assert tracked <= held
    assert all(archive.read(name) == (ROOT / name).read_bytes() for name in tracked)
    protos = f"{stem}.data/data/share/baton/protos/baton/inference/v1"
    assert {f"{protos}/inference.proto", f"{protos}/service_config.json"} <= held
    assert {f"{room}/py.typed" for room in ROOMS} <= held
    assert f"{stem}.dist-info/licenses/LICENSE" in held
    assert not {name for name in held if name.startswith(("tests/", "bench/"))}
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as sdist:
        names = {name.removeprefix(f"{stem}/") for name in sdist.getnames()}
    top = {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md"}
    assert top | tracked | {"protos/baton/inference/v1/inference.proto"} <= names


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_client_installs_without_torch(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    python = install(tmp_path / "venv", str(wheel))
    assert not packages(python) & {"torch", "numpy", "transformers", "opentelemetry-sdk"}
    for command in (["-c", "import baton.client"], ["-m", "baton", "--version"]):
        done = subprocess.run(
            [python, *command], cwd=tmp_path, env=away_from_here(), capture_output=True, check=True
        )
    assert done.stdout.decode().strip() == baton.__version__


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_router_installs_and_serves_without_torch(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    python = install(tmp_path / "venv", f"{wheel}[router]")
    assert "torch" not in packages(python)
    with free_port() as port:
        flags = ["--listen", "--internal-listen", "--http-listen"]
        command = [str(python), "-m", "baton", "router", "--admin", f"127.0.0.1:{port}"]
        command += [word for flag in flags for word in (flag, "127.0.0.1:0")]
    router = subprocess.Popen(
        command, cwd=tmp_path, env=away_from_here(), stderr=subprocess.PIPE, text=True
    )
    try:
        assert router.stderr is not None
        assert any("router serves" in line for line in router.stderr)
        assert b"baton_queue_depth" in wait_until(lambda: read(f"http://127.0.0.1:{port}/metrics"))
    finally:
        router.terminate()
        assert router.wait(30) == 0


def read(url: str) -> bytes:
    """What is there; nothing while nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=10) as page:
            return bytes(page.read())
    except OSError:
        return b""


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


# The client alone, as a distribution of its own.

CLIENT = tomllib.loads((ROOT / "wheels" / "client" / "pyproject.toml").read_text())["project"]


def test_both_distributions_say_the_same_of_what_they_share() -> None:
    assert set(CLIENT["dependencies"]) < set(PROJECT["dependencies"])
    for field in ("dynamic", "license", "requires-python"):
        assert CLIENT[field] == PROJECT[field]
    assert set(CLIENT["classifiers"]) < set(PROJECT["classifiers"])


def test_the_client_alone_has_the_files_that_it_needs_and_no_others(client_wheel: Path) -> None:
    modules = ("__init__", "addresses", "errors", "grpc_options", "tls", "version")
    wanted = {"baton/py.typed"} | {f"baton/{name}.py" for name in modules}
    for room in ("client", "inference"):
        files = (ROOT / "baton" / room).rglob("*.*")
        wanted |= {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    with zipfile.ZipFile(client_wheel) as wheel:
        stem = f"baton_client-{baton.__version__}.dist-info/"
        held = {name for name in wheel.namelist() if not name.startswith(stem)}
        assert held == wanted
        assert all(wheel.read(name) == (ROOT / name).read_bytes() for name in held)
        assert wheel.read(f"{stem}licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A router, and one worker that does both legs."""
    folder = tmp_path_factory.mktemp("cluster")
    model = write_tiny_model(folder)
    with running(model, folder / "logs", prefill=0, decode=0, both=1) as cluster:
        yield cluster


@pytest.mark.timeout(300)
def test_the_client_alone_talks_to_a_router(
    client_wheel: Path, cluster: Cluster, tmp_path: Path
) -> None:
    python = install(tmp_path / "venv", str(client_wheel))
    needed = {canonicalize_name(Requirement(text).name) for text in CLIENT["dependencies"]}
    assert packages(python) - {"typing_extensions"} == needed | {"baton-client"}  # gRPC needs it
    # -P: what lies beside the program is not importable.
    command = [python, "-P", ROOT / "tests" / "client_alone.py", cluster.plan.router_address]
    done = subprocess.run(
        [*command, *ROOMS, "pydantic"],
        cwd=tmp_path,
        env=away_from_here(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["whole"] == "".join(said["deltas"]) != ""
    assert len(said["deltas"]) > 1
    assert said["refused"] == ["input.sampling.temperature"]
    assert "pip uninstall baton-client" in said["no LLM"]
    assert said["found"] == ["baton"]
