"""Help of commands that have many options with long names.

Typer's table has columns for names, negations and types: at 80 columns it cuts names off and leaves
17 characters for what they mean. Here each option has a line of its own, and its text stands below.
"""

from __future__ import annotations

from typing import Any, Final

from rich.padding import Padding
from rich.text import Text
from typer.core import TyperCommand

from baton.commands.output import stdout

WIDEST: Final = 100
"""Columns; longer lines are hard to read."""


class LongHelp(TyperCommand):
    """A command that is explained like that."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints it; nothing is left to the formatter."""
        stdout.print()
        _show(f"[bold]Usage:[/] {self.get_usage(ctx).removeprefix('Usage: ')}", 1)
        for paragraph in (self.help or "").split("\n\n"):
            stdout.print()
            _show(paragraph, 1)
        stdout.print()
        for parameter in self.get_params(ctx):
            names, text = parameter.get_help_record(ctx) or ("", "")
            _show(Text(names, style="cyan"), 1)
            _show(" ".join(text.split()), 5)


def _show(text: str | Text, indent: int) -> None:
    """Wraps rich's markup to the terminal."""
    content = Text.from_markup(text) if isinstance(text, str) else text
    width = min(stdout.width, WIDEST)
    stdout.print(Padding(content, (0, 0, 0, indent)), width=width, soft_wrap=False)
