"""Prepares JSON schemas, so that a grammar can enforce all that is left of them.

llguidance refuses a schema with a keyword that it cannot enforce. Where the client asks for strict
adherence, so does Baton, and names the keyword's JSON pointer. Otherwise the keyword is dropped and
its pointer reported. Values of a schema never appear in an error.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from llguidance import LLMatcher, LLParserLimits
from pydantic_core import from_json

from router.structure.closing import close, escaped
from router.structure.numbers import is_beyond, move_inwards

LIMITS: Final = LLParserLimits(step_max_items=15_000, verbose_errors=False)
"""Fuel of a compilation and of each mask, as workers have it (`engine.masks.matchers`)."""
MAX_SCHEMA_BYTES: Final = 256 << 10
MAX_SCHEMA_DEPTH: Final = 100
"""Deepest nesting of objects and lists. llguidance reads 127 of them, with its own around."""
_MAX_ROUNDS: Final = 16
"""Most times that a schema is checked again after keywords were dropped."""
_MAX_ISOLATED: Final = 64
"""Most parts of a schema that are checked alone, to find the one to blame."""
_MAX_NAMED: Final = 16
"""Places that an error names: one line that can be read."""

_OF_NAMES: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_ONE: Final = (
    "items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else",
    "propertyNames", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
_SHAPE: Final = frozenset((*_OF_NAMES, *_OF_LISTS, *_OF_ONE, "type", "$ref", "required"))
"""Keywords without which a schema would mean something else. They are never dropped."""
_REFERENCES: Final = frozenset(("$ref", "$id"))
_URI: Final = "!#$%&'()*+,/:;=?@[]~"
"""Characters that a URI may have, beside letters, digits and `-._`."""
_LOOSE_PERCENT: Final = re.compile("%(?![0-9A-Fa-f]{2})")
_NAME: Final = r"(?:[\w \-:/@#,]|\\[^\w\s|])+"
_NAMES: Final = re.compile(rf"\^(?:({_NAME})|\((?:\?:)?({_NAME}(?:\|{_NAME})*)\))\$")
"""A pattern of one name, or of some; the groups have them."""
_ESCAPED: Final = re.compile(r"\\(.)")
_KEYS: Final = re.compile(r"Unimplemented keys: (\[.*\])")
_FORMAT: Final = re.compile(r"Unknown format: (.*)")


class SchemaError(Exception):
    """A schema cannot be used."""

    def __init__(self, rule: str, pointers: list[str] | None = None) -> None:
        super().__init__(rule)
        self.rule = rule
        """Which rule it breaks, with pointers, but no value."""
        self.pointers = pointers or []
        self.field = ""
        """The request's field that holds it, if that is known."""


class Subschema(NamedTuple):
    """A schema inside a schema."""

    pointer: str
    schema: dict[str, Any]


@dataclass(slots=True)
class Prepared:
    """A schema that can be enforced."""

    schema: dict[str, Any]
    coerce_one_of: bool = False
    """Whether some `oneOf` counts as `anyOf`."""
    dropped: list[str] = field(default_factory=list)
    """JSON pointers of keywords that are not enforced."""


def read(text: str) -> dict[str, Any]:
    """Reads a schema.

    Raises:
        SchemaError: it is too large, no JSON, or no schema.
    """
    if len(text) > MAX_SCHEMA_BYTES or len(text.encode()) > MAX_SCHEMA_BYTES:
        raise SchemaError(f"must have at most {MAX_SCHEMA_BYTES} bytes")
    try:  # As strict as llguidance, which takes no half characters either.
        schema = from_json(text, allow_inf_nan=False)
    except ValueError:
        rule = f"it is no JSON, or nests more than {MAX_SCHEMA_DEPTH} deep"
        raise SchemaError(f"must be a JSON schema: {rule}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError("must be a JSON schema: an object")
    _check_depth(schema)
    return schema


def _check_depth(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        inside = chain.from_iterable(
            one.values() if isinstance(one, dict) else one for one in level
        )
        if not (level := [one for one in inside if isinstance(one, dict | list)]):
            return
    raise SchemaError(f"must nest at most {MAX_SCHEMA_DEPTH} deep")


def prepare(schema: dict[str, Any], *, strict: bool) -> Prepared:
    """Checks a schema and drops what cannot be enforced. Changes the schema.

    Raises:
        SchemaError: strict adherence is impossible, or the schema is none.
    """
    schema.pop("x-guidance", None)  # It would change how llguidance reads the schema.
    for part in _parts(schema):
        _quote_references(part.schema)
        _take_in_patterns(part.schema)
        move_inwards(part.schema)
    if strict and (pointers := close(schema)):
        rule = "must be false, as strict asks"
        raise SchemaError(f"{_listed(pointers)} {rule}", pointers)
    prepared = Prepared(schema)
    found = _remove(schema, is_beyond)
    if not strict:
        prepared.dropped, found = found, []
    for _ in range(_MAX_ROUNDS):
        problem = _problem(schema, coerce_one_of=prepared.coerce_one_of)
        if not problem:
            break
        pointers = _drop(prepared, problem)
        if strict:
            found += pointers
            continue
        prepared.dropped += pointers
    else:
        raise SchemaError("has too many keywords that cannot be enforced")
    if found:
        rule = "cannot be enforced, as strict asks"
        raise SchemaError(f"{_listed(found)} {rule}", found)
    return prepared


def _drop(prepared: Prepared, problem: str) -> list[str]:
    """Drops what a problem names; returns its pointers.

    Raises:
        SchemaError: it is nothing that can be dropped.
    """
    schema = prepared.schema
    if match := _KEYS.search(problem):
        keys = set(json.loads(match[1]))
        if pointers := _remove(schema, lambda key, _: key in keys):
            return pointers
    if match := _FORMAT.search(problem):
        name = match[1].strip()
        if pointers := _remove(schema, lambda key, value: key == "format" and value == name):
            return pointers
    if "coerce_one_of" in problem:
        prepared.coerce_one_of = True
        return _overlapping(schema)
    if problem.startswith("Resource"):
        _refuse_references(schema, lambda target: not target.startswith("#"), "a remote reference")
    if problem.startswith("Pointer"):
        _refuse_references(schema, lambda target: not _resolves(schema, target), "no such schema")
    return _drop_blamed(prepared, problem)


def _drop_blamed(prepared: Prepared, problem: str) -> list[str]:
    """Finds the keyword to blame by checking parts of the schema alone, and drops it."""
    schema, coerce = prepared.schema, prepared.coerce_one_of
    shared = _shared(schema)
    part, left = Subschema("", schema), _MAX_ISOLATED
    while left > 0:
        for inner in _children(part):
            left -= 1
            if _problem({**shared, **inner.schema}, coerce_one_of=coerce) or left <= 0:
                part = inner
                break
        else:
            break
    where = part.pointer
    if key := _blamed_key(
        part.schema, lambda rest: _problem({**shared, **rest}, coerce_one_of=coerce)
    ):
        where = f"{part.pointer}/{escaped(key)}"
        if key not in _SHAPE and "Unsatisfiable" not in problem:
            del part.schema[key]
            return [where]
    at = f" at {where[:128]}" if where else ""
    raise SchemaError(f"is no schema that can be enforced{at}", [where])


def _blamed_key(schema: dict[str, Any], problem_of: Callable[[dict[str, Any]], str]) -> str:
    """The key without which, and without those before it, a schema has another problem; "" for
    none. Keys may be many, so they are halved and not tried one by one."""
    items, same = list(schema.items()), 0
    problem, other = problem_of(schema), len(items)
    if problem_of({}) == problem:
        return ""
    while other - same > 1:
        middle = (same + other) // 2
        if problem_of(dict(items[middle:])) == problem:
            same = middle
        else:
            other = middle
    return items[same][0]


def _problem(schema: dict[str, Any], *, coerce_one_of: bool) -> str:
    """The first problem that llguidance has with a schema; "" for none."""
    overrides: Any = {"coerce_one_of": coerce_one_of, "lenient": False}
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    except ValueError:  # Its parser is stricter than ours.
        return "unreadable"
    return messages[0] if is_error else ""


def _take_in_patterns(schema: dict[str, Any]) -> None:
    """Joins a pattern that names nothing but properties with these. llguidance takes it for names
    beside them: it lets a model begin one, and there is none."""
    patterns, properties = schema.get("patternProperties"), schema.get("properties")
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return
    for pattern, one in list(patterns.items()):
        found = _NAMES.fullmatch(pattern)
        names = _ESCAPED.sub(r"\1", found[1] or found[2]).split("|") if found else []
        if not names or not all(name in properties for name in names):
            continue
        del patterns[pattern]
        for name in names:
            if properties[name] != one:
                properties[name] = {"allOf": [properties[name], one]}
    if not patterns:
        del schema["patternProperties"]


def _parts(schema: dict[str, Any]) -> Iterator[Subschema]:
    """The schema and all schemas in it."""
    waiting = deque([Subschema("", schema)])
    while waiting:
        part = waiting.popleft()
        yield part
        waiting += _children(part)


def _children(part: Subschema) -> Iterator[Subschema]:
    for key, value in part.schema.items():
        pointer = f"{part.pointer}/{escaped(key)}"
        if key in _OF_NAMES and isinstance(value, dict):
            for name, one in value.items():
                if isinstance(one, dict):
                    yield Subschema(f"{pointer}/{escaped(name)}", one)
        elif key in _OF_LISTS and isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, dict):
                    yield Subschema(f"{pointer}/{index}", one)
        elif key in _OF_ONE and isinstance(value, dict):
            yield Subschema(pointer, value)


def _remove(schema: dict[str, Any], is_wrong: Callable[[str, Any], bool]) -> list[str]:
    pointers = []
    for part in _parts(schema):
        for key in [key for key, value in part.schema.items() if is_wrong(key, value)]:
            del part.schema[key]
            pointers.append(f"{part.pointer}/{escaped(key)}")
    return pointers


def _overlapping(schema: dict[str, Any]) -> list[str]:
    """Pointers of `oneOf` whose alternatives may overlap; of all, if there are many."""
    shared = _shared(schema)
    parts = [part for part in _parts(schema) if "oneOf" in part.schema]
    if 1 < len(parts) <= _MAX_ISOLATED:
        alone = ({**shared, "oneOf": part.schema["oneOf"]} for part in parts)
        wrong = [bool(_problem(one, coerce_one_of=False)) for one in alone]
        if any(wrong):
            parts = [part for part, is_wrong in zip(parts, wrong, strict=True) if is_wrong]
    return [f"{part.pointer}/oneOf" for part in parts]


def _refuse_references(schema: dict[str, Any], is_wrong: Callable[[str], bool], what: str) -> None:
    wrong = [
        f"{part.pointer}/$ref"
        for part in _parts(schema)
        if isinstance(target := part.schema.get("$ref"), str) and is_wrong(target)
    ]
    if wrong:
        raise SchemaError(f"{_listed(wrong)} is {what}", wrong)


def _quote_references(schema: dict[str, Any]) -> None:
    """Quotes what may not stand in a URI: people write names of definitions as they are."""
    for key in _REFERENCES & schema.keys():
        if isinstance(target := schema[key], str):
            schema[key] = _LOOSE_PERCENT.sub("%25", quote(target, safe=_URI))


def _resolves(schema: dict[str, Any], target: str) -> bool:
    found: Any = schema
    for part in target.removeprefix("#").lstrip("/").split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if not name:
            continue
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return False
    return True


def _shared(schema: dict[str, Any]) -> dict[str, Any]:
    """The definitions to which parts refer."""
    return {name: one for name, one in schema.items() if name in ("$defs", "definitions")}


def _listed(pointers: list[str]) -> str:
    """Names of a few pointers. A pointer consists of the client's own names, cut at a length."""
    shown = ", ".join(pointer[:128] for pointer in pointers[:_MAX_NAMED])
    return shown + (", ..." if len(pointers) > _MAX_NAMED else "")
