"""An answer of one generation, told block by block by an API's `Teller`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Protocol

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.doors.blocks import Block, Blocks, Step
from router.doors.http.statuses import JSON, dropped_header, ignored_header
from router.errors import Violation
from router.requests.outputs import Finished, Output, Started, TextDelta

if TYPE_CHECKING:
    from router.call import Call
    from router.requests.generation import GenerationRequest, Generations


class Teller(Protocol):
    """Writes one answer in the form of an API, as events and as a whole."""

    def begin(self, started: Started) -> Sequence[JSON]:
        """The first events."""
        ...

    def step(self, step: Step) -> Sequence[JSON]:
        """The events of a step."""
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


class Told:
    """The answer to one request; `whole` or `chunks` is called once.

    Args:
        generations: runs the request.
        request: has one choice.
        teller: writes the answer.
        call: the caller's.
        name_of: the API's name for a field of the request.
        ignored: fields of the request that have no effect.
    """

    def __init__(
        self,
        generations: Generations,
        request: GenerationRequest,
        teller: Teller,
        call: Call,
        name_of: Callable[[str], str],
        ignored: Sequence[str] = (),
    ) -> None:
        self._ignored = ignored
        self.stream = isinstance(request, api.StreamGenerateRequest)
        self.headers: dict[str, str] = {}
        self._outputs = generations.stream(request, call)
        self._teller = teller
        self._name_of = name_of

    async def whole(self) -> JSON:
        """The answer in one object.

        Raises:
            RouterError: it failed.
        """
        async with aclosing(self.chunks()) as events:
            async for _ in events:
                pass
        return self._teller.whole()

    async def chunks(self) -> AsyncGenerator[JSON, None]:
        """Its events as they come.

        Raises:
            RouterError: it is incomplete.
        """
        blocks = Blocks()
        with renamed(self._name_of):
            async with aclosing(self._outputs) as outputs:
                async for output in outputs:
                    for event in await self._events(output, blocks):
                        yield event

    def failure(self, error: JSON) -> JSON:
        """The last event of a stream that fails."""
        return self._teller.failure(error)

    async def _events(self, output: Output, blocks: Blocks) -> list[JSON]:
        teller = self._teller
        match output:
            case Started():
                self.headers |= dropped_header(output.dropped_keywords)
                of_model = map(self._name_of, output.ignored_fields)
                self.headers |= ignored_header([*self._ignored, *of_model])
                return [*teller.begin(output)]
            case TextDelta():
                return [event for step in blocks.take(output) for event in teller.step(step)]
            case Finished():
                rest = [event for step in blocks.finish() for event in teller.step(step)]
                return [*rest, *await teller.end(blocks.all, output)]


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
