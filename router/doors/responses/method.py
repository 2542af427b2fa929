"""/v1/responses: items in, the model's items out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.doors.http.parsing import parse
from router.doors.http.statuses import name_by
from router.doors.http.told import Told
from router.doors.responses.items import Item, Turns
from router.doors.responses.schema import PREVIOUS, ResponseRequest
from router.doors.responses.teller import ResponseTeller
from router.errors import Violation

if TYPE_CHECKING:
    from router.call import Call
    from router.requests.generation import Generations

_NAMES: Final = (
    ("input.chat.messages", "input"),
    ("input.chat.template_variables", "chat_template_kwargs"),
    ("input.chat.reasoning_effort", "reasoning.effort"),
    ("input.chat.", ""),
    ("input.chat", "input"),
    ("input.structure.json_schema", "text.format"),
    ("input.structure", "text.format"),
    ("input.sampling.", ""),
    ("input.stop.max_tokens", "max_output_tokens"),
    ("input.stop.sequences", "stop"),
    ("input.stop.", ""),
    ("input.output.", ""),
    ("input.", ""),
)
"""Beginnings of paths in `inference.proto`, and their names in this API."""


class Responses:
    """The method."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def __call__(self, body: bytes, call: Call, client_tag: str) -> Told:
        """Reads a request. Nothing runs before the answer is read.

        Raises:
            RouterError: the request cannot be understood.
        """
        request = parse(ResponseRequest, body)
        if request.store or request.previous_response_id is not None:
            name = PREVIOUS if request.previous_response_id is not None else "store"
            raise errors.invalid_fields(
                [Violation(name, "is not supported: this router keeps no responses")]
            )
        turns = Turns()
        if request.instructions:
            turns.add(_system(request.instructions), "instructions")
        generation = request.generation(turns)
        kind = api.StreamGenerateRequest if request.stream else api.GenerateRequest
        asked = kind(input=generation, client_tag=client_tag)
        teller = ResponseTeller(request, call, None)
        return Told(self._generations, asked, teller, call, lambda path: _name(turns, path))


def _name(turns: Turns, path: str) -> str:
    return turns.name_of(path) or name_by(_NAMES, path)


def _system(text: str) -> Item:
    return Item.model_validate({"role": "system", "content": text})
