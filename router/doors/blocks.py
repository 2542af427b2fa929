"""An answer as a row of blocks: thinking, text, calls. A block is complete when the next begins.

The APIs that send an answer in such blocks write `Opened`, `Grown` and `Closed` in their own form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from router.answers.calls import CallDelta
    from router.requests.outputs import TextDelta

Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of an answer."""

    index: int
    """Its place in the answer."""
    kind: Kind
    id: str = ""
    """Id of a call; `name` is the call's, too."""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text so far; of a call, the arguments."""
        return "".join(self.parts)


class Opened(NamedTuple):
    """A block begins. It is empty."""

    block: Block


class Grown(NamedTuple):
    """A block has more text."""

    block: Block
    text: str


class Closed(NamedTuple):
    """A block is complete, unless the answer was cut."""

    block: Block


Step = Opened | Grown | Closed


class Blocks:
    """The blocks of one answer."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def take(self, delta: TextDelta) -> Iterator[Step]:
        """What a delta adds. It thinks first, and calls last."""
        if reasoning := "".join(delta.reasoning):
            yield from self._more("thinking", reasoning)
        if text := "".join(delta.texts):
            yield from self._more("text", text)
        for call in delta.calls:
            yield from self._call(call)

    def grown(self, kind: str, text: str) -> Block | None:
        """Adds to the open block, if it is of that kind."""
        if not self._is_open or self.all[-1].kind != kind:
            return None
        self.all[-1].parts.append(text)
        return self.all[-1]

    def finish(self) -> Iterator[Step]:
        """The answer ends."""
        if self._is_open:
            self._is_open = False
            yield Closed(self.all[-1])

    def _more(self, kind: Kind, text: str) -> Iterator[Step]:
        if not self._is_open or self.all[-1].kind != kind:
            yield from self._open(Block(len(self.all), kind))
        yield self._grow(text)

    def _call(self, call: CallDelta) -> Iterator[Step]:
        if call.is_first:
            yield from self._open(Block(len(self.all), "call", call.id, call.name))
        if call.arguments:
            yield self._grow(call.arguments)

    def _open(self, block: Block) -> Iterator[Step]:
        yield from self.finish()
        self.all.append(block)
        self._is_open = True
        yield Opened(block)

    def _grow(self, text: str) -> Grown:
        block = self.all[-1]
        block.parts.append(text)
        return Grown(block, text)
