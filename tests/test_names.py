"""Names that test code takes from the house's modules exist.

Tests are not typed, some imports stand inside functions, and some files run only where there is a
GPU or a compiler. So a name that moved is found here, by reading, and not months later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parent.parent
PLACES = (ROOT, ROOT / "tests", ROOT / "tests/engine", *sorted((ROOT / "examples").glob("hook-*")))
READ = ("tests", "bench", "examples")


def test_the_names_exist() -> None:
    missing = [
        fault for folder in READ for path in _files(ROOT / folder) for fault in _faults(path)
    ]
    assert not missing, "\n".join(missing)


def test_a_name_that_moved_is_found(tmp_path: Path) -> None:
    path = tmp_path / "test_moved.py"
    path.write_text(
        "import references as one\n"
        "from engine import engine\n"
        "from engine.engine import Engine, Enigne\n"
        "def here(): return one.NOISE, one.NOSE, engine.Engine, engine.Motor\n"
        "def there(one): return one.NOSE\n"
    )
    lines = [fault.partition(": ")[2] for fault in _faults(path)]
    assert lines == [
        "engine.engine has no Enigne",
        "references has no NOSE",
        "engine.engine has no Motor",
    ]


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if ".venv" not in path.parts]


def _faults(path: Path) -> Iterator[str]:
    """What a file takes from a module of the house that the module does not have."""
    tree = ast.parse(path.read_text())
    modules: dict[str, Path] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found = _module(alias.name)
                if found is not None and (alias.asname or "." not in alias.name):
                    modules[alias.asname or alias.name] = found
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = _module(node.module)
            for alias in node.names:
                inner = _module(f"{node.module}.{alias.name}")
                if inner is not None:
                    modules[alias.asname or alias.name] = inner
                elif found is not None and not _has(found, alias.name):
                    yield f"{path}:{node.lineno}: {node.module} has no {alias.name}"
    stored = {node.id for node in ast.walk(tree) if _is_stored(node)}
    yield from _inside(path, tree, {at: it for at, it in modules.items() if at not in stored})


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


def _inside(path: Path, node: ast.AST, modules: dict[str, Path]) -> Iterator[str]:
    """Attributes of modules that are missing, but for those of an argument of the same name."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        own = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        modules = {name: found for name, found in modules.items() if name not in own}
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        found = modules.get(node.value.id)
        if found is not None and not _has(found, node.attr):
            name = ".".join(found.relative_to(_place(found)).with_suffix("").parts)
            yield f"{path}:{node.lineno}: {name} has no {node.attr}"
    for child in ast.iter_child_nodes(node):
        yield from _inside(path, child, modules)


@cache
def _module(name: str) -> Path | None:
    """The file of a module of the house."""
    for place in PLACES:
        path = place.joinpath(*name.split("."))
        for file in (path / "__init__.py", path.with_suffix(".pyi"), path.with_suffix(".py")):
            if file.exists():
                return file
    return None


def _place(file: Path) -> Path:
    return max(
        (place for place in PLACES if file.is_relative_to(place)), key=lambda at: len(at.parts)
    )


def _has(file: Path, name: str) -> bool:
    names = _names(file)
    own = file.name == "__init__.py" and _is_module(file.parent / name)
    return own or name in names or name.startswith("__") or bool({"__getattr__", "*"} & names)


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").exists()


@cache
def _names(file: Path) -> frozenset[str]:
    """What stands at the top of a file, also inside `if`, `try` and `with`, and `global` names."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            names.update(*(one.names for one in ast.walk(node) if isinstance(one, ast.Global)))
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif _is_stored(node):
            names.add(node.id)
        waiting.extend(ast.iter_child_nodes(node))
    return frozenset(names)
