"""The forms in which families of models write their thinking and their calls of functions.

A form has two sides. Reading: a *response template*, from which transformers' `ResponseParser`
finds the parts of an answer. Writing: `CallForm`, of which the grammar of a call is made.
`router.answers.families` has the forms of the families.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

Spec = dict[str, Any]
"""A response template as JSON."""
CONTENT: Final = "content"
CALLS: Final = "tool_calls"
THINKING: Final = ("thinking", "reasoning", "reasoning_content")
"""Names that response templates give to the thinking."""
EFFORT: Final = "reasoning_effort"
"""Variable by which templates are told how much to think."""
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables by which templates turn thinking on and off."""

_JSON_HEAD: Final = ('{"name": "', '", "arguments": ', "}")
_LONGEST_TAIL_CHARS: Final = 65_536
"""The end of a prompt in which an opened part is looked for; templates write a few lines."""


class Markers(NamedTuple):
    """The texts around a part."""

    begin: str
    end: str
    then: str = ""
    """What follows the thinking, before anything else."""


class Tags(NamedTuple):
    """The texts around the parts of a call whose arguments are written one by one."""

    name: Markers
    key: Markers
    value: Markers
    gap: str = ""
    """Behind the name and behind each value."""
    end: str = ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are written: `begin`, one call or several, `end`."""

    begin: str
    end: str
    between: str | None = None
    """Between two calls. None: each further call has its own `begin` and `end`, with `gap` before
    it."""
    gap: str = ""
    head: tuple[str, str, str] = _JSON_HEAD
    """Before the name, before the arguments, after them."""
    starts_answer: bool = False
    """Calls are known only by the beginning of the answer. So no text comes before them."""
    id_chars: int = 0
    """Length of a call's id, if the chat template asks for one."""
    tags: Tags | None = None
    """Stand in place of `head`."""
    ends_answer: bool = False
    """A call ends the answer, so there is one."""

    @property
    def is_json(self) -> bool:
        """Whether a call is one object, with the name in it."""
        return self.head[0].startswith("{")


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
    lead: str = ""
    """Before content."""
    is_harmony: bool = False
    """The answer is a run of messages with headers (`router.answers.harmony`)."""

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
        return replace(self, spec={**self.spec, "fields": fields}, calls=None)


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
