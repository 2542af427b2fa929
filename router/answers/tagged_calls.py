"""Reads calls whose arguments are written one by one between tags, as GLM and Qwen3-Coder do.

A value is text, or JSON where the tool's schema does not say that it is text. A call is given as
soon as its name is certain, a text as it comes, and any other value when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from router.answers.calls import Calls, without_beginning
from router.answers.forms import Tags

_CHECKS: Final[Mapping[str, Callable[[object], bool]]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
"""Python's words, which models write at times."""
_DEEPEST: Final = 16
"""References and unions that are followed: a schema may refer to itself."""


class TaggedCalls:
    """One call of a region."""

    def __init__(self, calls: Calls, tags: Tags, tools: Sequence[tuple[str, str]]) -> None:
        """A reader. `tools`: names and schemas of the functions."""
        self._calls = calls
        self._tags = tags
        self._schemas = dict(tools)
        self._raw = ""
        self._text = ""
        """What was not taken yet."""
        self._take: Callable[[], bool] = self._before_name
        self._schema: Mapping[str, Any] = {}
        """Schema of the call's arguments."""
        self._key = ""
        self._begun = self._is_broken = False
        self._arguments = 0
        self._told = -1
        """Letters of a text that were given; -1 before its quote."""

    def push(self, text: str) -> None:
        """Takes the next delta."""
        if not self._begun:
            self._raw += text
        self._text += text
        while self._take():
            pass

    def finish(self, *, is_cut: bool = False) -> str:
        """Returns what is no call."""
        if not self._tags.name.end and not is_cut and self._take == self._in_name:
            self._begin(self._text)
        if not self._begun:
            return "" if is_cut and not self._is_broken else self._raw
        if not is_cut:
            self._calls.extend("}" if self._arguments else "{}")
            self._calls.complete += 1
        return ""

    # Each of the following takes what it can of one part, and says whether the next part follows.

    def _before_name(self) -> bool:
        begin, self._text = self._tags.name.begin, self._text.lstrip()
        if not self._text.startswith(begin):
            self._is_broken = not begin.startswith(self._text)
            return False
        self._text, self._take = self._text[len(begin) :], self._in_name
        return bool(self._text)

    def _in_name(self) -> bool:
        ends = (self._tags.name.end,) if self._tags.name.end else ("\n", self._tags.key.begin)
        found = [at for end in ends if (at := self._text.find(end)) >= 0]
        if not found:
            return False
        name, self._text = self._text[: min(found)], self._text[min(found) :]
        return self._begin(name)

    def _begin(self, name: str) -> bool:
        name = name.strip()
        self._is_broken = not name or any(letter.isspace() or letter in "<>{}" for letter in name)
        self._take = self._end if self._is_broken else self._before_key
        if self._is_broken:
            return False
        self._begun = True
        self._calls.begin(name)
        self._schema = _object(self._schemas.get(name, ""))
        return True

    def _end(self) -> bool:
        return False

    def _before_key(self) -> bool:
        if not self._drop_through(self._tags.key.begin):
            return False
        self._take = self._in_key
        return True

    def _in_key(self) -> bool:
        key, found, rest = self._text.partition(self._tags.key.end)
        if found:
            self._key, self._text, self._take = key.strip(), rest, self._before_value
        return bool(found)

    def _before_value(self) -> bool:
        begin = self._tags.value.begin
        if begin.strip():
            if not self._drop_through(begin.strip()):
                return False
        elif not self._text:
            return False
        else:
            self._text = self._text.removeprefix(begin)
        self._told, self._take = -1, self._in_value
        before = ", " if self._arguments else "{"
        self._calls.extend(f"{before}{json.dumps(self._key, ensure_ascii=False)}: ")
        self._arguments += 1
        return True

    def _in_value(self) -> bool:
        end = self._tags.value.end
        value, found, rest = self._text.partition(end.strip())
        types = types_of(self._property, self._schema)
        if found:
            value = value.removesuffix(end[: len(end) - len(end.lstrip())])
        if types == {"string"}:
            sure = value if found else self._text[: _surely(self._text, end)]
            quote = '"' if self._told < 0 else ""
            self._calls.extend(quote + _escaped(sure[max(0, self._told) :]) + '"' * bool(found))
            self._told = len(sure)
        elif found:
            self._calls.extend(_written(value, types))
        if found:
            self._text, self._take = rest, self._before_key
        return bool(found)

    @property
    def _property(self) -> object:
        found = self._schema.get("properties")
        return found.get(self._key) if isinstance(found, dict) else None

    def _drop_through(self, marker: str) -> bool:
        """Drops the text up to a marker and the marker; False where it has not come."""
        _, found, rest = self._text.partition(marker)
        if found:
            self._text = rest
        return bool(found)


def types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> Collection[str]:
    """The JSON types that a schema allows; none if it does not say.

    Args:
        schema: of a value.
        root: the schema in which references of it are looked up.
        depth: how many references and unions led here.
    """
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return frozenset()
    if isinstance(given := schema.get("$ref"), str):
        return types_of(referred(given, root), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str | list):
        return frozenset([declared] if isinstance(declared, str) else map(str, declared))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset(_type_of(value) for value in values)
    for union in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(union), list) and options:
            each = [types_of(one, root, depth + 1) for one in options]
            return frozenset().union(*each) if all(each) else frozenset()
    for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        if types := types_of(one, root, depth + 1):
            return types
    return frozenset()


def referred(pointer: str, root: object) -> object:
    """The part of a schema that a reference within it names; None if there is none."""
    for name in pointer.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _type_of(value: object) -> str:
    return next((name for name, check in _CHECKS.items() if check(value)), "string")


def _object(schema: str) -> Mapping[str, Any]:
    try:
        found = json.loads(schema or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _surely(text: str, end: str) -> int:
    """The length of what stays a value's text, whatever comes: without the beginning of `end`, or
    of `end` without the white space before it."""
    return min(without_beginning(text, marker) for marker in (end, end.strip()))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _written(text: str, types: Collection[str]) -> str:
    """A value as JSON: as it was written if it is JSON of an allowed type, else as a text."""
    bare = _WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = any(_CHECKS[name](value) for name in types if name in _CHECKS)
    if fits or (not types and (not isinstance(value, str) or bare.startswith('"'))):
        return bare
    if "string" not in types and types:
        return bare
    return json.dumps(text, ensure_ascii=False)


def _refuse(word: str) -> None:
    raise ValueError(word)
