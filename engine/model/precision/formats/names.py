"""How the libraries match names of modules: each has a rule of its own."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from engine.model.precision.formats.expressions import Expressions

HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def is_target(name: str, target: str, expressions: Expressions) -> bool:
    """The rule of compressed-tensors: the whole name, or a regular expression after `re:`."""
    if target.startswith("re:"):
        return expressions.match(target.removeprefix("re:"), name)
    return name == target


def is_skipped(name: str, keys: Iterable[str], expressions: Expressions) -> bool:
    """The rule of transformers, for `modules_to_not_convert`: a name or a regular expression up to
    the end of a part of the name, or the name's end."""
    return any(name.endswith(key) or expressions.match(key, name, _BOUNDARY) for key in keys)


def is_excluded(name: str, patterns: Iterable[str]) -> bool:
    """The rule of ModelOpt: wildcards. Older versions also wrote parts of names without any."""
    return any(fnmatch.fnmatchcase(name, each) or has_part(name, each) for each in patterns)


def has_part(name: str, part: str) -> bool:
    """Whether some parts of a name, between dots, are these."""
    return f".{part}." in f".{name}."
