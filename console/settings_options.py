"""Makes command-line options from a settings model or a dataclass, so each is described once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.markup import escape

from console.supervisor import PARENT_VARIABLE
from router.settings import RouterSettings
from serving.output import stderr
from serving.settings import (
    CONFIG_VARIABLE,
    DEBUG,
    PREFIX,
    Resolved,
    Settings,
    debug_settings,
    fields,
    moved_to_debug,
    nearest,
    resolve,
)
from worker.settings import WorkerSettings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Run = Callable[[Resolved[Settings]], None]
Given = TypeVar("Given")

KINDS: Final[Mapping[str, type[BaseModel]]] = {
    "router": RouterSettings,
    "worker": WorkerSettings,
}
"""Settings models by their table in the file."""
_OTHER_VARIABLES: Final = frozenset(
    f"{PREFIX}{name}" for name in ("CACHE", "ROUTER", "ROUTER_ADMIN", "TOKEN")
) | {CONFIG_VARIABLE, PARENT_VARIABLE}
"""Variables of Baton that are no setting of a process."""


def takes_settings(
    kind: type[Settings], table: str, **fixed: object
) -> Callable[[Run[Settings]], Callable[..., None]]:
    """Makes a command whose options are the fields of `kind`, and `--config FILE`.

    Args:
        kind: the settings model.
        table: its table in the settings file.
        fixed: fields that the command sets itself; they are no options.
    """

    def decorate(run: Run[Settings]) -> Callable[..., None]:
        def command(config: Path | None = None, **flags: Any) -> None:
            resolved = resolve(kind, table, {**flags, **fixed}, config)
            warn_of_unknown_variables()
            warn_of_old_names(resolved)
            run(resolved)

        options = {
            name: Annotated[_option_type(field) | None, _option(field)]
            for name, field in kind.model_fields.items()
            if name not in fixed and name != DEBUG
        }
        rare = debug_settings(kind).model_fields
        options |= {
            name: Annotated[_option_type(rare[name]) | None, typer.Option(hidden=True)]
            for name in sorted(moved_to_debug(kind))
        }
        file_option = typer.Option(
            metavar="FILE", help=escape(f"TOML file; its table is [{table}].")
        )
        annotations = {"config": Annotated[Path | None, file_option], **options}
        return _with_options(command, run.__doc__, annotations, dict.fromkeys(annotations))

    return decorate


def takes_options(kind: type[Given]) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Makes a command whose options are the fields of a dataclass, annotated as for typer."""

    def decorate(run: Callable[[Given], None]) -> Callable[..., None]:
        def command(**flags: Any) -> None:
            run(kind(**flags))

        annotations, by_default = get_type_hints(kind, include_extras=True), kind()
        defaults = {name: getattr(by_default, name) for name in annotations}
        return _with_options(command, run.__doc__, annotations, defaults)

    return decorate


def warn_of_unknown_variables() -> None:
    """Warns of variables in the environment that look like settings and are none.

    Unlike a wrong flag they are not refused, since other programs may use them. Under `baton up`
    only `baton up` itself warns.
    """
    if PARENT_VARIABLE not in os.environ:
        for warning in unknown_variables(os.environ):
            stderr.print(f"[yellow]warning[/] {escape(warning)}")


def warn_of_old_names(resolved: Resolved[Any]) -> None:
    """Warns of settings that were given under a name of the last release. Under `baton up` only
    `baton up` itself warns."""
    if PARENT_VARIABLE not in os.environ:
        for warning in resolved.warnings:
            stderr.print(f"[yellow]warning[/] {escape(warning)}")


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each `BATON_*` variable that no process reads."""
    names = [name.replace(".", "_") for kind in KINDS.values() for name in fields(kind)]
    names += [name for kind in KINDS.values() for name in moved_to_debug(kind)]
    settings = {f"{PREFIX}{name}".upper() for name in names}
    for name in sorted(environment):
        if name.upper().startswith(PREFIX) and name.upper() not in settings | _OTHER_VARIABLES:
            yield f"{name} is no setting, and ignored{nearest(name.upper(), settings)}"


def _with_options(
    command: Callable[..., None],
    text: str | None,
    annotations: Mapping[str, Any],
    defaults: Mapping[str, object],
) -> Callable[..., None]:
    """Gives a command the keyword arguments and the help that typer shall see."""
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what typer reads
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation
            )
            for name, annotation in annotations.items()
        ]
    )
    command.__annotations__ = dict(annotations)
    command.__doc__ = text
    return command


def _option_type(field: FieldInfo) -> Any:
    """The type that the command line parses; the settings model validates the value."""
    return list[str] if get_origin(field.annotation) is tuple else field.annotation


def _option(field: FieldInfo) -> Any:
    """Makes an option with its help. The help ends with the default, unless it is empty or 0."""
    default = field.get_default()
    if isinstance(default, tuple):
        default = ",".join(default)
    elif isinstance(default, bool):
        default = str(default).lower()
    shown = "" if default in (None, "", 0, PydanticUndefined) else f" [default: {default}]"
    return typer.Option(help=escape(f"{field.description}{shown}"), show_default=False)
