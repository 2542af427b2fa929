"""One generation's output on its way to the client.

1. `ChoiceOutput` turns the tokens of one choice into `TextDelta`s: text, stop texts, log
   probabilities.
2. `OutputBuffer` holds the outputs that the client has not taken yet: one token a message while the
   client keeps up, merged ones while it does not, and an error once too much waits.
3. `Messages` turns the outputs into messages of the gRPC API.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from google.protobuf import duration_pb2

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from router import errors
from router.jobs import Job, JobTimings, JobTokens, TokenScore

if TYPE_CHECKING:
    from router.requests.detokenization import Detokenizer, StopTexts

FINISH_REASONS: Final = {
    worker_pb2.END_REASON_END_OF_SEQUENCE: api.FINISH_REASON_END_OF_SEQUENCE,
    worker_pb2.END_REASON_STOP_TOKEN: api.FINISH_REASON_STOP,
    worker_pb2.END_REASON_LENGTH: api.FINISH_REASON_LENGTH,
}

FINISH_WORDS: Final = {
    api.FINISH_REASON_END_OF_SEQUENCE: "stop",
    api.FINISH_REASON_STOP: "stop",
    api.FINISH_REASON_LENGTH: "length",
}
"""Words for the end of a choice in OpenAI's API, spans and the access log."""


class Started(NamedTuple):
    """The first token of a job is known."""

    job: Job
    cached_prompt_tokens: int
    prompt_logprobs: Sequence[TokenScore]
    """The same as in `JobStarted`."""


@dataclass(slots=True)
class TextDelta:
    """New tokens of one choice, and the text that became complete with them."""

    choice: int
    first_index: int
    token_ids: list[int]
    texts: list[str]
    logprobs: list[TokenScore]

    def extend(self, later: TextDelta) -> None:
        """Appends the tokens that follow these."""
        self.token_ids += later.token_ids
        self.texts += later.texts
        self.logprobs += later.logprobs


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one choice; the last one's carries the totals."""

    choice: int
    reason: api.FinishReason.ValueType
    stop_text: str = ""
    usage: api.Usage | None = None
    timings: JobTimings | None = None


Output = Started | TextDelta | Finished


class ChoiceOutput:
    """Output of one choice. It has every generated token. Its text leaves out the stop text.

    `push` sets `num_tokens`, and `stop_text` once a stop text is found. Nothing may follow after
    that.
    """

    def __init__(
        self,
        choice: int,
        job: Job,
        detokenizer: Detokenizer | None,
        stop_texts: StopTexts | None,
        output: api.OutputOptions,
        include_stop: bool,
    ) -> None:
        self.choice = choice
        self.num_tokens = 0
        self.stop_text: str | None = None
        self.ended = False
        self._detokenizer = detokenizer
        self._stop_texts = stop_texts
        self._omit_text = output.omit_text
        self._min_tokens = job.stopping.min_tokens
        self._silent_ids = frozenset() if include_stop else _ending_ids(job)

    def push(self, event: JobTokens) -> TextDelta:
        """Takes new tokens, up to the one that completes a stop text."""
        if event.first_index != self.num_tokens:
            raise RuntimeError("tokens are missing or doubled")
        texts = []
        for token_id in event.token_ids:
            self.num_tokens += 1
            if text := self._text(token_id):
                texts.append(text)
            if self.stop_text is not None:
                break
        count = self.num_tokens - event.first_index
        token_ids, logprobs = list(event.token_ids[:count]), list(event.logprobs[:count])
        return TextDelta(self.choice, event.first_index, token_ids, texts, logprobs)

    def rest(self) -> TextDelta | None:
        """The text still held back when the choice has ended, as a delta without tokens."""
        text = self._stop_texts.finish() if self._stop_texts is not None else ""
        if self._detokenizer is not None and self.stop_text is None:
            text += self._detokenizer.finish()
        if not text or self._omit_text:
            return None
        return TextDelta(self.choice, self.num_tokens, [], [text], [])

    def _text(self, token_id: int) -> str:
        if self._detokenizer is None:
            return ""
        may_stop = self.num_tokens >= self._min_tokens
        if may_stop and token_id in self._silent_ids:
            return ""
        text = self._detokenizer.push(token_id)
        if self._stop_texts is not None:
            text, self.stop_text = self._stop_texts.push(text, may_stop)
        return "" if self._omit_text else text


def _ending_ids(job: Job) -> frozenset[int]:
    """Tokens that end a choice after `min_tokens`."""
    ids = frozenset(job.stopping.token_ids)
    return ids if job.stopping.ignore_eos else ids.union(job.model.eos_token_ids)


class OutputBuffer:
    """Outputs that wait for the client. It has one writer, which never waits, and one reader.

    Invariants: outputs leave in the order in which they came, those of one choice without gap; at
    most `max_tokens` tokens wait; nothing is taken after an error.
    """

    def __init__(self, max_tokens: int, *, whole: bool = False) -> None:
        """An empty buffer. `whole`: the reader needs no tokens before their choice has ended, so
        tokens do not wake it. This saves half of a token's cost."""
        self._max_tokens = max_tokens
        self._whole = whole
        self._waiting: deque[Output] = deque()
        self._open_deltas: dict[int, TextDelta] = {}
        self._tokens_waiting = 0
        self._tokens_taken = 0
        self._closed = False
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None
        """The future for which the reader waits, or last waited."""

    @property
    def tokens_put(self) -> int:
        """Tokens of all choices so far."""
        return self._tokens_taken + self._tokens_waiting

    def put(self, output: Output) -> None:
        """Adds an output. Merges it with a waiting one of the same choice.

        Raises:
            RouterError: READER_TOO_SLOW.
        """
        if isinstance(output, TextDelta):
            self._put_delta(output)
            if self._whole:
                return
        else:
            self._waiting.append(output)
        self._wake()

    def close(self, error: BaseException | None = None) -> None:
        """Nothing follows. The reader gets the error after all waiting outputs."""
        self._closed, self._error = True, error
        self._wake()

    async def take(self) -> Output | None:
        """The next output; None at the end.

        Raises:
            BaseException: the error given to `close`.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._closed:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        output = self._waiting.popleft()
        if isinstance(output, TextDelta):
            del self._open_deltas[output.choice]
            self._tokens_waiting -= len(output.token_ids)
            self._tokens_taken += len(output.token_ids)
        return output

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _put_delta(self, delta: TextDelta) -> None:
        waiting = self._tokens_waiting + len(delta.token_ids)
        if waiting > self._max_tokens:
            self._waiting.clear()
            self._open_deltas.clear()
            raise errors.reader_too_slow(self._tokens_taken, waiting)
        self._tokens_waiting = waiting
        if (earlier := self._open_deltas.get(delta.choice)) is not None:
            earlier.extend(delta)
        else:
            self._waiting.append(delta)
            self._open_deltas[delta.choice] = delta


class Messages:
    """Makes the gRPC API's messages of one generation."""

    def __init__(self) -> None:
        self._arrived_ns = 0
        self._first_token_ns = 0

    def of(self, output: Output) -> api.StreamGenerateResponse:
        """The message for the next output to the client."""
        match output:
            case TextDelta():
                self._first_token_ns = self._first_token_ns or time.time_ns()
                return _delta_message(output)
            case Started(job):
                self._arrived_ns = job.arrived_ns
                return _started_message(job, output)
            case Finished():
                return _finished_message(output, self._first_token_ns - self._arrived_ns)


def _started_message(job: Job, started: Started) -> api.StreamGenerateResponse:
    message = api.GenerationStarted(
        generation_id=job.id,
        model=job.model.name,
        model_revision=job.model.revision,
        prompt_tokens=job.prompt_tokens,
        cached_prompt_tokens=started.cached_prompt_tokens,
    )
    if job.prompt_logprobs:
        message.prompt_logprobs.add()  # The first token has none.
        message.prompt_logprobs.extend(_logprobs(started.prompt_logprobs))
    return api.StreamGenerateResponse(started=message)


def _delta_message(delta: TextDelta) -> api.StreamGenerateResponse:
    return api.StreamGenerateResponse(
        delta=api.TokenDelta(
            choice_index=delta.choice,
            first_token_index=delta.first_index,
            token_ids=delta.token_ids,
            text="".join(delta.texts),
            logprobs=_logprobs(delta.logprobs),
        )
    )


def _finished_message(
    finished: Finished, time_to_first_token_ns: int
) -> api.StreamGenerateResponse:
    message = api.GenerationFinished(
        choice_index=finished.choice,
        finish_reason=finished.reason,
        stop_sequence=finished.stop_text,
        usage=finished.usage,
    )
    if (timings := finished.timings) is not None:
        message.timings.CopyFrom(
            api.Timings(
                queue=_duration(timings.queue_ns),
                prefill=_duration(timings.prefill_ns),
                kv_transfer=_duration(timings.kv_transfer_ns),
                decode_queue=_duration(timings.decode_queue_ns),
                decode=_duration(timings.decode_ns),
                time_to_first_token=_duration(time_to_first_token_ns),
            )
        )
    return api.StreamGenerateResponse(finished=message)


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


def _duration(nanoseconds: int) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(max(nanoseconds, 0))
    return duration
