"""The bars that all code clears: protos, and who may import whom. `make lint` has the others."""

from __future__ import annotations

import ast
import filecmp
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from baton.version import __version__
from serving.release import PROTOCOL, Protocol

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    "baton",
    "console",
    "local",
    "serving",
    "faults",
    "router",
    "prefill_service",
    "prefixes",
    "decode_service",
    "fetch_service",
    "engine",
    "kv_transfer",
    "telemetry",
    "worker",
    "worker_base",
)


def run(*command: str, cwd: Path = ROOT) -> None:
    tool = shutil.which(command[0], path=f"{Path(sys.executable).parent}") or command[0]
    done = subprocess.run(
        [tool, *command[1:]], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def released_protos() -> tuple[Path, str, Protocol]:
    """The stored image of the released protos, its release and its protocol."""
    (image,) = (ROOT / "protos/released").iterdir()
    named = re.fullmatch(r"(\d+\.\d+\.\d+)-protocol-(\d+)\.(\d+)\.binpb", image.name)
    assert named is not None
    return image, named[1], Protocol(int(named[2]), int(named[3]))


def test_protos_only_grow_since_the_last_release() -> None:
    run("buf", "breaking", "protos", "--against", str(released_protos()[0]))


def test_a_changed_protocol_between_router_and_workers_has_a_number_of_its_own(
    tmp_path: Path,
) -> None:
    image, _, released = released_protos()
    run("buf", "build", "protos", "--exclude-source-info", "-o", str(tmp_path / "now.binpb"))
    before, now = (
        next(file for file in files.file if file.package == "baton.worker.v1")
        for path in (image, tmp_path / "now.binpb")
        for files in (descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()),)
    )
    assert before == now or released < PROTOCOL, "docs/releasing.md says which number to raise"


def test_version_changelog_and_stored_protos_are_of_one_release() -> None:
    heads = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[:2] == ["Unreleased", released_protos()[1]]
    assert __version__.startswith(heads[1])


def test_stubs_are_current(tmp_path: Path) -> None:
    run(sys.executable, "protos/generate.py", str(tmp_path))
    made = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(made) >= 9
    different = filecmp.cmpfiles(tmp_path, ROOT, map(str, made), shallow=False)
    assert different[1:] == ([], []), "run `make protos`"


# What a room may never import, at any level of its files. Rooms are independent of each other
# where the table of docs/architecture.md says so.
SERVICES = {"prefill_service", "decode_service", "fetch_service"}
WORKER_SIDE = {"engine", "kv_transfer", "worker_base", *SERVICES}
NEVER = {
    "router": {"torch", "worker", *WORKER_SIDE},
    "engine": {"grpc", *set(ROOMS) - {"engine", "prefixes", "telemetry", "faults"}},
    "kv_transfer": {"grpc", *set(ROOMS) - {"kv_transfer", "telemetry", "faults"}},
    "telemetry": set(ROOMS) - {"telemetry"},
    "faults": set(ROOMS) - {"faults"},
    "baton": set(ROOMS) - {"baton", "console", "local"},  # these on demand: tests/test_rooms.py
    "serving": set(ROOMS) - {"serving", "baton", "telemetry", "faults"},
    "local": {"console"},
    "prefixes": {"torch", "grpc", "google", *set(ROOMS) - {"prefixes"}},
    "worker_base": {"router", "worker", *SERVICES},
    "prefill_service": {"router", "worker", *SERVICES - {"prefill_service"}},
    "decode_service": {"router", "worker", *SERVICES - {"decode_service"}},
    "fetch_service": {"router", "worker", *SERVICES - {"fetch_service"}},
    "worker": {"router"},
}


def imports(path: Path) -> Iterator[str]:
    """Top-level names of everything that the file imports, lazily or not."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("room", sorted(NEVER))
def test_rooms_import_only_what_they_may(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for name in imports(path)
        if name in NEVER[room]
    ]
    assert wrong == []


def import_without(modules: set[str], code: str) -> None:
    """Runs code in a process where the modules do not exist."""
    blocker = f"""
import sys
class Blocker:
    def find_spec(self, name, *_):
        if name.split('.')[0] in {modules!r}:
            raise ModuleNotFoundError(f'blocked: {{name}}')
sys.meta_path.insert(0, Blocker())
"""
    run(sys.executable, "-c", blocker + code)


GPU_ONLY = ("triton", "flash_attn", "flash_attn_interface")
"""Not there without a GPU, and neither are the modules of ours that need them."""
IMPORT_ALL = """
import importlib
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in {gpu_only!r}:
            raise
"""


def modules_of(room: str) -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / room).rglob("*.py"))
    ]


@pytest.mark.parametrize(
    ("room", "without"),
    [
        ("router", {"torch", "engine", "kv_transfer", "nixl", "nixl_cu13"}),
        ("engine", {"grpc", "google", "kv_transfer", "nixl", "nixl_cu13"}),
        ("kv_transfer", {"grpc", "google", "engine"}),
        ("telemetry", set(ROOMS) - {"telemetry"}),
        ("faults", set(ROOMS) - {"faults"}),
        ("prefixes", {"torch", "grpc", "google", *set(ROOMS) - {"prefixes"}}),
    ],
)
def test_rooms_import_where_the_others_are_not_installed(room: str, without: set[str]) -> None:
    import_without(without, IMPORT_ALL.format(names=modules_of(room), gpu_only=GPU_ONLY))


def test_a_router_serves_where_torch_is_not_installed() -> None:
    import_without(
        {"torch", "engine", "kv_transfer", "nixl", "nixl_cu13"},
        """
import asyncio
from router.server import RouterServer
from router.settings import RouterSettings

async def main():
    anywhere = dict.fromkeys(("listen", "internal_listen", "http_listen", "admin"), "127.0.0.1:0")
    server = RouterServer(RouterSettings(**anywhere))
    await server.start()
    assert await server.stop()

asyncio.run(main())
""",
    )


def test_nobody_waits_for_a_time_on_a_simple_queue() -> None:
    """CPython's waits for ever where the time is up before it has begun to wait."""
    texts = {path: path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    waiting = [path for path, text in texts.items() if "get(timeout" in text]
    assert waiting
    assert [path for path in waiting if "SimpleQueue()" in texts[path]] == []


def test_the_repository_names_nothing_outside_itself() -> None:
    """Folders beside the checkout mean nothing to a reader."""
    outside = "../" + "shared"
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    naming = [
        name
        for name in files
        if name and (ROOT / name).is_file() and outside in (ROOT / name).read_text(errors="ignore")
    ]
    assert naming == []


def test_processes_that_are_started_import_nothing_from_the_working_directory() -> None:
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    wrong = [str(path) for path in found if 'sys.executable, "-m"' in path.read_text("utf-8")]
    assert len(found) > 100
    assert wrong == [], 'start them with "-P"'
