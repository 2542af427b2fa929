"""Results of a generation; checks the events of a stream and gathers its result.

The life of a stream: `started`, then deltas of every choice, one `finished` for each choice, then
OK. `Gathering` checks that grammar event by event and raises `ProtocolError` if it is broken. For
each choice, the tokens seen so far are exactly [0, n), in order: a delta must begin at n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from baton.errors import ProtocolError
from baton.inference.v1 import inference_pb2 as pb


class FinishReason(StrEnum):
    """Reason for the end of a choice."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position; `top` is (id, log probability), likeliest first."""

    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function, or in a delta a part of one: the first part has id and name."""

    index: int
    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice and the text that became complete with them."""

    text: str
    """If the answer is parsed, its content only."""
    token_ids: tuple[int, ...]
    choice: int = 0
    first_token_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all choices."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Output tokens spent on thinking, if the answer is parsed."""
    loaded_prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """Cached tokens that were loaded from below the GPU's memory for this request, by
    where from: `host` or the name of a store."""
    accepted_draft_tokens: int = 0
    """Output tokens that were drafts first (speculative decoding)."""
    rejected_draft_tokens: int = 0
    """Drafts that were not the tokens drawn."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of a request's parts, seconds, as the servers measured them."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    kv_transfer_s: float = 0.0
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
    time_to_first_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole choice."""

    text: str
    """If the answer is parsed, its content only."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_sequence: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    score: float | None = None
    """What it was chosen by: of a beam search its score, of `best_of` its mean log probability."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request. `text`, `token_ids` and `finish_reason` are the first choice's."""

    choices: tuple[Completion, ...]
    usage: Usage
    timings: Timings
    trace_id: str
    model: str
    model_revision: str
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    dropped_keywords: tuple[str, ...] = ()
    """JSON pointers of keywords of the schema that were not enforced."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Reason for the end of the first choice."""
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the router serves."""

    name: str
    revision: str
    max_context_tokens: int
    max_output_tokens: int
    has_tokenizer: bool
    parent: str = ""
    """An adapter: the model that it changes; empty for models."""
    digest: str = ""
    """An adapter: SHA-256 of its content, in hexadecimal; empty for models."""


_REASONS = {
    pb.FINISH_REASON_END_OF_SEQUENCE: FinishReason.END_OF_SEQUENCE,
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}


@dataclass(slots=True)
class _Growing:
    """A choice that is being received."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Completion | None = None


class Gathering:
    """Checks one generation's events and puts the result together."""

    def __init__(self, choices: int = 1) -> None:
        self._started: pb.GenerationStarted | None = None
        self._choices = [_Growing() for _ in range(choices)]
        self._usage = Usage()
        self._timings = Timings()

    @property
    def trace_id(self) -> str:
        """Trace id of the request; "" before the first event."""
        return self._started.generation_id if self._started else ""

    def add(self, event: pb.StreamGenerateResponse) -> Delta | None:
        """Takes the next event. Returns its delta if it has one.

        Raises:
            ProtocolError: the event is not allowed at this point.
        """
        match event.WhichOneof("event"):
            case "started":
                self._start(event.started)
            case "delta":
                return self._extend(event.delta)
            case "finished":
                ended = event.finished
                self._finish(ended.choice_index, ended)
                if ended.HasField("usage"):
                    self._close(ended.usage, ended.timings)
            case _:
                raise ProtocolError("an event of the stream is empty")
        return None

    def add_whole(self, response: pb.GenerateResponse) -> Generation:
        """Takes the answer of the unary call.

        Raises:
            ProtocolError: a choice is missing, doubled or does not begin at token 0.
        """
        self._start(response.started)
        for choice in response.choices:
            if choice.HasField("message"):
                choice.output.message.CopyFrom(_whole_delta(choice.message))
            self._extend(choice.output, of=choice.index)
            self._finish(choice.index, choice)
        self._close(response.usage, response.timings)
        return self.result()

    def result(self) -> Generation:
        """Returns the whole generation.

        Raises:
            ProtocolError: the generation is not complete.
        """
        finished = tuple(choice.finished for choice in self._choices if choice.finished)
        if self._started is None or len(finished) != len(self._choices):
            raise ProtocolError("the stream ended before every choice was finished")
        return Generation(
            choices=finished,
            usage=self._usage,
            timings=self._timings,
            trace_id=self._started.generation_id,
            model=self._started.model,
            model_revision=self._started.model_revision,
            prompt_logprobs=tuple(map(_logprobs, self._started.prompt_logprobs)),
            dropped_keywords=tuple(self._started.dropped_keywords),
        )

    def _start(self, started: pb.GenerationStarted) -> None:
        if self._started is not None:
            raise ProtocolError("the stream started twice")
        self._started = started

    def _extend(self, delta: pb.TokenDelta, of: int | None = None) -> Delta:
        index = delta.choice_index if of is None else of
        choice = self._running(index)
        if delta.first_token_index != len(choice.token_ids):
            raise ProtocolError(
                f"choice {index} went on at token {delta.first_token_index}, "
                f"not at {len(choice.token_ids)}"
            )
        logprobs = tuple(map(_logprobs, delta.logprobs))
        text, reasoning = delta.text or delta.message.content, delta.message.reasoning
        calls = tuple(
            ToolCall(call.index, call.id, call.name, call.arguments)
            for call in delta.message.tool_calls
        )
        choice.texts.append(text)
        choice.reasoning.append(reasoning)
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(logprobs)
        for call in calls:
            begun = choice.calls.get(call.index)
            whole = call.arguments if begun is None else begun.arguments + call.arguments
            choice.calls[call.index] = replace(begun or call, arguments=whole)
        first = delta.first_token_index
        return Delta(text, tuple(delta.token_ids), index, first, logprobs, reasoning, calls)

    def _finish(self, index: int, end: pb.GenerationFinished | pb.Choice) -> None:
        choice = self._running(index)
        if end.finish_reason not in _REASONS:
            raise ProtocolError(f"choice {index} ended without a reason")
        choice.finished = Completion(
            text="".join(choice.texts),
            token_ids=tuple(choice.token_ids),
            finish_reason=_REASONS[end.finish_reason],
            stop_sequence=end.stop_sequence,
            logprobs=tuple(choice.logprobs),
            reasoning="".join(choice.reasoning),
            tool_calls=tuple(choice.calls.values()),
            score=end.score if end.HasField("score") else None,
        )

    def _running(self, index: int) -> _Growing:
        if self._started is None:
            raise ProtocolError("the stream did not begin with `started`")
        if index >= len(self._choices) or self._choices[index].finished:
            raise ProtocolError(f"choice {index} is unknown or has ended")
        return self._choices[index]

    def _close(self, usage: pb.Usage, timings: pb.Timings) -> None:
        self._usage = Usage(
            usage.prompt_tokens,
            usage.cached_prompt_tokens,
            usage.output_tokens,
            usage.reasoning_tokens,
            dict(usage.loaded_prompt_tokens),
            usage.accepted_draft_tokens,
            usage.rejected_draft_tokens,
        )
        self._timings = Timings(
            queue_s=timings.queue.ToNanoseconds() / 1e9,
            prefill_s=timings.prefill.ToNanoseconds() / 1e9,
            kv_transfer_s=timings.kv_transfer.ToNanoseconds() / 1e9,
            decode_queue_s=timings.decode_queue.ToNanoseconds() / 1e9,
            decode_s=timings.decode.ToNanoseconds() / 1e9,
            time_to_first_token_s=timings.time_to_first_token.ToNanoseconds() / 1e9,
        )


def _whole_delta(message: pb.ChatMessage) -> pb.MessageDelta:
    """A whole message as its only delta."""
    calls = [
        pb.ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
        for index, call in enumerate(message.tool_calls)
    ]
    return pb.MessageDelta(content=message.content, reasoning=message.reasoning, tool_calls=calls)


def _logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple((item.token_id, item.logprob) for item in message.top),
    )
