"""Writes the grammar of an output: its form, the calls of functions, the thinking before them.

Every grammar is one text in llguidance's own form, JSON with a Lark grammar in it
(https://github.com/guidance-ai/llguidance, docs/syntax.md). Workers get it and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from baton.inference.v1 import inference_pb2 as api
from router.answers.forms import CallForm, Markers, Thought
from router.structure.rules import ANYTHING, Rules, Tool, literal, of_object
from router.structure.schema import SchemaError, read
from router.structure.tagged import arguments

_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
"""An escape of GBNF; the groups have the digits of a character's code."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """Which calls an answer must have."""

    tools: Sequence[Tool]
    """Tools that may be called, at least one."""
    required: bool
    """Whether there is a call, and no text before it."""
    several: bool


class Grammar(Rules):
    """A grammar that is being written."""

    def __init__(self, special_tokens: Mapping[str, int], lead: str = "") -> None:
        """An empty grammar. `special_tokens`: their ids by their texts; `lead`: what a model writes
        before content."""
        super().__init__(special_tokens)
        self._start = "body"
        self._has_form = False
        self._lead = lead
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
                self._form(self.json({"type": "object"}, strict=False))
            case "json_schema":
                given = structure.json_schema
                self._form(self.json(read(given.schema), strict=given.strict))
            case "regex":
                self._form(f"/{regex_to_lark(_without_anchors(structure.regex))}/")
            case "choice":
                self._form(" | ".join(map(literal, structure.choice.texts)))
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
            self.rule(f"call_{index}", self._call(form, tool))
        self.rule("call", options)
        end, several = self.words(form.end), rules.several and not form.ends_answer
        if form.between is not None:
            more = f"({self.words(form.between)} call)*" if several else ""
            self.rule("run", f"call {more} {end}")
            again = ""
        else:
            self.rule("run", f"call {end}")
            gap = self.words(form.gap)
            again = f"({gap} {self.words(form.begin)} run)*" if several else ""
        if rules.required or self._has_form:
            self.rule("calls", f"{self.words(form.begin)} run {again}")
        elif form.starts_answer:
            self.rule("calls", "run | /[^{](?s:.*)/")
        elif self._lead:
            self.rule("calls", f"{self.words(form.begin)} run | {self.words(self._lead)} tail")
            self.rule("tail", ANYTHING)
        else:
            trigger = form.begin.rstrip()
            rest = self.words(form.begin[len(trigger) :])
            self._lazily("opening", trigger)
            many = "*" if rules.several else "?"
            self.rule("calls", f"(opening {rest} run){many} tail")
            self.rule("tail", ANYTHING)
        self.rule("body", "calls" if rules.required or not self._has_form else "calls | form")

    def _call(self, form: CallForm, tool: Tool) -> str:
        try:
            if (tags := form.tags) is not None:
                head = f"{tags.name.begin}{tool.name}{tags.name.end}{tags.gap}"
                parts = self.words(head), arguments(self, tool, tags), self.words(tags.end)
            else:
                head, middle, tail = form.head
                written = self._arguments(tool)
                parts = self.words(head + tool.name + middle), written, self.words(tail)
        except SchemaError as error:
            error.field = f"input.chat.tools[{tool.index}].parameters"
            raise
        return " ".join(filter(None, parts))

    def thinking(self, markers: Markers, thought: Thought) -> None:
        """Puts the thinking before the body, where the answer begins with it or may do so."""
        self._lazily("thoughts", markers.end)
        self.rule("gap", self.words(markers.then) or r"/\s{0,4}/")
        if thought.is_open:
            self._start = "thoughts gap body"
        else:
            self._start = f"body | {self.words(markers.begin)} thoughts gap body"

    def text(self) -> str:
        """The grammar as workers get it."""
        if not any(rule.startswith("body:") for rule in self.lines):
            self.rule("body", "form")
        lark = "\n".join((self._options(), f"start: {self._start}", *self.lines))
        grammars = [{"lark_grammar": lark}]
        if self._given:
            grammars.append({"name": "given", "lark_grammar": self._given})
        return json.dumps({"grammars": grammars}, ensure_ascii=False)

    def _options(self) -> str:
        """llguidance takes forced text by its usual tokens. A literal that is spelled like a
        special token would become that token, which is no text: then nothing is forced."""
        whole = "\n".join((*self.lines, self._given)).replace("\\", "")
        has_name = any(name and name in whole for name in self.special_tokens)
        return '%llguidance {"no_forcing": true}' if has_name else "%llguidance {}"

    def _arguments(self, tool: Tool) -> str:
        if not tool.schema and not tool.strict:
            return _ANY_OBJECT
        return self.json(of_object(tool), strict=tool.strict)

    def _include(self, lark: str) -> None:
        self._given = lark
        self._form("@given")

    def _form(self, body: str) -> None:
        self.rule("form", f"{self.words(self._lead)} ({body})" if self._lead else body)

    def _lazily(self, name: str, end: str) -> None:
        """A rule for any text up to a marker."""
        if (token := self.special_tokens.get(end)) is not None:
            self.rule(name, f"{ANYTHING} <[{token}]>")
        else:
            self.lazily(name, self.terminal(ANYTHING), end)


_ANY_OBJECT: Final = '%json {"type": "object", "x-guidance": {"whitespace_pattern": "[ \\\\n]?"}}'


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


def _without_anchors(pattern: str) -> str:
    """The pattern without `^` at its start and `$` at its end: the whole output matches anyway."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1:
        pattern = pattern[:-1]
    return pattern
