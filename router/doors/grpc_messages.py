"""Outputs as messages of the gRPC API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from google.protobuf import duration_pb2

from baton.inference.v1 import inference_pb2 as api
from router.requests.outputs import Finished, Output, ShortWay, Started, TextDelta

if TYPE_CHECKING:
    from router.call import MessageWay
    from router.jobs import Job, TokenScore

_SCORES_A_TURN: Final = 64
"""Tokens of a prompt whose log probabilities are written in one callback."""


class Messages:
    """Makes the gRPC API's messages of one generation.

    Args:
        way: takes messages with tokens at once; None: there is no such way.
    """

    def __init__(self, way: MessageWay | None = None) -> None:
        self._way = way
        self._arrived_ns = 0
        self._first_token_ns = 0

    async def of(self, output: Output) -> api.StreamGenerateResponse:
        """The message for the next output to the client."""
        match output:
            case TextDelta():
                return self._of_delta(output)
            case Started(job):
                self._arrived_ns = job.arrived_ns
                message = _started_message(job, output)
                if job.prompt_logprobs:
                    await _add_scores(message.started, output.prompt_logprobs)
                return message
            case Finished():
                return _finished_message(output, self._first_token_ns - self._arrived_ns)

    @property
    def short_way(self) -> ShortWay | None:
        """The short way of this generation's tokens; None if there is none."""
        return None if self._way is None else self

    def take(self, delta: TextDelta) -> bool:
        """Sends a delta; see `ShortWay`."""
        assert self._way is not None
        return self._way.take(self._of_delta(delta).SerializeToString())

    def _of_delta(self, delta: TextDelta) -> api.StreamGenerateResponse:
        self._first_token_ns = self._first_token_ns or time.time_ns()
        return _delta_message(delta)


def _started_message(job: Job, started: Started) -> api.StreamGenerateResponse:
    message = api.GenerationStarted(
        dropped_keywords=started.dropped_keywords,
        ignored_fields=started.ignored_fields,
        generation_id=job.id,
        model=job.model.called,
        model_revision=job.model.revision,
        prompt_tokens=job.prompt_tokens,
        cached_prompt_tokens=started.cached_prompt_tokens,
    )
    return api.StreamGenerateResponse(started=message)


async def _add_scores(message: api.GenerationStarted, scores: Sequence[TokenScore]) -> None:
    """Adds those of a prompt. They are many, so they are written in several callbacks."""
    message.prompt_logprobs.add()  # The first token has none.
    for start in range(0, len(scores), _SCORES_A_TURN):
        message.prompt_logprobs.extend(_logprobs(scores[start : start + _SCORES_A_TURN]))
        await asyncio.sleep(0)


def _delta_message(delta: TextDelta) -> api.StreamGenerateResponse:
    response = api.StreamGenerateResponse()
    message = response.delta
    message.choice_index = delta.choice
    message.first_token_index = delta.first_index
    message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        message.logprobs.extend(_logprobs(delta.logprobs))
    text = "".join(delta.texts)
    if not delta.is_message:
        message.text = text
    elif text or delta.reasoning or delta.calls:
        message.message.content = text
        message.message.reasoning = "".join(delta.reasoning)
        for call in delta.calls:
            message.message.tool_calls.add(
                index=call.index, id=call.id, name=call.name, arguments=call.arguments
            )
    return response


def _finished_message(
    finished: Finished, time_to_first_token_ns: int
) -> api.StreamGenerateResponse:
    response = api.StreamGenerateResponse(
        finished=api.GenerationFinished(
            choice_index=finished.choice,
            finish_reason=finished.reason,
            stop_sequence=finished.stop_text,
            usage=finished.usage,
            score=finished.score,
        )
    )
    if (timings := finished.timings) is not None:
        message = response.finished.timings
        _set(message.queue, timings.queue_ns)
        _set(message.prefill, timings.prefill_ns)
        _set(message.kv_transfer, timings.kv_transfer_ns)
        _set(message.decode_queue, timings.decode_queue_ns)
        _set(message.decode, timings.decode_ns)
        _set(message.time_to_first_token, time_to_first_token_ns)
    return response


def _logprobs(records: Sequence[TokenScore]) -> list[api.TokenLogprobs]:
    return [
        api.TokenLogprobs(
            logprob=record.logprob,
            top=[
                api.TokenAlternative(token_id=token_id, logprob=logprob)
                for token_id, logprob in zip(record.top_ids, record.top_logprobs, strict=True)
            ],
        )
        for record in records
    ]


def _set(duration: duration_pb2.Duration, nanoseconds: int) -> None:
    duration.FromNanoseconds(max(nanoseconds, 0))
