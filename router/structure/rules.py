"""What a grammar is written of: rules, terminals, words of a model's form, JSON of a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from router.structure.schema import Prepared, SchemaError, prepare

ANYTHING: Final = "/(?s:.*)/"
"""Any text."""
_WHITESPACE: Final = "[ \\n]?"
"""Between the parts of JSON. More of it would let a model write nothing else."""
_OTHERS: Final = ("$ref", "anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    index: int
    """Among the request's tools."""
    name: str
    schema: dict[str, Any]
    """Schema of its arguments; empty for any object."""
    strict: bool


def of_object(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object, also where it does not say so.

    Raises:
        SchemaError: it says that they are something else.
    """
    schema = tool.schema
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise SchemaError("/type must be object, which arguments are", ["/type"])
    if tool.strict and "type" not in schema and any(name in schema for name in _OTHERS):
        return schema  # What they refer to says it, and is closed by itself.
    return {**schema, "type": "object"}


class Rules:
    """Rules that are being written, in llguidance's form of Lark."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        """None yet. `special_tokens`: their ids by their texts."""
        self.dropped: list[str] = []
        """JSON pointers of keywords that are not enforced."""
        self.special_tokens = special_tokens
        self._rules: list[str] = []
        self._terminals: dict[str, str] = {}
        """Names by their patterns."""

    @property
    def lines(self) -> list[str]:
        """All rules and terminals."""
        return [*self._rules, *(f"{name}: {body}" for body, name in self._terminals.items())]

    def rule(self, name: str, body: str) -> None:
        """Adds a rule."""
        self._rules.append(f"{name}: {body}")

    def lazily(self, name: str, terminal: str, end: str) -> None:
        """A rule for a text up to the first `end`."""
        self._rules.append(f"{name}[lazy]: {terminal} {literal(end)}")

    def terminal(self, pattern: str) -> str:
        """The name of a terminal."""
        return self._terminals.setdefault(pattern, f"TEXT_{len(self._terminals)}")

    def words(self, text: str) -> str:
        """A text of a model's own form. Special tokens in it are tokens."""
        if not (names := [name for name in self.special_tokens if name and name in text]):
            return literal(text)
        name = min(names, key=lambda name: (text.index(name), -len(name)))
        before, _, after = text.partition(name)
        parts = literal(before), f"<[{self.special_tokens[name]}]>", self.words(after)
        return " ".join(filter(None, parts))

    def json(self, schema: dict[str, Any], pointer: str = "", *, strict: bool) -> str:
        """JSON of a schema, which lies at a pointer of the client's.

        Raises:
            SchemaError: it cannot be enforced.
        """
        prepared = prepare(schema, strict=strict)
        self.dropped += [f"{pointer}{one}" for one in prepared.dropped]
        return f"%json {_with_options(prepared)}"


def literal(text: str) -> str:
    """A text as it is; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _with_options(prepared: Prepared) -> str:
    options = {
        "whitespace_pattern": _WHITESPACE,
        "coerce_one_of": prepared.coerce_one_of,
        "lenient": False,
    }
    return json.dumps({**prepared.schema, "x-guidance": options}, ensure_ascii=False)
