"""The forms of families of models, and which of them a model has.

A checkpoint may bring a response template (`response_template` in its `tokenizer_config.json`).
Otherwise the words that its chat template uses tell its form. The forms are those of the families'
public chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeGuard

from router.answers.forms import (
    CALLS,
    CONTENT,
    THINKING,
    CallForm,
    Markers,
    ResponseForm,
    Spec,
    Tags,
)


class Family(NamedTuple):
    """How a family writes calls."""

    calls: CallForm
    spec: Spec
    """The field of a response template that finds them."""
    inner: tuple[str, ...] = ()
    """Texts within a region of calls that must be there, special tokens or not."""


HERMES: Final = CallForm("<tool_call>\n", "\n</tool_call>", gap="\n")
LLAMA: Final = CallForm(
    "", "", "; ", head=('{"name": "', '", "parameters": ', "}"), starts_answer=True
)
MISTRAL: Final = CallForm("[TOOL_CALLS][", "]", ", ", id_chars=9)
MISTRAL_NAMED: Final = CallForm("[TOOL_CALLS]", "", head=("", "[ARGS]", ""), id_chars=9)
_SEP: Final = "<｜tool▁sep｜>"
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE, _ONE_ENDS = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_V3: Final = CallForm(
    _BEGIN,
    _END,
    "\n",
    head=(f"{_ONE}function{_SEP}", "\n```json\n", f"\n```{_ONE_ENDS}"),
)
"""DeepSeek-V3's and R1's."""
DEEPSEEK_V31: Final = CallForm(_BEGIN, _END, "", head=(_ONE, _SEP, _ONE_ENDS))
QWEN_CODER: Final = CallForm(
    "<tool_call>\n",
    "\n</tool_call>",
    gap="\n",
    tags=Tags(
        Markers("<function=", ">"),
        Markers("<parameter=", ">"),
        Markers("\n", "\n</parameter>"),
        "\n",
        "</function>",
    ),
)
GLM_45: Final = CallForm(
    "<tool_call>",
    "</tool_call>",
    gap="\n",
    tags=Tags(
        Markers("", ""),
        Markers("<arg_key>", "</arg_key>"),
        Markers("\n<arg_value>", "</arg_value>"),
        "\n",
    ),
)
"""GLM-4.5's and 4.6's."""
GLM_47: Final = CallForm(
    "<tool_call>",
    "</tool_call>",
    tags=Tags(
        Markers("", ""), Markers("<arg_key>", "</arg_key>"), Markers("<arg_value>", "</arg_value>")
    ),
)
HARMONY_WORDS: Final = ("<|channel|>", "<|message|>")
HARMONY: Final = ResponseForm(
    {"start_anchor_pattern": r"\A", "fields": {THINKING[0]: {}, CONTENT: {}, CALLS: {}}},
    Markers("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
    CallForm(
        "<|channel|>commentary to=functions.",
        "",
        head=("", " <|constrain|>json<|message|>", ""),
        ends_answer=True,
    ),
    ("<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>", *HARMONY_WORDS),
    lead="<|channel|>final<|message|>",
    is_harmony=True,
)
"""gpt-oss's."""

_TAGGED_SPEC: Final[Spec] = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True}
_DEEPSEEK_SPEC: Final[Spec] = {"open": _BEGIN, "close": _END, "repeats": True}
_DEEPSEEK_WORDS: Final = (_ONE, _SEP, _ONE_ENDS)
_MISTRAL_NAMED_SPEC: Final[Spec] = {
    "open": "[TOOL_CALLS]",
    "close_pattern": r"(?=\[TOOL_CALLS\])",
    "repeats": True,
}
_LLAMA_SPEC: Final[Spec] = {"open_pattern": r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{)"}
FAMILIES: Final[tuple[tuple[tuple[str, ...], Family], ...]] = (
    ((_BEGIN, "```json"), Family(DEEPSEEK_V3, _DEEPSEEK_SPEC, _DEEPSEEK_WORDS)),
    ((_BEGIN,), Family(DEEPSEEK_V31, _DEEPSEEK_SPEC, _DEEPSEEK_WORDS)),
    (("<tool_call>", "</arg_key><arg_value>"), Family(GLM_47, _TAGGED_SPEC)),
    (("<tool_call>", "<arg_key>"), Family(GLM_45, _TAGGED_SPEC)),
    (("<tool_call>", "<function="), Family(QWEN_CODER, _TAGGED_SPEC)),
    (("<tool_call>",), Family(HERMES, _TAGGED_SPEC)),
    (("[TOOL_CALLS]", "[ARGS]"), Family(MISTRAL_NAMED, _MISTRAL_NAMED_SPEC, ("[ARGS]",))),
    (("[TOOL_CALLS]",), Family(MISTRAL, {"open": "[TOOL_CALLS]"})),
    (("<|python_tag|>",), Family(LLAMA, _LLAMA_SPEC)),
    (('"parameters": ', "tool_calls"), Family(LLAMA, _LLAMA_SPEC)),
)
"""By the words that a chat template uses; the first of which all are there."""


def form_of(config: Mapping[str, Any], template: str | None) -> ResponseForm:
    """The form of a model's answers.

    Args:
        config: its `tokenizer_config.json`.
        template: the source of its chat template, if it has one.
    """
    source = template or ""
    thinking = _thinking_of(source)
    family = next((one for words, one in FAMILIES if all(word in source for word in words)), None)
    calls, inner = (family.calls, family.inner) if family is not None else (None, ())
    spec = config.get("response_template")
    if _is_template(spec):
        return ResponseForm(
            spec, _given_thinking(spec) or thinking, calls, (*_markers_of(spec), *inner)
        )
    if all(word in source for word in HARMONY_WORDS):
        return HARMONY
    fields: Spec = {CONTENT: {"content": "text", "content_args": {"strip": False}}}
    if thinking is not None:
        fields[THINKING[0]] = {"open": thinking.begin, "close": thinking.end}
    if family is not None:
        fields[CALLS] = family.spec
    if len(fields) == 1:
        return ResponseForm()
    own: Spec = {"start_anchor_pattern": r"\A", "fields": fields}
    return ResponseForm(own, thinking, calls, (*_markers_of(own), *inner))


def _is_template(spec: object) -> TypeGuard[Spec]:
    fields = spec.get("fields") if isinstance(spec, dict) else None
    return isinstance(fields, dict) and all(isinstance(one, dict) for one in fields.values())


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
    return tuple(found)
