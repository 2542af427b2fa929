"""Writes an answer as Anthropic's Messages API has it: a message of blocks, and its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pydantic_core import from_json

from baton.inference.v1 import inference_pb2 as api
from router.doors.blocks import Block, Closed, Grown, Opened, Step

if TYPE_CHECKING:
    from router.call import Call
    from router.doors.http.statuses import JSON
    from router.requests.outputs import Finished, Started

SIGNATURE: Final = "unsigned"
"""Stands where Anthropic signs what a model thought. Clients drop thinking without it."""
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_REASONS: Final = {
    api.FINISH_REASON_LENGTH: "max_tokens",
    api.FINISH_REASON_TOOL_CALLS: "tool_use",
}


class MessageWriter:
    """One message.

    Args:
        call: the caller's.
        max_tokens: as the request has it.
    """

    def __init__(self, call: Call, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._message: JSON = {
            "id": call.answer_id("msg_"),
            "type": "message",
            "role": "assistant",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, started: Started) -> list[JSON]:
        """The first event."""
        usage = _usage(started.job.prompt_tokens, started.cached_prompt_tokens, 0)
        self._message |= {"model": started.job.model.called, "usage": usage}
        return [{"type": "message_start", "message": dict(self._message)}]

    def step(self, step: Step, number: int | None = None) -> list[JSON]:
        """The events of a step."""
        index = step.block.index
        match step:
            case Opened(block):
                begun = _content(block, "")
                return [{"type": "content_block_start", "index": index, "content_block": begun}]
            case Grown(block, text):
                kind, field = _DELTAS[block.kind]
                return [_delta(index, {"type": kind, field: text})]
            case Closed(block):
                signed: list[JSON] = []
                if block.kind == "thinking":
                    signed = [_delta(index, {"type": "signature_delta", "signature": SIGNATURE})]
                return [*signed, {"type": "content_block_stop", "index": index}]

    def count(self) -> int:
        """Events have no numbers."""
        return 0

    async def end(self, blocks: Sequence[Block], finished: Finished) -> list[JSON]:
        """The last events."""
        assert finished.usage is not None, "a message has one choice"
        usage = finished.usage
        counts = _usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.output_tokens)
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
        end = {
            "stop_reason": self._reason(finished),
            "stop_sequence": finished.stop_text or None,
        }
        content = [_content(block, SIGNATURE) for block in blocks]
        if not self._max_tokens:  # What was generated has only made the prompt run.
            content, counts["output_tokens"] = [], 0
            end = {"stop_reason": "max_tokens", "stop_sequence": None}
        self._message |= {"content": content, "usage": counts, **end}
        return [
            {"type": "message_delta", "delta": end, "usage": counts},
            {"type": "message_stop"},
        ]

    def whole(self) -> JSON:
        """The message."""
        return self._message

    def failure(self, error: JSON) -> JSON:
        """The error itself."""
        return error

    def _reason(self, finished: Finished) -> str:
        if finished.reason == api.FINISH_REASON_STOP and finished.stop_text:
            return "stop_sequence"
        reason = _REASONS.get(finished.reason, "end_turn")
        is_full = finished.usage is not None and finished.usage.output_tokens < self._max_tokens
        return "model_context_window_exceeded" if reason == "max_tokens" and is_full else reason


def _delta(index: int, delta: JSON) -> JSON:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _content(block: Block, signature: str) -> JSON:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "thinking":
            return {"type": "thinking", "thinking": block.text, "signature": signature}
        case "call":
            return {
                "type": "tool_use",
                "id": block.id,
                "name": block.name,
                "input": _arguments(block.text),
            }


def _arguments(text: str) -> object:
    """The arguments of a call as far as the model wrote them."""
    try:
        found = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> JSON:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output_tokens,
    }
