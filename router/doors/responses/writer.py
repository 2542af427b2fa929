"""Writes an answer as OpenAI's Responses API has it: a response with items, and its events.

The order of the events is that of OpenAI's own streams: a response is created and in progress, each
item is added, grows and is done before the next one is added, and the response is completed or
incomplete. `sequence_number` counts them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pydantic_core import from_json

from baton.inference.v1 import inference_pb2 as api
from router.doors.blocks import Block, Closed, Grown, Opened, Step
from router.doors.openai.schema import served_tier

if TYPE_CHECKING:
    from router.call import Call
    from router.doors.http.statuses import JSON
    from router.doors.responses.schema import ResponseRequest
    from router.requests.outputs import Finished, Started

Keep = Callable[["JSON"], Awaitable[bool]]
"""Stores a whole response; returns whether that worked."""
_ID_BYTES: Final = 24
"""As long as OpenAI's ids; too long to be guessed."""
_PREFIXES: Final = {"thinking": "rs", "text": "msg", "call": "fc"}


def new_id(prefix: str) -> str:
    """A random id, which nobody can guess."""
    return f"{prefix}_{secrets.token_hex(_ID_BYTES)}"


class ResponseWriter:
    """One response.

    Args:
        request: what is answered.
        call: the caller's.
        keep: stores the response; None: it is not stored.
    """

    def __init__(self, request: ResponseRequest, call: Call, keep: Keep | None) -> None:
        self._keep = keep
        self._sequence = 0
        self._items: list[JSON] = []
        self._response: JSON = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": call.arrived_ns // 1_000_000_000,
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": request.model,
            "output": [],
            "usage": None,
            "store": keep is not None,
            **_echoed(request),
        }

    def begin(self, started: Started) -> list[JSON]:
        """The first events."""
        sampling = started.job.sampling
        self._response |= {
            "model": started.job.model.called,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        return [self._whole_event("response.created"), self._whole_event("response.in_progress")]

    def step(self, step: Step, number: int | None = None) -> list[JSON]:
        """The events of a step. `number`: of the only one, instead of the next."""
        if number is not None:
            sequence, self._sequence = self._sequence, number
            events = self.step(step)
            self._sequence = sequence
            return events
        match step:
            case Opened(block):
                return [*self._open(block)]
            case Grown(block, text):
                return [self._grow(block, text)]
            case Closed(block):
                return [*self._close(block, "completed")]

    def count(self) -> int:
        """The number of the next event."""
        self._sequence += 1
        return self._sequence - 1

    async def end(self, blocks: Sequence[Block], finished: Finished) -> list[JSON]:
        """The last events."""
        events: list[JSON] = []
        if not blocks:  # A response has an item, be it an empty message.
            empty = Block(0, "text")
            events += [*self._open(empty), *self._close(empty, "completed")]
        is_cut = finished.reason == api.FINISH_REASON_LENGTH
        if is_cut:
            self._items[-1]["status"] = "incomplete"
        status = "incomplete" if is_cut else "completed"
        self._response |= {
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": None if finished.usage is None else _usage(finished.usage),
        }
        if self._keep is not None:
            self._response["store"] = await self._keep(self._response)
        return [*events, self._whole_event(f"response.{status}")]

    def whole(self) -> JSON:
        """The response."""
        return self._response

    def failure(self, error: JSON) -> JSON:
        """The last event of a response that fails."""
        described = error["error"]
        self._response |= {
            "status": "failed",
            "output": self._items,
            "error": {"code": described["code"], "message": described["message"]},
            "store": False,
        }
        return self._whole_event("response.failed")

    def _event(self, kind: str, **fields: object) -> JSON:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _whole_event(self, kind: str) -> JSON:
        return self._event(kind, response=dict(self._response))

    def _open(self, block: Block) -> Iterator[JSON]:
        item = _item(block, new_id(_PREFIXES[block.kind]), "in_progress")
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._of_part(block, "response.content_part.added", part=_part(block, ""))

    def _grow(self, block: Block, text: str) -> JSON:
        if block.kind == "call":
            return self._of_item(block, "response.function_call_arguments.delta", delta=text)
        if block.kind == "thinking":
            return self._of_part(block, "response.reasoning_text.delta", delta=text)
        return self._of_part(block, "response.output_text.delta", delta=text, logprobs=[])

    def _close(self, block: Block, status: str) -> Iterator[JSON]:
        text = block.text
        item = _item(block, self._items[block.index]["id"], status, text)
        if block.kind == "call":
            done = self._of_item(block, "response.function_call_arguments.done", arguments=text)
            yield {**done, "name": block.name}
        elif block.kind == "thinking":
            yield self._of_part(block, "response.reasoning_text.done", text=text)
        else:
            yield self._of_part(block, "response.output_text.done", text=text, logprobs=[])
        if block.kind != "call":
            yield self._of_part(block, "response.content_part.done", part=_part(block, text))
        self._items[block.index] = item
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _of_item(self, block: Block, kind: str, **fields: object) -> JSON:
        item_id = self._items[block.index]["id"]
        return self._event(kind, item_id=item_id, output_index=block.index, **fields)

    def _of_part(self, block: Block, kind: str, **fields: object) -> JSON:
        return self._of_item(block, kind, content_index=0, **fields)


def _part(block: Block, text: str) -> JSON:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(block: Block, item_id: str, status: str, text: str | None = None) -> JSON:
    """An item; without a text it has just been added."""
    item: JSON = {"id": item_id, "type": "message", "status": status}
    content = [] if text is None else [_part(block, text)]
    match block.kind:
        case "text":
            return {**item, "role": "assistant", "content": content}
        case "thinking":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        case "call":
            called = {"call_id": block.id, "name": block.name, "arguments": text or ""}
            return {**item, "type": "function_call", **called}


def _usage(usage: api.Usage) -> JSON:
    loaded = dict(usage.loaded_prompt_tokens)
    cached: JSON = {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cached | ({"loaded_tokens": loaded} if loaded else {}),
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _echoed(request: ResponseRequest) -> JSON:
    """The fields of the request that its response repeats. All that OpenAI's and Open Responses'
    schemas have are there: readers of the latter refuse a response without one of them."""
    choice, form = request.tool_choice, request.format
    format_: JSON = {"type": form.type}
    if form.type == "json_schema":
        format_ |= {"name": form.name, "description": form.description}
        format_ |= {"schema": _told(form.schema_), "strict": bool(form.strict)}
    verbosity = request.text and request.text.verbosity
    return {
        **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key")),
        "presence_penalty": request.presence_penalty or 0,
        "frequency_penalty": request.frequency_penalty or 0,
        "max_tool_calls": request.max_tool_calls,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "metadata": request.metadata or {},
        "max_output_tokens": request.max_output_tokens,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "service_tier": served_tier(request.service_tier),
        "text": {"format": format_, **({"verbosity": verbosity} if verbosity else {})},
        "tool_choice": choice if isinstance(choice, str) else _chosen(request),
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": _told(tool.parameters),
                "strict": bool(tool.strict),
            }
            for tool in request.tools or ()
        ],
        "top_logprobs": 0,
        "truncation": "disabled",
    }


def _told(schema: str | None) -> object:
    """A schema as JSON; as its text, where that is none and nothing has read it."""
    try:
        return from_json(schema or "{}")
    except ValueError:
        return schema


def _chosen(request: ResponseRequest) -> JSON | str:
    if request.tool_choice is None:
        return "auto"
    assert not isinstance(request.tool_choice, str)
    return {"type": "function", "name": request.tool_choice.name}
