"""One generation's output on its way to the client.

1. `ChoiceOutput` turns the tokens of one choice into `TextDelta`s: text, stop texts, log
   probabilities.
2. `OutputBuffer` holds the outputs that the client has not taken yet: one token a message while the
   client keeps up, merged ones while it does not, and an error once too much waits.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from router import errors
from router.answers.calls import CallDelta
from router.dispatch.stopping import ending_ids
from router.errors import Violation
from router.jobs import Job, JobTimings, JobTokens, TokenScore

if TYPE_CHECKING:
    from router.answers.detokenization import Detokenizer, StopTexts
    from router.answers.parser import Parts
    from router.answers.token_texts import ByteDetokenizer
    from router.structure.plan import AnswerPlan

FINISH_REASONS: Final = {
    worker_pb2.END_REASON_END_OF_SEQUENCE: api.FINISH_REASON_END_OF_SEQUENCE,
    worker_pb2.END_REASON_STOP_TOKEN: api.FINISH_REASON_STOP,
    worker_pb2.END_REASON_LENGTH: api.FINISH_REASON_LENGTH,
}
_OWN_END: Final = (api.FINISH_REASON_END_OF_SEQUENCE, api.FINISH_REASON_STOP)
"""Ends that the model chose."""

FINISH_WORDS: Final = {
    api.FINISH_REASON_END_OF_SEQUENCE: "stop",
    api.FINISH_REASON_STOP: "stop",
    api.FINISH_REASON_LENGTH: "length",
    api.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
"""Words for the end of a choice in OpenAI's API, spans and the access log."""


MOST_SCORES: Final = 1 << 21
"""Most of them, with those of alternatives. For a chat they take 336 bytes each before they are
written: 700 MB."""


class Started(NamedTuple):
    """The first token of a job is known."""

    job: Job
    cached_prompt_tokens: int
    prompt_logprobs: Sequence[TokenScore]
    """These two are the same as in `JobStarted`."""
    dropped_keywords: Sequence[str] = ()
    """JSON pointers of keywords of the schema that are not enforced."""
    ignored_fields: Sequence[str] = ()
    """Fields that have no effect with this model."""


@dataclass(slots=True)
class TextDelta:
    """New tokens of one choice, and the text that became complete with them."""

    choice: int
    first_index: int
    token_ids: list[int]
    texts: list[str]
    """If the answer is parsed, those of its content."""
    logprobs: list[TokenScore]
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    reasoning_tokens: int = 0
    is_message: bool = False
    """Whether the answer is parsed."""

    def extend(self, later: TextDelta) -> None:
        """Appends the tokens that follow these."""
        self.token_ids += later.token_ids
        self.texts += later.texts
        self.logprobs += later.logprobs
        self.reasoning += later.reasoning
        self.calls += later.calls
        self.reasoning_tokens += later.reasoning_tokens


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one choice; the last one's carries the totals."""

    choice: int
    reason: api.FinishReason.ValueType
    stop_text: str = ""
    usage: api.Usage | None = None
    timings: JobTimings | None = None
    score: float | None = None
    """What it was chosen by, where choices are (`router.requests.selecting`)."""
    dropped_tokens: int = 0
    """On the last one: tokens of choices that are not returned. `usage` counts them."""


Output = Started | TextDelta | Finished


class ChoiceOutput:
    """Output of one choice. It has every generated token. Its text leaves out the stop text.

    `push` sets `num_tokens`, and `stop_text` once a stop text is found, or once the only call that
    is allowed is complete. Nothing may follow after that.
    """

    def __init__(
        self,
        choice: int,
        job: Job,
        detokenizer: Detokenizer | ByteDetokenizer | None,
        stop_texts: StopTexts | None,
        generation: api.GenerationInput,
        plan: AnswerPlan,
        hidden_names: Mapping[int, str],
    ) -> None:
        """Output without tokens. `hidden_names`: special tokens whose names stand in a stop text
        and are not shown."""
        self.choice = choice
        self.num_tokens = 0
        self.reasoning_tokens = 0
        self.stop_text: str | None = None
        self.ended = False
        self._detokenizer = detokenizer
        self._stop_texts = stop_texts
        self._hidden_names = hidden_names
        self._omit_text = generation.output.omit_text
        self._min_tokens = job.stopping.min_tokens
        ending = ending_ids(job.stopping, job.model.eos_token_ids)
        self._silent_ids = frozenset() if generation.stop.include_stop else ending
        self._plan = plan
        self._parser = plan.parser()

    def push(self, event: JobTokens) -> TextDelta:
        """Takes new tokens, up to the one that completes a stop text. What was held back follows
        that one at once."""
        if event.first_index != self.num_tokens:
            raise RuntimeError("tokens are missing or doubled")
        delta = self._delta()
        for token_id in event.token_ids:
            self.num_tokens += 1
            self._add(delta, self._text(token_id))
            if self.stop_text is not None:
                break
        count = self.num_tokens - event.first_index
        delta.token_ids += event.token_ids[:count]
        delta.logprobs += event.logprobs[:count]
        if self.stop_text is not None and (rest := self.rest(api.FINISH_REASON_STOP)) is not None:
            delta.extend(rest)  # one message on either way to the client
        return delta

    def rest(self, ended_by: api.FinishReason.ValueType) -> TextDelta | None:
        """The text still held back when the choice has ended, as a delta without tokens."""
        text = self._stop_texts.finish() if self._stop_texts is not None else ""
        if self._detokenizer is not None and self.stop_text is None:
            text += self._detokenizer.finish()
        delta = self._delta()
        if self._parser is not None:
            self._take(delta, self._parser.push(text))
            is_cut = ended_by == api.FINISH_REASON_LENGTH
            self._take(delta, self._parser.finish(is_cut=is_cut))
        elif text and not self._omit_text:
            delta.texts.append(text)
        return delta if delta.texts or delta.reasoning or delta.calls else None

    def reason(self, ended_by: api.FinishReason.ValueType) -> api.FinishReason.ValueType:
        """Why the choice ended: with calls, if the model ended it and has made any."""
        called = self._parser is not None and self._parser.calls_begun
        return api.FINISH_REASON_TOOL_CALLS if called and ended_by in _OWN_END else ended_by

    def _delta(self) -> TextDelta:
        is_message = self._plan.is_message
        return TextDelta(self.choice, self.num_tokens, [], [], [], is_message=is_message)

    def _add(self, delta: TextDelta, text: str) -> None:
        """Adds the text of one token."""
        if self._parser is None:
            if text:
                delta.texts.append(text)
            return
        if text:
            self._take(delta, self._parser.push(text))
        if self._parser.thinking:
            self.reasoning_tokens += 1
            delta.reasoning_tokens += 1
        if self._plan.one_call and self._parser.calls_complete and self.stop_text is None:
            self.stop_text = ""

    def _take(self, delta: TextDelta, parts: Parts) -> None:
        if parts.content:
            delta.texts.append(parts.content)
        if parts.reasoning and not self._plan.omit_reasoning:
            delta.reasoning.append(parts.reasoning)
        delta.calls += parts.calls

    def _text(self, token_id: int) -> str:
        if self._detokenizer is None:
            return ""
        may_stop = self.num_tokens >= self._min_tokens
        if self._stop_texts is not None and (name := self._hidden_names.get(token_id)):
            text, self.stop_text = self._stop_texts.push(name, may_stop, hidden=True)
            return "" if self._omit_text else text
        if may_stop and token_id in self._silent_ids:
            return ""
        text = self._detokenizer.push(token_id)
        if self._stop_texts is not None:
            text, self.stop_text = self._stop_texts.push(text, may_stop)
        return "" if self._omit_text else text


def check_scores(
    request: api.GenerateRequest | api.StreamGenerateRequest, job: Job, others: int = 0
) -> int:
    """Counts the log probabilities that an answer holds at once, with those of alternatives: those
    of the prompt, and, where the answer is whole, those of all tokens that may come. `others` are
    those of its other prompts.

    Raises:
        RouterError: INVALID_FIELD, they are too many.
    """
    each = 1 + request.input.output.top_logprobs
    count = others + _prompt_scores(request, job)
    if _is_held(request):
        count += job.choices * job.stopping.max_tokens * each
    if count > MOST_SCORES:
        rule = (
            f"an answer holds at most {MOST_SCORES} of them with those of alternatives: of its "
            "prompts, and of all max_tokens of its choices unless it is a stream"
        )
        raise errors.invalid_fields([Violation("input.output.logprobs", rule)])
    return count


def most_scored(request: api.GenerateRequest | api.StreamGenerateRequest, job: Job) -> int:
    """How many tokens each choice may have for `check_scores`."""
    if not _is_held(request):
        return job.stopping.max_tokens
    each = job.choices * (1 + request.input.output.top_logprobs)
    return (MOST_SCORES - _prompt_scores(request, job)) // each


def _prompt_scores(request: api.GenerateRequest | api.StreamGenerateRequest, job: Job) -> int:
    output = request.input.output
    return job.prompt_tokens * (1 + output.top_logprobs) if output.prompt_logprobs else 0


def _is_held(request: api.GenerateRequest | api.StreamGenerateRequest) -> bool:
    """Whether the log probabilities of all tokens wait for the end of the answer."""
    return request.input.output.logprobs and isinstance(request, api.GenerateRequest)


class ShortWay(Protocol):
    """Takes tokens to the client at once (`router.doors.straight`)."""

    def take(self, delta: TextDelta) -> bool:
        """Sends a delta now; False if it must go the usual way. The reader waits meanwhile, and has
        sent all that it took."""
        ...


class OutputBuffer:
    """Outputs that wait for the client. It has one writer, which never waits, and one reader.

    A delta that comes while the reader waits is offered to the short way first. If messages have a
    least time between them, the reader gets tokens only when that has passed since it had all.

    Invariants: outputs leave in the order in which they came, those of one choice without gap; at
    most `max_tokens` tokens wait; nothing is taken after an error.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        whole: bool = False,
        short_way: ShortWay | None = None,
        min_message_s: float = 0.0,
    ) -> None:
        """An empty buffer. `whole`: the reader needs no tokens before their choice has ended, so
        tokens do not wake it. This saves half of a token's cost."""
        self._max_tokens = max_tokens
        self._short_way = None if min_message_s else short_way
        self._min_message_s = min_message_s
        self._due_s = -math.inf
        """When tokens may leave, by the loop's clock."""
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
            if self._short_way is not None and self._is_awaited() and self._short_way.take(output):
                self._tokens_taken += len(output.token_ids)
                return
            self._put_delta(output)
            if self._whole:
                return
            if (rest_s := self._rest_s()) > 0:
                self._wake_after(rest_s)
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
        while (rest_s := self._rest_s()) > 0 or not self._waiting:
            if self._waiting:
                self._wake_after(rest_s)
            elif self._error is not None:
                raise self._error
            elif self._closed:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        output = self._waiting.popleft()
        if isinstance(output, TextDelta):
            del self._open_deltas[output.choice]
            self._tokens_waiting -= len(output.token_ids)
            self._tokens_taken += len(output.token_ids)
            if self._min_message_s and not self._waiting:
                self._due_s = asyncio.get_running_loop().time() + self._min_message_s
        return output

    def _rest_s(self) -> float:
        """Time until the waiting tokens may leave; 0 if anything else waits behind them."""
        is_urgent = self._closed or len(self._waiting) > len(self._open_deltas)
        if not self._min_message_s or is_urgent:
            return 0.0
        return self._due_s - asyncio.get_running_loop().time()

    def _is_awaited(self) -> bool:
        """Whether the reader waits, and nothing is on its way to it."""
        return self._reader is not None and not self._reader.done() and not self._waiting

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_after(self, rest_s: float) -> None:
        asyncio.get_running_loop().call_later(rest_s, self._wake)

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
