"""The forms in which families of models write their thinking and their calls of functions.

A form has two sides. Reading: a *response template*, from which transformers' `ResponseParser`
finds the parts of an answer. A checkpoint may have one (`response_template` in its
`tokenizer_config.json`); otherwise it is made here of the words that its chat template uses.
Writing: `CallForm`, of which the grammar of a call is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeGuard

Spec = dict[str, Any]
"""A response template as JSON."""
CONTENT: Final = "content"
CALLS: Final = "tool_calls"
THINKING: Final = ("thinking", "reasoning", "reasoning_content")
"""Names that response templates give to the thinking."""

_JSON_HEAD: Final = ('{"name": "', '", "arguments": ', "}")
_LONGEST_TAIL_CHARS: Final = 65_536
"""The end of a prompt in which an opened part is looked for; templates write a few lines."""


class Markers(NamedTuple):
    """The texts around a part."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are written: `begin`, one call or several, `end`."""

    begin: str
    end: str
    between: str
    """Between two calls. If it is empty, each further call has its own `begin` and `end`, with
    `gap` before it."""
    gap: str = ""
    head: tuple[str, str, str] = _JSON_HEAD
    """Before the name, before the arguments, after them."""
    starts_answer: bool = False
    """Calls are known only by the beginning of the answer. So no text comes before them."""
    id_chars: int = 0
    """Length of a call's id, if the chat template asks for one."""

    @property
    def is_json(self) -> bool:
        """Whether a call is one object, with the name in it."""
        return bool(self.head[0])


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """What is known about a model's answers."""

    spec: Spec | None = None
    """Its response template; None: an answer is all content."""
    thinking: Markers | None = None
    calls: CallForm | None = None
    """None: calls can be read at most, not demanded."""
    markers: tuple[str, ...] = field(default=())
    """Texts by which parts are found. Special tokens among them must be in the text."""

    @property
    def reads_calls(self) -> bool:
        """Whether calls can be found in answers."""
        return self.spec is not None and CALLS in self.spec["fields"]

    def without_calls(self) -> ResponseForm:
        """The form of an answer that has no tools."""
        if self.spec is None or not self.reads_calls:
            return self
        fields = {name: one for name, one in self.spec["fields"].items() if name != CALLS}
        if not any(name in fields for name in THINKING):
            return ResponseForm()
        return ResponseForm({**self.spec, "fields": fields}, self.thinking, None, self.markers)


HERMES: Final = CallForm("<tool_call>\n", "\n</tool_call>", "", gap="\n")
LLAMA: Final = CallForm(
    "", "", "; ", head=('{"name": "', '", "parameters": ', "}"), starts_answer=True
)
MISTRAL: Final = CallForm("[TOOL_CALLS][", "]", ", ", id_chars=9)
MISTRAL_NAMED: Final = CallForm("[TOOL_CALLS]", "", "", head=("", "[ARGS]", ""), id_chars=9)

_HERMES_SPEC: Final[Spec] = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True}
_LLAMA_SPEC: Final[Spec] = {"open_pattern": r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{)"}
_MISTRAL_SPEC: Final[Spec] = {"open": "[TOOL_CALLS]"}
_MISTRAL_NAMED_SPEC: Final[Spec] = {
    "open": "[TOOL_CALLS]",
    "close_pattern": r"(?=\[TOOL_CALLS\])",
    "repeats": True,
}


def form_of(config: Mapping[str, Any], template: str | None) -> ResponseForm:
    """The form of a model's answers.

    Args:
        config: its `tokenizer_config.json`.
        template: the source of its chat template, if it has one.
    """
    source = template or ""
    thinking = _thinking_of(source)
    calls, call_spec = _calls_of(source)
    spec = config.get("response_template")
    if _is_template(spec):
        return ResponseForm(spec, _given_thinking(spec) or thinking, calls, _markers_of(spec))
    fields: Spec = {CONTENT: {"content": "text", "content_args": {"strip": False}}}
    if thinking is not None:
        fields[THINKING[0]] = {"open": thinking.begin, "close": thinking.end}
    if call_spec is not None:
        fields[CALLS] = call_spec
    if len(fields) == 1:
        return ResponseForm()
    own: Spec = {"start_anchor_pattern": r"\A", "fields": fields}
    return ResponseForm(own, thinking, calls, _markers_of(own))


def _is_template(spec: object) -> TypeGuard[Spec]:
    fields = spec.get("fields") if isinstance(spec, dict) else None
    return isinstance(fields, dict) and all(isinstance(one, dict) for one in fields.values())


def _calls_of(source: str) -> tuple[CallForm | None, Spec | None]:
    """How calls are written, by the words of a chat template."""
    if "<tool_call>" in source and "<function=" not in source:
        return HERMES, _HERMES_SPEC
    if "[TOOL_CALLS]" in source:
        if "[ARGS]" in source:
            return MISTRAL_NAMED, _MISTRAL_NAMED_SPEC
        return MISTRAL, _MISTRAL_SPEC
    if "<|python_tag|>" in source or ('"parameters": ' in source and "tool_calls" in source):
        return LLAMA, _LLAMA_SPEC
    return None, None


def _thinking_of(source: str) -> Markers | None:
    for begin, end in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        if end in source:
            return Markers(begin, end)
    return None


def _given_thinking(spec: Spec) -> Markers | None:
    for name in THINKING:
        one = spec["fields"].get(name) or {}
        begin, end = _first(one.get("open")), _first(one.get("close"))
        if begin and end:
            return Markers(begin, end)
    return None


def _first(literal: object) -> str:
    if isinstance(literal, list) and literal:
        literal = literal[0]
    return literal if isinstance(literal, str) else ""


def _markers_of(spec: Spec) -> tuple[str, ...]:
    found: list[str] = []
    for one in spec["fields"].values():
        for name in ("open", "close"):
            literal = one.get(name) or []
            found += [literal] if isinstance(literal, str) else literal
            if isinstance(pattern := one.get(f"{name}_pattern"), str):
                found.append(re.sub(r"\\(\W)", r"\1", pattern))
            # Delimiters within a part, such as `[ARGS]`, belong to it as well.
    return (*found, "[ARGS]") if any("[TOOL_CALLS]" in one for one in found) else tuple(found)


class Thought(NamedTuple):
    """Where an answer begins."""

    is_open: bool = False
    """The prompt has begun the thinking."""
    may_begin: bool = False
    """The model may begin it."""


def thought_of(form: ResponseForm, prompt: str, *, continues: bool = False) -> Thought:
    """Where the answer to a rendered prompt begins: in the thinking, before it or behind it.

    The end of the prompt decides: whether it is one of the markers. If the answer continues a turn,
    the last marker decides.
    """
    if form.thinking is None:
        return Thought()
    tail = prompt[-_LONGEST_TAIL_CHARS:].rstrip()
    if continues:
        return Thought(is_open=tail.rfind(form.thinking.begin) > tail.rfind(form.thinking.end))
    if tail.endswith(form.thinking.begin):
        return Thought(is_open=True)
    return Thought(may_begin=not tail.endswith(form.thinking.end))
