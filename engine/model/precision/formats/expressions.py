"""The regular expressions by which a checkpoint names modules. They come with the weights, from
anyone, and a short one may backtrack for years.

Matching has a bound on time, which `re` cannot have: `regex` can, and it is what transformers
matches with anyway. `re2` needs no bound, but lacks lookaheads, which published checkpoints use.
An expression that is a plain name cannot backtrack. `re` matches it, which takes a tenth of the
time: a model may have 36,000 modules, and its description hundreds of names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

import regex

from engine.model.config import UnsupportedModelError

MOST_CHARACTERS: Final = 1000
"""Most characters of an expression."""
ALLOWED_S: Final = 60.0
"""For all matches of one description. A usual one takes 2 us."""
_SHOWN: Final = 100
"""Characters of an expression that an error repeats."""
_PLAIN: Final = re.compile(r"[\w.-]*")

Matcher = Callable[[str], bool]


class Expressions:
    """Matches the expressions of one description."""

    def __init__(self) -> None:
        self._left_s = ALLOWED_S
        self._matchers: dict[tuple[str, str], Matcher] = {}

    def match(self, pattern: str, name: str, end: str = "") -> bool:
        """Whether a name begins with a match, with `end` behind it.

        Raises:
            UnsupportedModelError: the pattern is no expression, too long, or too slow.
        """
        found = self._matchers.get((pattern, end))
        if found is None:
            found = self._matchers[pattern, end] = self._matcher(pattern, end)
        return found(name)

    def _matcher(self, pattern: str, end: str) -> Matcher:
        if len(pattern) > MOST_CHARACTERS:
            raise _refusal(pattern, f"which has more than {MOST_CHARACTERS} characters")
        whole = f"(?:{pattern}){end}" if end else pattern
        if _PLAIN.fullmatch(pattern):
            match = re.compile(whole).match
            return lambda name: match(name) is not None
        return self._bounded(pattern, whole)

    def _bounded(self, pattern: str, whole: str) -> Matcher:
        try:
            compiled = regex.compile(whole)
        except (regex.error, RecursionError, OverflowError) as error:
            raise _refusal(pattern, f"which is no regular expression: {error}") from error

        def match(name: str) -> bool:
            began_s = time.perf_counter()
            try:
                # The lock is held: it would be given up and taken again for each match.
                found = compiled.match(name, timeout=max(self._left_s, 1e-3), concurrent=False)
            except TimeoutError:
                raise _refusal(pattern, "which takes too long to match") from None
            self._left_s -= time.perf_counter() - began_s
            return found is not None

        return match


def _refusal(pattern: str, why: str) -> UnsupportedModelError:
    shown = pattern if len(pattern) <= _SHOWN else f"{pattern[:_SHOWN]}..."
    return UnsupportedModelError(f"the checkpoint names modules by {shown!r}, {why}")
