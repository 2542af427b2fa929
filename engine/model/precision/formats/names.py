"""How the libraries match names of modules: each has a rule of its own."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from engine.model.config import UnsupportedModelError

HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"


def matches(pattern: str, text: str) -> bool:
    """Whether a text begins with a match of a regular expression.

    Raises:
        UnsupportedModelError: it is none.
    """
    try:
        return re.match(pattern, text) is not None
    except re.error as error:
        raise UnsupportedModelError(
            f"the checkpoint names modules by {pattern!r}, which is no regular expression: {error}"
        ) from error


def is_target(name: str, target: str) -> bool:
    """The rule of compressed-tensors: the whole name, or a regular expression after `re:`."""
    if target.startswith("re:"):
        return matches(target.removeprefix("re:"), name)
    return name == target


def is_skipped(name: str, keys: Iterable[str]) -> bool:
    """The rule of transformers, for `modules_to_not_convert`: a name or a regular expression up to
    the end of a part of the name, or the name's end."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(name.endswith(key) or matches(f"(?:{key}){boundary}", name) for key in keys)


def is_excluded(name: str, patterns: Iterable[str]) -> bool:
    """The rule of ModelOpt: wildcards. Older versions also wrote parts of names without any."""
    return any(fnmatch.fnmatchcase(name, each) or has_part(name, each) for each in patterns)


def has_part(name: str, part: str) -> bool:
    """Whether some parts of a name, between dots, are these."""
    return f".{part}." in f".{name}."
