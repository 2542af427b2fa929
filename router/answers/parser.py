"""Finds the parts of an answer while it comes: thinking, content and calls of functions.

transformers' `ResponseParser` finds the regions. What is inside a region of calls is read here,
because a client gets a call's name at once and its arguments as the model writes them. A region
that is no call, such as one with broken JSON, is given back as content.

The parts do not depend on the deltas in which the text comes. Text beside a call keeps its white
space. White space alone between calls, and around the thinking, belongs to nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from router.answers.calls import CallDelta, CallReader, Calls, JsonCalls, NamedCalls
from router.answers.forms import CALLS, THINKING, ResponseForm, Spec
from router.answers.harmony import CALL_HEAD, HarmonyStream
from router.answers.tagged_calls import TaggedCalls

_TEXT: Final = {"strip": False}
_BODY: Final = "body"
_OPEN: Final = "\x01"
"""Stands for the beginning of a region that is parsed by itself."""


def is_readable(spec: Spec) -> bool:
    """Whether a response template can be used. The first call takes a second: it imports
    transformers."""
    if importlib.util.find_spec("torch") is None:  # It would complain that it runs no models.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        _raw(_Key(spec))
    except Exception:  # A template of a checkpoint may hold anything.
        return False
    return True


class Parts(NamedTuple):
    """What a delta of text adds to each part."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()


class AnswerParser:
    """Parses one answer.

    Args:
        form: the form of the model's answers.
        thinks: whether the prompt has begun the thinking.
        tools: names and schemas of the functions. The schemas give the types of arguments that a
            model does not write as JSON.
    """

    def __init__(
        self, form: ResponseForm, *, thinks: bool = False, tools: Sequence[tuple[str, str]] = ()
    ) -> None:
        assert form.spec is not None, "an answer of any form is all content"
        self._form, self._spec = form, form.spec
        self._tools = tools
        self._stream = _stream_of(form, thinks=thinks)
        self.thinking = thinks
        """Whether the latest text belongs to the thinking."""
        self._calls = Calls(form.calls.id_chars if form.calls else 0)
        self._reader: CallReader | None = None
        self._ended = self._is_cut = False
        self._content, self._reasoning = _Trimmed(is_first=not thinks), _Trimmed(is_first=False)

    @property
    def calls_begun(self) -> int:
        """Calls in the answer so far."""
        return self._calls.begun

    @property
    def calls_complete(self) -> int:
        """Calls that are whole."""
        return self._calls.complete

    def push(self, text: str) -> Parts:
        """Takes the next text."""
        return self._parts(self._stream.feed(text))

    def finish(self, *, is_cut: bool = False) -> Parts:
        """The end of the answer. Gives what was held back.

        Args:
            is_cut: the model had no further token. Then half a marker is no text.
        """
        self._ended, self._is_cut = True, is_cut
        _, events = self._stream.finalize()
        if is_cut:  # All text was given before, but the beginning of a marker.
            events = [event for event in events if event["type"] != "region_chunk"]
        parts = self._parts(events)
        return parts._replace(content=parts.content + self._content.rest())

    def _parts(self, events: Sequence[dict[str, Any]]) -> Parts:
        content: list[str] = []
        reasoning: list[str] = []
        for event in events:
            name = event["field"]
            if name == CALLS:
                content.append(self._take_calls(event))
            elif name in THINKING:
                self.thinking = event["type"] != "region_close"
                if event["type"] == "region_open":
                    self._content.thinking_begins()
                elif event["type"] == "region_chunk":
                    reasoning.append(self._reasoning.push(event["text"]))
            elif event["type"] == "region_chunk":
                content.append(self._content.push(event["text"]))
        return Parts("".join(content), "".join(reasoning), self._calls.take())

    def _take_calls(self, event: dict[str, Any]) -> str:
        """Reads a region of calls. Returns text that is none."""
        space = ""
        if event["type"] == "region_open" or self._reader is None:
            space = self._content.call_begins()
            self._reader = self._new_reader()
        if event["type"] == "region_chunk":
            self._reader.push(event["text"])
            return space
        if event["type"] == "region_open":
            return space
        is_cut = self._is_cut
        rest = self._reader.finish(is_cut=is_cut)
        if isinstance(self._reader, _WholeCalls):
            rest = self._reader.read(event["value"], is_cut=is_cut)
        self._reader = None
        return space + (self._content.no_call(self._marked(rest)) if rest else "")

    def _marked(self, text: str) -> str:
        """The text of a region with its markers, as far as they are known."""
        if self._calls.begun > self._calls.complete:
            return text
        one = self._spec["fields"][CALLS]
        end = "" if self._ended else _literal(one.get("close"))
        return f"{_literal(one.get('open'))}{text}{end}"

    def _new_reader(self) -> CallReader:
        one = self._spec["fields"][CALLS]
        if "transform" not in one and "content" not in one:  # A form of ours.
            assert self._form.calls is not None
            if self._form.calls.tags is not None:
                return TaggedCalls(self._calls, self._form.calls.tags, self._tools)
            if self._form.calls.is_json:
                is_marked = not self._form.calls.starts_answer
                return JsonCalls(self._calls, None if is_marked else dict(self._tools))
            head = CALL_HEAD if self._form.is_harmony else self._form.calls.head
            return NamedCalls(self._calls, head)
        if _is_plain_json(one):
            return JsonCalls(self._calls)
        return _WholeCalls(self._calls, self._spec, self._tools)


def _stream_of(form: ResponseForm, *, thinks: bool) -> Any:
    """Finds regions: transformers' parser, or one with the same events."""
    if form.is_harmony:
        return HarmonyStream(reads_calls=form.reads_calls)
    from transformers.utils.chat_parsing import ResponseParser

    prefix = form.thinking.begin if thinks and form.thinking is not None else ""
    return ResponseParser(_raw(_Key(form.spec or {})), prefix=prefix)


class _WholeCalls:
    """Calls that are not written as JSON: they are read when their region is complete."""

    def __init__(self, calls: Calls, spec: Spec, tools: Sequence[tuple[str, str]]) -> None:
        self._calls = calls
        self._spec = spec
        self._tools = tools

    def push(self, text: str) -> None:
        """The region is not complete."""

    def finish(self, *, is_cut: bool = False) -> str:
        """`read` follows."""
        return ""

    def read(self, captured: dict[str, str], *, is_cut: bool = False) -> str:
        """Takes the whole region; returns it if it is no call. One that was cut is a call without
        arguments, if its name is certain, and nothing else."""
        from transformers.utils.chat_parsing import parse_response

        body = captured[_BODY]
        if is_cut:
            if name := captured.get("name"):
                self._calls.begin(name)
            return ""
        try:
            tools = [
                {"function": {"name": name, "parameters": json.loads(schema or "{}")}}
                for name, schema in self._tools
            ]
            alone = _alone(self._spec, captured)
            found = parse_response(_OPEN + body, alone, prefix="", tools=tools)[CALLS]
            functions = [_function(one) for one in (found if isinstance(found, list) else [found])]
        except Exception:  # A template of a checkpoint may fail in any way.
            return body
        for name, arguments in functions:
            self._calls.begin(name)
            self._calls.extend(arguments)
            self._calls.complete += 1
        return ""


class _Trimmed:
    """Text of one part. White space beside the thinking, and white space alone beside calls, is
    left out."""

    def __init__(self, *, is_first: bool = True) -> None:
        self._skips = not is_first
        """Whether white space is skipped, since the thinking came before."""
        self._held = ""
        self._dropped = ""
        """White space before the latest call."""
        self._has_text = self._has_calls = False
        """Whether text came since the latest call; whether a call came."""

    def push(self, text: str) -> str:
        """Takes more; returns what is certain."""
        if self._skips:
            text = text.lstrip()
        if not text:
            return ""
        self._skips = False
        text = self._held + text
        trimmed = text.rstrip()
        self._held = text[len(trimmed) :]
        self._has_text = self._has_text or bool(trimmed)
        return trimmed

    def thinking_begins(self) -> None:
        """The thinking begins here."""
        self._skips, self._held = True, ""

    def call_begins(self) -> str:
        """A call begins here. Returns the space behind the text before it."""
        held, self._held = self._held, ""
        self._dropped = "" if self._has_text else held
        had_text, self._has_text, self._has_calls = self._has_text, False, True
        return held if had_text else ""

    def no_call(self, text: str) -> str:
        """The latest call was none: its text belongs here."""
        self._held, self._dropped = self._dropped, ""
        return self.push(text)

    def rest(self) -> str:
        """What was held, at the end of the answer."""
        held, self._held = self._held, ""
        return held if self._has_text or not self._has_calls else ""


def _literal(one: object) -> str:
    if isinstance(one, list) and one:
        one = one[0]
    return one if isinstance(one, str) else ""


class _Key:
    """A template as a key: templates are few, and each is kept once."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._text = json.dumps(spec, sort_keys=True)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other._text == self._text


@functools.lru_cache(32)
def _raw(key: _Key) -> Any:
    """The template with regions as they are written: nothing is parsed, so nothing can fail."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    fields = {}
    for name, one in key.spec["fields"].items():
        fields[name] = {
            part: value for part, value in one.items() if part.startswith(("open", "close"))
        }
        fields[name] |= {"content": "text", "content_args": _TEXT, "repeats": True}
        names = _names(one)
        if name == CALLS or names:
            captured = {name: f"{{{name}}}" for name in names}
            fields[name]["transform"] = {_BODY: "{content}", **captured}
    anchors = {name: one for name, one in key.spec.items() if name.startswith("start_anchor")}
    return load_response_template({**anchors, "fields": fields})


def _names(one: Spec) -> list[str]:
    patterns = (one.get("open_pattern"), one.get("close_pattern"))
    return [name for each in patterns if each for name in re.findall(r"\(\?P?<(\w+)>", each)]


def _alone(spec: Spec, captured: dict[str, str]) -> Spec:
    """A template for one region of calls, without its markers."""
    one = {
        part: value
        for part, value in spec["fields"][CALLS].items()
        if not part.startswith(("open", "close"))
    }
    if "transform" in one:
        one["transform"] = _filled(one["transform"], captured)
    return {"start_anchor": _OPEN, "fields": {CALLS: {**one, "open": _OPEN}}}


def _filled(transform: Any, captured: dict[str, str]) -> Any:
    match transform:
        case dict():
            return {name: _filled(one, captured) for name, one in transform.items()}
        case list():
            return [_filled(one, captured) for one in transform]
        case str() if transform[1:-1] in captured and transform == f"{{{transform[1:-1]}}}":
            return captured[transform[1:-1]]
        case _:
            return transform


def _function(call: Any) -> tuple[str, str]:
    function = call.get("function", call)
    name, arguments = function["name"], function.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("no call")
    return name, json.dumps(arguments, ensure_ascii=False)


def _is_plain_json(one: Spec) -> bool:
    """Whether a region holds objects with `name` and `arguments`, as JSON without a dialect."""
    if one.get("content") != "json" or set(one.get("content_args", {})) - {"allow_non_json"}:
        return False
    function = one.get("transform")
    if isinstance(function, dict):
        function = function.get("function", function)
    if function is None or function == "{content}":
        return True
    if not isinstance(function, dict):
        return False
    arguments = ("{content.arguments}", "{content.parameters}", "{arguments}", "{parameters}")
    return function.get("name") in ("{content.name}", "{name}") and (
        function.get("arguments") in arguments
    )
