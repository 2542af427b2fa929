"""Prints help of commands that have many options with long names.

Typer's table has columns for names, negations and types. At 80 columns it cuts names off and leaves
17 characters for their meaning. Here each option has a line of its own, with its text below.
"""

from __future__ import annotations

from typing import Any, Final

from rich.padding import Padding
from rich.text import Text
from typer.core import TyperCommand

from serving.output import stdout

WIDEST: Final = 100
"""Maximum line length in columns: longer lines are hard to read."""


class LongHelp(TyperCommand):
    """A command with help in this form."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help itself; the formatter has nothing left to do."""
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
    """Prints rich's markup, wrapped to the terminal."""
    content = Text.from_markup(text) if isinstance(text, str) else text
    width = min(stdout.width, WIDEST)
    stdout.print(Padding(content, (0, 0, 0, indent)), width=width, soft_wrap=False)
