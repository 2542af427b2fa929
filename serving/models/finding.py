"""Finds the files of a model by the name that users give it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from serving.models import demo_model, hub
from serving.models.demo_model import Progress


class Found(NamedTuple):
    """A model on this machine."""

    path: str
    """Its folder, or its GGUF file."""
    name: str
    """The name under which it is served, unless another is set."""


def find(model: str, progress: Progress | None = None, *, weights: bool = True) -> Found:
    """Returns the files of a model. Fetches them first if they are missing.

    Args:
        model: a folder, a GGUF file, an id of the Hugging Face hub with or without `@REVISION`, or
            `demo`.
        progress: is called with how far the fetching is.
        weights: whether the weights are wanted.

    Raises:
        DemoModelError: the demo model is missing and cannot be fetched.
        HubError: the model is missing and cannot be fetched.
    """
    report = progress or (lambda doing, share: None)
    if model == demo_model.DEMO:
        folder = demo_model.ensure(report)
        return Found(str(folder), folder.name)
    path = Path(model).expanduser()
    if not path.exists():
        name = path.name.partition("@")[0]
        return Found(hub.fetch(model, report, weights=weights), name)
    return Found(str(path), path.name)
