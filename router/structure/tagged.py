"""Writes the grammar of arguments that stand one by one between tags, as GLM and Qwen3-Coder write
them (`router.answers.tagged_calls` reads them).

Texts stand as they are, everything else as JSON. So of a text's schema its values and its length
can be enforced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from router.answers.tagged_calls import referred, types_of
from router.structure.closing import escaped
from router.structure.rules import ANYTHING, Rules, Tool, literal, of_object
from router.structure.schema import SchemaError

if TYPE_CHECKING:
    from router.answers.forms import Tags

_NAME: Final = "/[^<>\\s]{1,64}/"
_LONGEST: Final = 4096
"""A bound on the length of a text beyond it is not enforced."""
_OF_TEXTS: Final = ("pattern", "format", "contentMediaType", "contentEncoding", "not")
_OF_OBJECTS: Final = (
    "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "dependentRequired", "dependentSchemas",
)  # fmt: skip
_ROOTS: Final = ("$defs", "definitions")


def arguments(grammar: Rules, tool: Tool, tags: Tags) -> str:
    """The body of a rule for all arguments of a call.

    Raises:
        SchemaError: a strict tool's schema cannot be enforced.
    """
    root: Any = of_object(tool)
    for _ in range(16):
        if isinstance(root, dict) and isinstance(pointer := root.get("$ref"), str):
            root = referred(pointer, tool.schema)
    if not isinstance(root, dict):
        raise SchemaError("/$ref is no such schema", ["/$ref"])
    _cannot(grammar, tool, [f"/{name}" for name in _OF_OBJECTS if name in root])
    properties, required = root.get("properties", {}), root.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise SchemaError("/properties and /required must be an object and a list")
    parts = []
    for number, (name, schema) in enumerate(properties.items()):
        body = _argument(grammar, tool, tags, (number, name, schema))
        parts.append(body if name in required else f"({body})?")
    if not properties and not tool.strict and root.get("additionalProperties") is not False:
        begin, middle = _around_key(grammar, tags)
        value = _lazily(grammar, f"any_{tool.index}", grammar.terminal(ANYTHING), tags.value.end)
        parts.append(f"({begin} {_NAME} {middle} {value} {grammar.words(tags.gap)})*")
    return " ".join(parts)


def _argument(grammar: Rules, tool: Tool, tags: Tags, argument: tuple[int, str, Any]) -> str:
    number, name, schema = argument
    key = f"{tags.key.begin}{name}{tags.key.end}{tags.value.begin}"
    types = types_of(schema, tool.schema)
    rule, pointer = f"value_{tool.index}_{number}", f"/properties/{escaped(name)}"
    if types and "string" not in types:
        roots: dict[str, Any] = {name: tool.schema[name] for name in _ROOTS if name in tool.schema}
        value = f"{grammar.json(copy.deepcopy({**schema, **roots}), pointer, strict=tool.strict)}"
        value = f"{value} {grammar.words(tags.value.end)}"
    elif types == {"string"} and (texts := _texts(schema, tool.schema)):
        value = f"({' | '.join(map(literal, texts))}) {grammar.words(tags.value.end)}"
    else:
        value = _lazily(grammar, rule, _text(grammar, tool, schema, pointer), tags.value.end)
    return " ".join(filter(None, (grammar.words(key), value, grammar.words(tags.gap))))


def _text(grammar: Rules, tool: Tool, schema: Any, pointer: str) -> str:
    """The terminal of a text."""
    if not isinstance(schema, dict):
        return grammar.terminal(ANYTHING)
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    lost = [f"{pointer}/{name}" for name in _OF_TEXTS if name in schema]
    for name, bound in (("minLength", least), ("maxLength", most)):
        if bound is not None and not (isinstance(bound, int) and 0 <= bound <= _LONGEST):
            lost.append(f"{pointer}/{name}")
            least, most = (0, most) if name == "minLength" else (least, None)
    _cannot(grammar, tool, lost)
    if not least and most is None:
        return grammar.terminal(ANYTHING)
    return grammar.terminal(f"/(?s:.{{{least},{'' if most is None else most}}})/")


def _texts(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """All that a text may be; none if that is not given."""
    if isinstance(pointer := schema.get("$ref"), str):
        schema = referred(pointer, root)
    if not isinstance(schema, dict):
        return []
    given = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [one for one in given if isinstance(one, str)]


def _lazily(grammar: Rules, rule: str, terminal: str, end: str) -> str:
    grammar.lazily(rule, terminal, end)
    return rule


def _around_key(grammar: Rules, tags: Tags) -> Iterator[str]:
    yield grammar.words(tags.key.begin)
    yield grammar.words(tags.key.end + tags.value.begin)


def _cannot(grammar: Rules, tool: Tool, pointers: list[str]) -> None:
    """Refuses a strict tool's keywords, and drops others'."""
    if pointers and tool.strict:
        rule = f"{', '.join(pointers)} cannot be enforced, as strict asks"
        raise SchemaError(rule, pointers)
    grammar.dropped += pointers
