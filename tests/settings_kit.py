"""Settings from flat names: those of the table `debug` find their place by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from router.settings import RouterSettings
from serving.settings import DEBUG, debug_settings, fields
from worker.settings import WorkerSettings

Kind = TypeVar("Kind", WorkerSettings, RouterSettings)
DEBUG_NAMES = {
    name.removeprefix(f"{DEBUG}.")
    for kind in (WorkerSettings, RouterSettings)
    for name in fields(kind)
    if name.startswith(f"{DEBUG}.")
}


def settings_of(kind: type[Kind], **flat: Any) -> Kind:
    """The model, checked as ever."""
    rare = debug_settings(kind).model_fields.keys() & flat.keys()
    debug = {name: flat.pop(name) for name in rare}
    return kind(**flat, debug=debug)


def variables_of(flat: Mapping[str, object]) -> dict[str, str]:
    """The same for a process that is to be started."""
    return {variable(name): str(value) for name, value in flat.items()}


def variable(name: str) -> str:
    """Which variable of the environment sets it."""
    return f"BATON_{'DEBUG_' * (name in DEBUG_NAMES)}{name.upper()}"
