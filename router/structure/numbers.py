"""Numbers of a schema, as far as a grammar can hold them.

llguidance reads all numbers as doubles. An integer beyond 2^53 may become its neighbour, and a
model would have to write that one. Bounds are moved inwards to the next double, so that what they
allow is right. Bounds that leave only numbers beyond 64 bits, and values that would change, cannot
be enforced.
"""

from __future__ import annotations

import math
from typing import Any, Final

_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_VALUES: Final = ("const", "enum")
_BEYOND: Final = 1 << 63
"""llguidance cuts bounds here, crashes at a value of -2^63, and has no integers from there on."""
_LEAST: Final = 1024 - _BEYOND
"""The least double above -2^63."""


def move_inwards(schema: dict[str, Any]) -> None:
    """Moves bounds of a schema, and not of those in it, to doubles."""
    types = schema.get("type")
    is_whole = isinstance(types, str | list) and "number" not in types
    for name in (*_LOWER, *_UPPER):
        bound: Any = schema.get(name)
        if type(bound) not in (int, float):
            continue
        if is_whole and name in _LOWER and bound <= -_BEYOND:
            schema[name] = _LEAST
        elif type(bound) is int and not _is_cut_rightly(name, bound, is_whole=is_whole):
            nearest = float(bound)
            if name in _LOWER and nearest < bound:
                schema[name] = int(math.nextafter(nearest, math.inf))
            elif name in _UPPER and nearest > bound:
                schema[name] = int(math.nextafter(nearest, -math.inf))


def _is_cut_rightly(name: str, bound: int, *, is_whole: bool) -> bool:
    """Whether llguidance reads a bound as it should, although no double may hold it."""
    return abs(bound) >= _BEYOND or (is_whole and name == "maximum" and bound == _BEYOND - 1)


def is_beyond(name: str, value: Any) -> bool:
    """Whether a keyword has numbers that a grammar cannot hold."""
    if name in _VALUES:
        return _changes(value)
    if type(value) not in (int, float):
        return False
    return (name in _LOWER and value >= _BEYOND) or (name in _UPPER and value <= -_BEYOND)


def _changes(value: Any) -> bool:
    """Whether it holds an integer that would become another."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict() as found:
                waiting += found.values()
            case list() as found:
                waiting += found
            case bool():
                continue
            case int() as found if abs(found) >= _BEYOND or float(found) != found:
                return True
    return False
