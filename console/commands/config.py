"""`baton config`: prints the settings of a process and where each comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from console.settings_options import KINDS, warn_of_old_names, warn_of_unknown_variables
from serving.output import stdout
from serving.settings import DEBUG, Resolved, resolve


def config(
    process: Annotated[
        str | None, typer.Argument(help="`router` or `worker`. Default: both.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file to read.")
    ] = None,
) -> None:
    """Print the settings that a process would start with, as TOML.

    Flags beat the environment, the environment beats the file, the file beats the defaults. A
    comment names the source of each value that is not a default. The output is a settings file:
    save it as baton.toml. A key is not printed.

    Example: [cyan]BATON_MAX_SEQUENCES=8 baton config worker[/]
    """
    if process is not None and process not in KINDS:
        raise typer.BadParameter("must be router or worker")
    warn_of_unknown_variables()
    for table, kind in KINDS.items():
        if process in (None, table):
            resolved = resolve(kind, table, {}, file)
            warn_of_old_names(resolved)
            stdout.print(to_toml(table, resolved), markup=False)


def to_toml(table: str, resolved: Resolved[Any]) -> str:
    """Writes settings as a TOML table. A comment names the source of each changed value."""
    settings = resolved.settings
    secret = {name for name, field in type(settings).model_fields.items() if not field.repr}
    values = settings.model_dump(mode="json", exclude=secret)
    debug = values.pop(DEBUG)
    lines = [f"[{table}]"]
    lines += [_line(name, value, resolved.sources[name]) for name, value in values.items()]
    lines += ["", f"[{table}.{DEBUG}]"]
    lines += [
        _line(name, value, resolved.sources[f"{DEBUG}.{name}"]) for name, value in debug.items()
    ]
    return "\n".join(lines) + "\n"


def _line(name: str, value: object, source: str) -> str:
    comment = "" if source == "default" else f"  # {source}"
    return f"{name} = {_literal(value)}{comment}"


def _literal(value: object) -> str:
    """Writes a value in TOML: as in JSON, but with non-ASCII text unescaped."""
    return json.dumps(value, ensure_ascii=False)
