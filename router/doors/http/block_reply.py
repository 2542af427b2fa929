"""An answer of one generation, written block by block by an API's `ReplyWriter`."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.doors.blocks import Block, Blocks, Grown, Step
from router.doors.http.statuses import JSON, dropped_header, ignored_header
from router.doors.straight import MARK, NUMBER, Straight, Template, text_of
from router.errors import Violation
from router.requests.outputs import Finished, Output, Started, TextDelta

if TYPE_CHECKING:
    from router.call import Call
    from router.requests.generation import GenerationRequest, Generations


_A_PROMPT: Final = re.compile(r"^input\.(?:text|token_ids\.ids)\b")
"""The path of a prompt in `inference.proto`."""


class ReplyWriter(Protocol):
    """Writes one answer in the form of an API, as events and as a whole."""

    def begin(self, started: Started) -> Sequence[JSON]:
        """The first events."""
        ...

    def step(self, step: Step, number: int | None = None) -> Sequence[JSON]:
        """The events of a step. `number`: of the only event, instead of the next one."""
        ...

    def count(self) -> int:
        """The number of the next event, which is written elsewhere; 0 where events have none."""
        ...

    async def end(self, blocks: Sequence[Block], finished: Finished) -> Sequence[JSON]:
        """The last events. From then on the answer is `whole`."""
        ...

    def whole(self) -> JSON:
        """The whole answer."""
        ...

    def failure(self, error: JSON) -> JSON:
        """The last event of an answer that fails."""
        ...


class BlockReply:
    """The answer to one request; `whole` or `chunks` is called once.

    Args:
        generations: runs the request.
        request: has one choice.
        writer: writes the answer.
        call: the caller's.
        name_of: the API's name for a field of the request.
        ignored: fields of the request that have no effect.
    """

    def __init__(
        self,
        generations: Generations,
        request: GenerationRequest,
        writer: ReplyWriter,
        call: Call,
        name_of: Callable[[str], str],
        ignored: Sequence[str] = (),
    ) -> None:
        self._ignored = ignored
        self.stream = isinstance(request, api.StreamGenerateRequest)
        self.headers: dict[str, str] = {}
        self.straight: Straight | None = None
        self._outputs = generations.stream(request, call, self if self.stream else None)
        self._blocks = Blocks()
        self._template: tuple[Block, Template] | None = None
        """Template of events that add to a block, with the block."""
        self._writer = writer
        self._name_of = name_of

    async def whole(self) -> JSON:
        """The answer in one object.

        Raises:
            RouterError: it failed.
        """
        async with aclosing(self.chunks()) as events:
            async for _ in events:
                pass
        return self._writer.whole()

    async def chunks(self) -> AsyncGenerator[JSON, None]:
        """Its events as they come.

        Raises:
            RouterError: it is incomplete.
        """
        with renamed(self._name_of):
            async with aclosing(self._outputs) as outputs:
                async for output in outputs:
                    for event in await self._events(output):
                        yield event

    def take(self, delta: TextDelta) -> bool:
        """Sends a delta that only adds to the open block; see `ShortWay`."""
        straight, found = self.straight, text_of(delta)
        if straight is None or found is None or not straight.is_free():
            return False
        kind, text = found
        if not text:
            return True  # It has no event.
        if (block := self._blocks.grown(kind, text)) is None:
            return False
        if self._template is None or self._template[0] is not block:
            marked = self._writer.step(Grown(block, MARK), NUMBER)
            self._template = block, Template(b"".join(map(straight.frame, marked)))
        straight.write(self._template[1].event(text, self._writer.count()), time.monotonic())
        return True

    def failure(self, error: JSON) -> JSON:
        """The last event of a stream that fails."""
        return self._writer.failure(error)

    async def _events(self, output: Output) -> list[JSON]:
        writer, blocks = self._writer, self._blocks
        match output:
            case Started():
                self.headers |= dropped_header(output.dropped_keywords)
                of_model = map(self._name_of, output.ignored_fields)
                self.headers |= ignored_header([*self._ignored, *of_model])
                return [*writer.begin(output)]
            case TextDelta():
                return [event for step in blocks.take(output) for event in writer.step(step)]
            case Finished():
                rest = [event for step in blocks.finish() for event in writer.step(step)]
                return [*rest, *await writer.end(blocks.all, output)]


@contextmanager
def renamed(name_of: Callable[[str], str]) -> Iterator[None]:
    """Within it, fields of an error get the names that `name_of` gives them."""
    try:
        yield
    except errors.RouterError as error:
        error.violations = [
            Violation(name_of(one.field), one.description) for one in error.violations
        ]
        raise


async def of_prompt(
    index: int, outputs: AsyncGenerator[Output, None]
) -> AsyncGenerator[Output, None]:
    """The outputs of one of several prompts. Errors say which it is.

    Raises:
        RouterError: it failed.
    """
    with renamed(lambda path: _A_PROMPT.sub(f"prompt[{index}]", path)):
        async with aclosing(outputs) as found:
            async for output in found:
                yield output
