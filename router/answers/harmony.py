"""Finds the regions of an answer that is written in harmony, gpt-oss's form.

    <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>commentary
    to=functions.NAME <|constrain|>json<|message|>{"a": 1}<|call|>

The prompt ends with `<|start|>assistant`. Each message has a header with its channel and, where it
is a call, its recipient, before or behind the channel. An answer without a header is content.
https://cookbook.openai.com/articles/openai-harmony has the form.
"""

from __future__ import annotations

import re
from typing import Any, Final

from router.answers.calls import without_beginning
from router.answers.forms import CALLS, CONTENT, THINKING

_MESSAGE: Final = "<|message|>"
CALL_HEAD: Final = ("", _MESSAGE, "")
"""How a region of calls is given: see `NamedCalls`."""
_START: Final = "<|start|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", _START, "<|channel|>")
_MARK: Final = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADS: Final = ("<|channel|>", _START, "to=")
"""How the header of the first message may begin."""


class HarmonyStream:
    """Has the events of transformers' `ResponseParser`: regions open, grow and close."""

    def __init__(self, *, reads_calls: bool = True) -> None:
        """A stream. `reads_calls`: False where there are no tools: calls are content then."""
        self._reads_calls = reads_calls
        self._text = ""
        self._field = ""
        """Field of the message that is being read; "" in a header."""
        self._is_first = True

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Takes the next text; returns what happened."""
        self._text += text
        events: list[dict[str, Any]] = []
        while self._read_message(events) if self._field else self._read_header(events):
            pass
        return events

    def finalize(self) -> tuple[None, list[dict[str, Any]]]:
        """The end. Returns nothing, and what happened."""
        events: list[dict[str, Any]] = []
        if self._is_first and self._text:
            self._open(events, CONTENT)
        if self._field:
            if self._text:
                events.append(self._event("region_chunk", self._text))
            events.append(self._event("region_close"))
        return None, events

    def _read_header(self, events: list[dict[str, Any]]) -> bool:
        if self._is_first:
            begun = self._text.lstrip()
            if any(head.startswith(begun) for head in _HEADS):
                return False
            if not begun.startswith(_HEADS):
                self._open(events, CONTENT)
                return True
        header, found, rest = self._text.partition(_MESSAGE)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if not found:
            return False
        self._text = rest
        if recipient is not None and self._reads_calls:
            self._open(events, CALLS)
            self._text = f"{recipient[1]}{_MESSAGE}{rest}"
        elif channel is not None and channel[1] == "analysis":
            self._open(events, THINKING[0])
        else:
            self._open(events, CONTENT)
        return True

    def _read_message(self, events: list[dict[str, Any]]) -> bool:
        found = _MARK.search(self._text)
        if found is None:
            sure = min(without_beginning(self._text, mark) for mark in _ENDS)
            text, self._text = self._text[:sure], self._text[sure:]
        else:
            keep = found.start() if found[0] in (_START, "<|channel|>") else found.end()
            text, self._text = self._text[: found.start()], self._text[keep:]
        if text:
            events.append(self._event("region_chunk", text))
        if found is not None:
            events.append(self._event("region_close"))
            self._field = ""
        return found is not None

    def _open(self, events: list[dict[str, Any]], field: str) -> None:
        self._field, self._is_first = field, False
        events.append(self._event("region_open"))

    def _event(self, kind: str, text: str = "") -> dict[str, Any]:
        return {"type": kind, "field": self._field, "text": text, "value": None}
