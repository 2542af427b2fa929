"""Command-line options made from a settings model, so that each setting is described once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer
from pydantic_core import PydanticUndefined
from rich.markup import escape

from baton.settings import Resolved, Settings, resolve

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Run = Callable[[Resolved[Settings]], None]


def takes_settings(
    kind: type[Settings], table: str, **fixed: object
) -> Callable[[Run[Settings]], Callable[..., None]]:
    """Makes a command whose options are the fields of `kind`, and `--config FILE`.

    Args:
        kind: the settings model.
        table: its table in the settings file.
        fixed: fields that the command decides itself; they are no options.
    """

    def decorate(run: Run[Settings]) -> Callable[..., None]:
        def command(config: Path | None = None, **flags: Any) -> None:
            run(resolve(kind, table, {**flags, **fixed}, config))

        options = {
            name: Annotated[_option_type(field) | None, _option(field)]
            for name, field in kind.model_fields.items()
            if name not in fixed
        }
        file_option = typer.Option(
            metavar="FILE", help=escape(f"TOML file; its table is [{table}].")
        )
        annotations = {"config": Annotated[Path | None, file_option], **options}
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=a)
                for name, a in annotations.items()
            ]
        )
        command.__annotations__ = annotations
        command.__doc__ = run.__doc__
        return command

    return decorate


def _option_type(field: FieldInfo) -> Any:
    """What the command line parses; the model does the rest."""
    return list[str] if get_origin(field.annotation) is tuple else field.annotation


def _option(field: FieldInfo) -> Any:
    """The option's help, with the default where there is one worth showing."""
    default = field.get_default()
    if isinstance(default, tuple):
        default = ",".join(default)
    elif isinstance(default, bool):
        default = str(default).lower()
    shown = "" if default in (None, "", 0, PydanticUndefined) else f" [default: {default}]"
    return typer.Option(help=escape(f"{field.description}{shown}"), show_default=False)
