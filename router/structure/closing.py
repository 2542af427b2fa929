"""Closes the objects of a schema, as strict adherence asks: no property beside those it names.

OpenAI's API demands `additionalProperties: false` of every object. Here an object that does not say
is closed. One that cannot be closed without a change of its meaning is refused, since it is made of
several schemas, or says that it is open.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

Schema = dict[str, Any]
_OPEN: Final = "additionalProperties"
_OTHERS: Final = ("anyOf", "oneOf", "allOf")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")


def close(schema: Schema) -> list[str]:
    """Closes all objects of a schema. Returns pointers of `additionalProperties` of those that stay
    open."""
    open_ones: list[str] = []
    waiting = [("", schema)]
    while waiting:
        pointer, part = waiting.pop()
        if not _close_one(part):
            open_ones.append(f"{pointer}/{_OPEN}")
        waiting += _inside(pointer, part)
    return open_ones


def _close_one(part: Schema) -> bool:
    """Closes one object; False if that is not possible."""
    several = sum(_may_be_object(one) for one in _list(part, "allOf"))
    if not _is_object(part):
        return several + ("$ref" in part) < 2
    if _OPEN in part:
        return part[_OPEN] is not True and part[_OPEN] != {}
    if "properties" not in part and any(name in part for name in (*_OTHERS, "$ref")):
        return several + ("$ref" in part) < 2  # What these say is closed.
    if "$ref" in part or several or any(_adds(part, one) for one in _alternatives(part)):
        return False
    part[_OPEN] = False
    return True


def _is_object(part: Schema) -> bool:
    kind = part.get("type")
    return "properties" in part or kind == "object" or (isinstance(kind, list) and "object" in kind)


def _may_be_object(one: object) -> bool:
    return isinstance(one, dict) and ("$ref" in one or "allOf" in one or _is_object(one))


def _adds(part: Schema, one: Schema) -> bool:
    """Whether an alternative names properties that the object itself does not."""
    return "$ref" in one or not (one.get("properties") or {}).keys() <= part["properties"].keys()


def _alternatives(part: Schema) -> Iterator[Schema]:
    for name in ("anyOf", "oneOf"):
        yield from (one for one in _list(part, name) if isinstance(one, dict))


def _inside(pointer: str, part: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas inside that are closed by themselves. Alternatives of an object that is closed
    already only narrow it."""
    for name in _NAMED:
        if isinstance(named := part.get(name), dict):
            for key, one in named.items():
                yield from _schema(f"{pointer}/{name}/{escaped(key)}", one)
    is_whole = part.get(_OPEN) is False and "properties" in part
    for name in ("prefixItems", "items", *(() if is_whole else _OTHERS)):
        for index, one in enumerate(_list(part, name)):
            yield from _schema(f"{pointer}/{name}/{index}", one)
    for name in ("items", _OPEN):
        yield from _schema(f"{pointer}/{name}", part.get(name))


def _schema(pointer: str, one: object) -> Iterator[tuple[str, Schema]]:
    if isinstance(one, dict):
        yield pointer, one


def _list(part: Schema, name: str) -> list[Any]:
    found = part.get(name)
    return found if isinstance(found, list) else []


def escaped(name: str) -> str:
    """A name in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
