"""Reads calls of functions while a model writes them.

A reader gets the raw text of a region that holds calls, in any deltas. It gives the id and the name
of a call as soon as they are certain, and then the arguments as they come, letter by letter as the
model wrote them. Text that turns out to be no call is given back at the end of the region.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

_ALPHABET: Final = string.ascii_letters + string.digits
_SPACE: Final = " \t\r\n"
_BETWEEN: Final = _SPACE + "[],;"
_BEHIND: Final = _SPACE + "`"
"""What may stand behind arguments: the end of a fence."""
_ARGUMENTS: Final = ("arguments", "parameters")
_HEADS: Final = ('{"name":"', '{"type":"function","name":"')
"""Beginnings of calls, up to the name, without spaces."""


@dataclass(slots=True)
class CallDelta:
    """What is new of one call."""

    index: int
    id: str = ""
    name: str = ""
    """Set, with the id, in the first part."""
    arguments: str = ""

    @property
    def is_first(self) -> bool:
        """Whether the call begins."""
        return bool(self.id)


def joined_calls(parts: Iterable[CallDelta]) -> list[CallDelta]:
    """The parts of each call as one, in order."""
    calls: dict[int, CallDelta] = {}
    for part in parts:
        if (call := calls.get(part.index)) is None:
            calls[part.index] = CallDelta(part.index, part.id, part.name, part.arguments)
        else:
            call.arguments += part.arguments
    return list(calls.values())


def new_id(chars: int = 0) -> str:
    """An id for a call. Some chat templates insist on a number of letters and digits."""
    if chars:
        return "".join(secrets.choice(_ALPHABET) for _ in range(chars))
    return f"call_{secrets.token_hex(12)}"


class Calls:
    """Numbers the calls of one answer and collects their parts."""

    def __init__(self, id_chars: int = 0) -> None:
        self._id_chars = id_chars
        self._parts: list[CallDelta] = []
        self.begun = 0
        self.complete = 0

    def begin(self, name: str) -> None:
        """A call begins."""
        self._parts.append(CallDelta(self.begun, new_id(self._id_chars), name))
        self.begun += 1

    def extend(self, text: str) -> None:
        """More arguments of the latest call."""
        last = self._parts[-1] if self._parts else None
        if last is not None and last.index == self.begun - 1:
            last.arguments += text
        else:
            self._parts.append(CallDelta(self.begun - 1, arguments=text))

    def take(self) -> list[CallDelta]:
        """The parts since the last time."""
        parts, self._parts = self._parts, []
        return parts


class CallReader(Protocol):
    """Reads the calls of one region."""

    def push(self, text: str) -> None:
        """Takes the next delta."""
        ...

    def finish(self, *, is_cut: bool = False) -> str:
        """The region ends. Returns the text that is no call. If the model was cut off within a
        call, a call is made once its name is certain, and nothing before that."""
        ...


class JsonCalls:
    """Calls as objects with `name` and `arguments` (or `parameters`), in any order. There may be
    several, in a list or one after the other."""

    def __init__(self, calls: Calls, known: Collection[str] | None = None) -> None:
        """A reader. `known`: the names of the tools, if nothing but the words marks a call."""
        self._calls = calls
        self._known = known
        self._raw: list[str] = []
        """The text of the object that is being read, until its name and arguments are certain."""
        self._take: Callable[[str], None] = self._between
        self._letter = ""
        self._key = ""
        self._string = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False
        self._name: str | None = None
        self._arguments: str | None = None
        """Arguments that came before the name."""
        self._sent = False
        self._streams = False

    def push(self, text: str) -> None:
        """Takes the next delta."""
        for letter in text:
            if not self._sent:
                self._raw.append(letter)
            self._letter = letter
            self._take(letter)
        self._flush()

    def finish(self, *, is_cut: bool = False) -> str:
        """Returns what is no call. A call whose arguments have begun stays, cut off."""
        rest = "" if self._sent else "".join(self._raw)
        if is_cut and self._is_inside and self._may_be_call(rest):
            if self._name:
                self._calls.begin(self._name)
                self._calls.extend(self._arguments or "")
            return ""
        return rest if rest.strip(_BETWEEN) else ""

    @property
    def _is_inside(self) -> bool:
        """Whether a call has begun whose arguments have not."""
        return not self._sent and self._take not in (self._between, self._ignore)

    def _may_be_call(self, text: str) -> bool:
        """Whether a text that was cut is a call: where nothing marks calls, by its words."""
        if self._known is None:
            return True
        if self._name:
            return self._name in self._known
        begun = "".join(text.lstrip(_BETWEEN).split())
        heads = [f'{head}{name}"' for head in _HEADS for name in self._known]
        return any(head.startswith(begun) for head in heads)

    # Each of the following takes one letter in one state.

    def _between(self, letter: str) -> None:
        if letter == "{":
            self._name, self._arguments, self._sent = None, None, False
            self._take = self._before_key
        elif letter not in _BETWEEN:
            self._give_up()

    def _before_key(self, letter: str) -> None:
        if letter == '"':
            self._string, self._take = '"', self._in_key
        elif letter == "}":
            self._end_call()
        elif letter not in _SPACE + ",":
            self._give_up()

    def _in_key(self, letter: str) -> None:
        self._string += letter
        if self._closes(letter):
            self._key, self._take = _text(self._string) or "", self._before_value

    def _before_value(self, letter: str) -> None:
        if letter in _SPACE + ":":
            return
        if self._key == "name" and letter != '"':
            self._give_up()
            return
        if self._key in _ARGUMENTS and letter not in '{"n':
            self._give_up()
            return
        self._value.clear()
        self._depth, self._in_string = 0, False
        self._streams = self._key in _ARGUMENTS and letter == "{" and self._name is not None
        if self._streams:
            self._calls.begin(self._name or "")
            self._sent = True
        self._take = self._in_value
        self._in_value(letter)

    def _in_value(self, letter: str) -> None:
        if not self._in_string and self._depth == 0 and self._value and letter in ",}]" + _SPACE:
            self._end_value()
            self._take = self._before_key
            self._take(letter)
            return
        self._value.append(letter)
        ends = False
        if self._in_string:
            ends = self._closes(letter)
            self._in_string = not ends
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            ends = True
        if ends and self._depth == 0:
            self._end_value()
            self._take = self._before_key

    def _end_value(self) -> None:
        text = "".join(self._value)
        if self._streams:
            self._flush()
        elif self._key == "name":
            self._name = _text(text)
        elif self._key in _ARGUMENTS:  # Before the name, or a text that holds JSON.
            self._arguments = "{}" if text == "null" else _text(text) or text
        self._value.clear()
        self._streams = False

    def _flush(self) -> None:
        """Sends the arguments so far."""
        if self._streams and (text := "".join(self._value)):
            self._calls.extend(text)
            self._value[:] = [""]  # It is not empty, so that a comma still ends it.

    def _end_call(self) -> None:
        if not self._sent and not self._name:
            self._give_up()
            return
        if not self._sent:
            self._calls.begin(self._name or "")
            self._calls.extend(self._arguments or "{}")
        self._calls.complete += 1
        self._raw.clear()
        self._sent = False
        self._take = self._between

    def _give_up(self) -> None:
        """What follows is no call."""
        if self._sent:
            self._raw, self._sent = [self._letter], False
        self._take = self._ignore

    def _ignore(self, letter: str) -> None:
        """Keeps the text only."""

    def _closes(self, letter: str) -> bool:
        """Whether a letter inside a string ends it."""
        if self._escaped:
            self._escaped = False
            return False
        self._escaped = letter == "\\"
        return letter == '"'


class NamedCalls:
    """Calls as a name, a separator and the arguments."""

    def __init__(self, calls: Calls, head: tuple[str, str, str]) -> None:
        """A reader. `head`: texts before the name, before the arguments, behind them. Without the
        last one there is one call, to the end of the region."""
        self._calls = calls
        self._before, self._separator, self._after = (text.strip() for text in head)
        self._raw = ""
        self._text = ""
        """What was not taken yet."""
        self._begun = self._in_arguments = self._is_first = False

    def push(self, text: str) -> None:
        """Takes the next delta."""
        if not self._begun:
            self._raw += text
        self._text += text
        while self._take_arguments() if self._in_arguments else self._take_name():
            pass

    def finish(self, *, is_cut: bool = False) -> str:
        """Returns what is no call."""
        if self._in_arguments:
            self._calls.extend(self._text[: self._sure(self._text)])
            self._calls.complete += not is_cut
        return "" if self._begun or is_cut else self._raw

    def _take_name(self) -> bool:
        head, found, rest = self._text.partition(self._separator)
        space, begins, name = head.partition(self._before) if self._before else ("", "", head)
        if not found or space.strip() or (self._before and not begins) or not name.strip():
            return False
        self._calls.begin(name.strip())
        self._begun = self._in_arguments = self._is_first = True
        self._text = rest
        return True

    def _take_arguments(self) -> bool:
        text = self._text.lstrip() if self._is_first else self._text
        text, found, rest = text.partition(self._after) if self._after else (text, "", "")
        sure = text.rstrip(_BEHIND) if found else text[: self._sure(text)]
        if sure:
            self._is_first = False
            self._calls.extend(sure)
        self._text = rest if found else text[len(sure) :]
        self._in_arguments = not found
        self._calls.complete += bool(found)
        return bool(found)

    def _sure(self, text: str) -> int:
        """The length of what belongs to the arguments whatever comes."""
        return len(text[: without_beginning(text, self._after)].rstrip(_BEHIND))


def without_beginning(text: str, marker: str) -> int:
    """The length of a text without what may be the beginning of a marker at its end."""
    for length in range(min(len(marker), len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)


def _text(literal: str) -> str | None:
    """The text of a JSON string; None for anything else."""
    try:
        text = json.loads(literal, strict=False)
    except ValueError:
        return None
    return text if isinstance(text, str) else None
