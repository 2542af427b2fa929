"""The house keeps its shape: small rooms, imports that only go down, short functions and files."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_MODULES = 12
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_CLASS = 500
"""Of a file that is one class. The bounds serve reading: a class whose methods were stored
elsewhere would keep to 400 lines, and nobody could read it any more."""
MOST_LINES_OF_A_FUNCTION = 70

FLOORS = (
    ("faults", "telemetry", "telemetry.metrics"),
    ("prefixes",),
    ("baton", "baton.client"),
    ("serving",),
    ("serving.net", "serving.models"),
    ("serving.output",),
    ("kv_transfer", "kv_transfer.transports", "kv_transfer.nccl", "kv_transfer.ranks"),
    ("engine", "engine.adapters", "engine.beams", "engine.pooling"),
    ("engine.groups",),
    ("engine.pool",),
    ("engine.step",),
    ("engine.hooks", "engine.speculation"),
    (
        "engine.pages",
        "engine.masks",
        "engine.attention",
        "engine.attention.recurrent",
        "engine.sampling",
        "engine.model",
        "engine.model.families",
        "engine.model.families.mixtures",
        "engine.model.families.hybrids",
        "engine.model.drafts",
        "engine.model.mixers",
        "engine.model.adapters",
        "engine.model.precision",
        "engine.model.precision.formats",
        "engine.model.experts",
        "engine.model.wrapped",
    ),
    (
        "engine.tiers",
        "engine.tiers.stores",
        "engine.eager",
        "engine.groups.window",
        "engine.groups.state",
        "engine.groups.others",
    ),
    (
        "engine.schedule",
        "engine.cuda",
        "engine.cuda.adapters",
        "engine.cuda.hooks",
        "engine.cuda.kv",
        "engine.cuda.mixers",
        "engine.cuda.products",
        "engine.cuda.experts",
        "engine.cuda.groups",
        "engine.cuda.ranks",
        "engine.cuda.speculation",
        "engine.cuda.states",
        "engine.cuda.steps",
    ),
    ("engine.loop",),
    ("engine.parts",),
    ("engine.ranks", "engine.hosts"),
    ("engine.expert_groups",),
    ("engine.parts.scheduling",),
    ("engine.engine",),
    ("worker_base",),
    ("prefill_service", "decode_service", "fetch_service"),
    ("worker", "worker.hosts"),
    ("router", "router.batching"),
    ("router.aside", "router.deaths", "router.workers"),
    ("router.placement",),
    ("router.dispatch",),
    ("router.answers",),
    ("router.structure", "router.folders"),
    ("router.requests",),
    ("router.pooling",),
    ("router.doors",),
    ("router.doors.http",),
    ("router.doors.openai", "router.doors.http2"),
    ("router.doors.messages", "router.doors.responses", "router.doors.batches"),
    ("router.doors.openai.server", "router.server"),
    ("local",),
    (
        "console",
        "console.adapters",
        "console.batching",
        "console.commands",
        "console.doctor",
        "console.fencing",
        "console.loadgen",
        "console.loadgen.report",
        "console.planning",
        "console.roles",
        "console.top",
        "console.tracing",
    ),
    ("bench",),
)
"""Rooms from the ground up. A room imports from its own floor and from those below it. A module is
named where it lies on another floor than its package."""
PAGES_OF_GROUPS = {f"engine.groups.{name}" for name in ("others", "state", "window")}
PLANNING = {"pages", "masks", "tiers", "schedule", "loop", "pages of groups"}
RUNNING = {"attention", "sampling", "model", "eager", "cuda"}
"""The two sides of the engine: what plans steps, and what runs them. They share the floors up to
`engine.hooks`, and only the roof knows both."""
PROGRAMS = {"bench"}
"""Rooms whose modules are run one at a time: there may be many, and long ones."""
UPWARD = {("baton", "local"), ("baton.__main__", "console.cli")}
"""What `baton` shows on demand: `baton.LLM`, `python -m baton`."""


@cache
def modules() -> dict[str, Path]:
    """Modules of the product by name; stubs are generated, and left out."""
    tops = {room.split(".")[0] for floor in FLOORS for room in floor}
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for top in tops
        for path in (ROOT / top).rglob("*.py")
        if "v1" not in path.parts
    }


def room_of(module: str) -> str:
    """The package that it lies in."""
    is_package = module in PROGRAMS or modules()[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]


def imported(module: str) -> Iterator[str]:
    """Modules of the product that it imports: at its top, later, or for types alone."""
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules() else node.module for name in whole]
        yield from (name for name in names if name in modules() and name != module)


def test_every_package_is_a_room() -> None:
    rooms = {room_of(room) for floor in FLOORS for room in floor}
    assert {room_of(module) for module in modules()} - {"baton.inference", "baton.worker"} == rooms


def test_no_room_has_more_than_a_dozen_modules() -> None:
    found = Counter(room_of(module) for module in modules() if module != room_of(module))
    full = {room: count for room, count in found.items() if count > MOST_MODULES}
    assert full.keys() - PROGRAMS == set()


def test_imports_go_down() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

    def floor(module: str) -> int:
        return floor_of.get(module, floor_of.get(room_of(module), 0))

    upward = [
        (module, name)
        for module in modules()
        for name in imported(module)
        if floor(name) > floor(module)
    ]
    assert [
        arrow
        for arrow in upward
        if not any(arrow[0] == start and arrow[1].startswith(end) for start, end in UPWARD)
    ] == []


@pytest.mark.parametrize(("within", "head"), [("", "contents"), ("engine.", "side")])
def test_the_page_lists_all_rooms_from_the_top(within: str, head: str) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.partition(f"| room, from the top | {head} |")[2].partition("\n\n")[0]
    firsts = " ".join(row.split("|")[1] for row in table.splitlines()[2:])
    named = [
        within + name.rstrip("/").removesuffix(".py").replace("/", ".")
        for name in re.findall(r"`([^`]+)`", firsts)
    ]
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    floors = [floor_of[room] for room in named if room in floor_of.keys() - PROGRAMS]
    assert floors == sorted(floors, reverse=True)
    depth = within.count(".") + 1
    here = [room for room in floor_of if room.startswith(within)]
    assert {".".join(room.split(".")[:depth]) for room in here} <= {*named}


def test_the_two_sides_of_the_engine_meet_at_its_roof_alone() -> None:
    def room(module: str) -> str:
        parts = module.split(".")
        if module in PAGES_OF_GROUPS:
            return "pages of groups"
        return parts[1] if parts[0] == "engine" and len(parts) > 2 else ""

    arrows = {(room(module), room(name)) for module in modules() for name in imported(module)}
    arrows = {(start, end) for start, end in arrows if start and end and start != end}
    assert {(end, start) for start, end in arrows} & arrows == set()
    for one, other in ((PLANNING, RUNNING), (RUNNING, PLANNING)):
        assert {arrow for arrow in arrows if arrow[0] in one and arrow[1] in other} == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    below: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        below[module] = set(imported(module))
    left = set(below)
    while free := {module for module in left if not below[module] & left}:
        left -= free
    assert left == set(), "these import each other, or one that does"


def is_one_class(tree: ast.Module, lines: int) -> bool:
    """Whether a class takes nearly all of a file, but for its docstring and imports."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    longest = max(((one.end_lineno or 0) - one.lineno for one in classes), default=0)
    return longest > 0.75 * lines


def test_files_and_functions_are_short() -> None:
    long = []
    for module, path in modules().items():
        if room_of(module) in PROGRAMS:
            continue
        text = path.read_text(encoding="utf-8")
        tree, lines = ast.parse(text), len(text.splitlines())
        if lines > (MOST_LINES_OF_A_CLASS if is_one_class(tree, lines) else MOST_LINES_OF_A_FILE):
            long.append(str(path.relative_to(ROOT)))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert long == []


def is_number(node: ast.expr | None) -> bool:
    match node:
        case ast.Constant():
            return isinstance(node.value, int | float) and not isinstance(node.value, bool)
        case ast.UnaryOp():
            return is_number(node.operand)
        case ast.BinOp():
            return is_number(node.left) and is_number(node.right)
        case ast.Tuple():
            return bool(node.elts) and all(map(is_number, node.elts))
    return False


def unexplained(text: str) -> Iterator[str]:
    """Numeric constants of a module with neither a docstring, which a group may share, nor a
    comment."""
    body, lines = ast.parse(text).body, text.splitlines()
    group: list[str] = []
    for node in [*body, None]:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or node is None or not lines[node.lineno - 2].strip():
            yield from () if is_text else group
            group = []
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_number(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            above = lines[node.lineno - 2].startswith("#")
            if "#" not in lines[node.lineno - 1] and not above:
                group.append(ast.unparse(target))


def test_a_number_says_why_it_is_that_number() -> None:
    found = {
        f"{module}.{name}"
        for module, path in modules().items()
        if not module.startswith("bench.")
        for name in unexplained(path.read_text(encoding="utf-8"))
    }
    assert found == set(), "a docstring below, or a comment: a bound's reason, a measurement"


def test_a_docstring_names_its_subject() -> None:
    """It is read where a name is looked up, without the line above it."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in [*modules().values(), *(ROOT / "examples").rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if re.match(r"\s*(Of|The same|That of|Those|And|That)\b", str(node.value.value))
    ]
    assert found == [], "say what it is: `Pages of ...`, not `Of ...` or `The same ...`"
