"""Writes `commands.md`: every command, with its arguments and options."""

from __future__ import annotations

import inspect
import re
from typing import Any

import typer
from typer.core import TyperGroup

from console.cli import app
from reference import GENERATED, table

SETTINGS = {"router": "router", "worker": "worker", "prefill": "worker", "decode": "worker"}
"""Commands that take settings as options. Settings have a page of their own."""
INTRODUCTION = f"""\
# Commands

{GENERATED}

`baton COMMAND --help` says the same in the terminal. Exit codes: 0 done, 1 failed, 2 wrong use,
3 try again later, 130 interrupted.
"""


def page() -> str:
    """The whole page."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    made = group.commands.items()
    return "\n".join([INTRODUCTION, *(_section(name, command) for name, command in made)])


def _section(name: str, command: Any) -> str:
    help_text = _plain(inspect.cleandoc(command.help or ""))
    parts = [f"## baton {name}\n\n{help_text}\n"]
    shown = [parameter for parameter in command.params if parameter.name != "help"]
    if name in SETTINGS:
        parts.append(f"Its options are [the {SETTINGS[name]}'s settings](configuration.md).\n")
    elif shown:
        rows = [(_names(one), _default(one), _plain(one.help or "")) for one in shown]
        parts.append(table(("option", "default", "what it is for"), *rows))
    return "\n".join(parts)


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    names = " ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    given = parameter.envvar or ()
    variables = (given,) if isinstance(given, str) else given
    return names + ("<br>" + " ".join(f"`{name}`" for name in variables) if variables else "")


def _default(parameter: Any) -> str:
    value = parameter.default
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value in (None, "", [], ()) or callable(value) else f"`{value}`"


def _plain(text: str) -> str:
    """Converts Rich's markup to Markdown."""
    text = re.sub(r"\[cyan\](.+?)\[/\]", r"`\1`", text)
    return re.sub(r"\\\[", "[", re.sub(r"\[/?\w*\]", "", text))
