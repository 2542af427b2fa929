"""Writes the grammar of an output: its form, the calls of functions, the thinking before them.

Every grammar is one text in llguidance's own form, JSON with a Lark grammar in it
(https://github.com/guidance-ai/llguidance, docs/syntax.md). Workers get it and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from baton.inference.v1 import inference_pb2 as api
from router.answers.forms import CallForm, Markers, Thought
from router.structure.schema import Prepared, SchemaError, prepare, read

_WHITESPACE: Final = "[ \\n]?"
"""Between the parts of JSON. More of it would let a model write nothing else."""
_TEXT: Final = "/(?s:.*)/"
_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
"""An escape of GBNF; the groups have the digits of a character's code."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    index: int
    """Among the request's tools."""
    name: str
    schema: dict[str, Any]
    """Of its arguments; empty for any object."""
    strict: bool


@dataclass(frozen=True, slots=True)
class CallRules:
    """Which calls an answer must have."""

    tools: Sequence[Tool]
    """Those that may be called, at least one."""
    required: bool
    """Whether there is a call, and no text before it."""
    several: bool


class Grammar:
    """A grammar that is being written."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        """An empty grammar. `special_tokens`: their ids by their texts."""
        self.dropped: list[str] = []
        """JSON pointers of keywords that are not enforced."""
        self._special_tokens = special_tokens
        self._special_id = special_tokens.get
        self._start = "body"
        self._has_form = False
        self._rules: list[str] = []
        self._given = ""
        """The client's own grammar."""

    def structure(self, structure: api.Structure) -> None:
        """Adds the rule `form`.

        Raises:
            SchemaError: the form cannot be written.
        """
        self._has_form = True
        match structure.WhichOneof("form"):
            case "json_object":
                self._rule("form", self._json({"type": "object"}, strict=False))
            case "json_schema":
                given = structure.json_schema
                self._rule("form", self._json(read(given.schema), strict=given.strict))
            case "regex":
                self._rule("form", f"/{regex_to_lark(_without_anchors(structure.regex))}/")
            case "choice":
                self._rule("form", " | ".join(map(_literal, structure.choice.texts)))
            case "lark":
                self._include(structure.lark)
            case _:
                self._include(_of_gbnf(structure.gbnf))

    def calls(self, form: CallForm, rules: CallRules) -> None:
        """Adds the rule `calls`. With a form there, the answer has that form or calls functions.

        Raises:
            SchemaError: a strict tool's schema cannot be enforced.
        """
        options = " | ".join(f"call_{index}" for index in range(len(rules.tools)))
        for index, tool in enumerate(rules.tools):
            head, middle, tail = form.head
            arguments = self._arguments(tool)
            parts = (_literal(head + tool.name + middle), arguments, _literal(tail))
            self._rule(f"call_{index}", " ".join(filter(None, parts)))
        self._rule("call", options)
        end = self._text(form.end)
        if form.between:
            more = f"({_literal(form.between)} call)*" if rules.several else ""
            self._rule("run", f"call {more} {end}")
            again = ""
        else:
            self._rule("run", f"call {end}")
            gap = _literal(form.gap)
            again = f"({gap} {self._text(form.begin)} run)*" if rules.several else ""
        if rules.required or self._has_form:
            self._rule("calls", f"{self._text(form.begin)} run {again}")
        elif form.starts_answer:
            self._rule("calls", "run | /[^{](?s:.*)/")
        else:
            trigger = form.begin.rstrip()
            rest = _literal(form.begin[len(trigger) :])
            self._lazily("opening", trigger)
            many = "*" if rules.several else "?"
            self._rule("calls", f"(opening {rest} run){many} tail")
            self._rule("tail", _TEXT)
        self._rule("body", "calls" if rules.required or not self._has_form else "calls | form")

    def thinking(self, markers: Markers, thought: Thought) -> None:
        """Puts the thinking before the body, where the answer begins with it or may do so."""
        self._lazily("thoughts", markers.end)
        self._rule("gap", r"/\s{0,4}/")
        if thought.is_open:
            self._start = "thoughts gap body"
        else:
            self._start = f"body | {self._text(markers.begin)} thoughts gap body"

    def text(self) -> str:
        """The grammar as workers get it."""
        if not any(rule.startswith("body:") for rule in self._rules):
            self._rule("body", "form")
        lark = "\n".join((self._options(), f"start: {self._start}", *self._rules))
        grammars = [{"lark_grammar": lark}]
        if self._given:
            grammars.append({"name": "given", "lark_grammar": self._given})
        return json.dumps({"grammars": grammars}, ensure_ascii=False)

    def _options(self) -> str:
        """llguidance takes forced text by its usual tokens. A literal that is spelled like a
        special token would become that token, which is no text: then nothing is forced."""
        whole = "\n".join((*self._rules, self._given)).replace("\\", "")
        has_name = any(name and name in whole for name in self._special_tokens)
        return '%llguidance {"no_forcing": true}' if has_name else "%llguidance {}"

    def _arguments(self, tool: Tool) -> str:
        if not tool.schema and not tool.strict:
            return _ANY_OBJECT
        try:
            return self._json(tool.schema or {"type": "object"}, strict=tool.strict)
        except SchemaError as error:
            error.field = f"input.chat.tools[{tool.index}].parameters"
            raise

    def _include(self, lark: str) -> None:
        self._given = lark
        self._rule("form", "@given")

    def _rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def _lazily(self, name: str, end: str) -> None:
        """A rule for any text up to a marker."""
        if (token := self._special_id(end)) is not None:
            self._rule(name, f"{_TEXT} <[{token}]>")
        else:
            self._rules.append(f"{name}[lazy]: ANYTHING {_literal(end)}")
            if "ANYTHING: " + _TEXT not in self._rules:
                self._rules.append("ANYTHING: " + _TEXT)

    def _text(self, text: str) -> str:
        """A text of a model's own form. Special tokens at its start are tokens."""
        for length in range(len(text), 0, -1):
            if (token := self._special_id(text[:length])) is not None:
                return f"<[{token}]> {self._text(text[length:])}".strip()
        return _literal(text)

    def _json(self, schema: dict[str, Any], *, strict: bool) -> str:
        prepared = prepare(schema, strict=strict)
        self.dropped += prepared.dropped
        return f"%json {_with_options(prepared)}"


_ANY_OBJECT: Final = '%json {"type": "object", "x-guidance": {"whitespace_pattern": "[ \\\\n]?"}}'


def _with_options(prepared: Prepared) -> str:
    options = {
        "whitespace_pattern": _WHITESPACE,
        "coerce_one_of": prepared.coerce_one_of,
        "lenient": False,
    }
    return json.dumps({**prepared.schema, "x-guidance": options}, ensure_ascii=False)


def _of_gbnf(text: str) -> str:
    try:
        lark: str = gbnf_to_lark(_ESCAPE.sub(_character, text))
    except Exception:  # It raises many kinds for bad grammars.
        raise SchemaError("is no GBNF grammar") from None
    return lark


def _character(escape: re.Match[str]) -> str:
    """The character of an escape, which `gbnf_to_lark` would write with too few digits."""
    code = int(escape[1] or escape[2] or "-1", 16)
    if code < 0 or 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _without_anchors(pattern: str) -> str:
    """The pattern without `^` at its start and `$` at its end: the whole output matches anyway."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1:
        pattern = pattern[:-1]
    return pattern
