"""Answers a request: runs its generations, one for each prompt, and joins what they give.

Choice `c` of prompt `p` is the reply's choice `p * n + c`. All generations run at once. If one
fails, or the caller leaves, the others end. The result is a series of `ReplyDelta`s, in order
within each choice. `Reply.whole` joins them. `Reply.chunks` sends each on as it comes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from baton.inference.v1 import inference_pb2 as api
from router.answers.calls import CallDelta
from router.answers.detokenization import CONTEXT_TOKENS
from router.doors.http.block_reply import of_prompt, renamed
from router.doors.http.statuses import JSON, chat_name, dropped_header, ignored_header
from router.doors.merging import merged
from router.doors.openai.logprobs import ScoredToken, Scorer, extend, written
from router.doors.openai.schema import served_tier
from router.doors.straight import MARK, Straight, Template, text_of
from router.requests.outputs import (
    FINISH_WORDS,
    Finished,
    Output,
    Started,
    TextDelta,
    check_scores,
)

if TYPE_CHECKING:
    from router.call import Call
    from router.doors.openai.schema import StreamOptions
    from router.jobs import TokenScore
    from router.requests.generation import GenerationRequest, Generations
    from router.requests.tokenization import PromptIds, Tokenizer


@dataclass(slots=True)
class ReplyDelta:
    """What one output adds to one choice of a reply."""

    choice: int
    texts: list[str]
    scored: JSON | None = None
    """Log probabilities in the API's form, if the request asks for them."""
    finish_reason: str | None = None
    first: bool = False
    """Whether it is the first delta of its choice."""
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    token_ids: list[int] | None = None
    """If the request asks for them."""
    extra: JSON = field(default_factory=dict)
    """Further fields of its choice."""

    @property
    def text(self) -> str:
        """Its whole text."""
        return "".join(self.texts)

    def extend(self, later: ReplyDelta) -> None:
        """Appends a later delta."""
        self.texts += later.texts
        if self.scored is not None and later.scored is not None:
            extend(self.scored, later.scored)
        self.reasoning += later.reasoning
        self.calls += later.calls
        if self.token_ids is not None and later.token_ids is not None:
            self.token_ids += later.token_ids
        self.finish_reason = later.finish_reason


_Scored = tuple[ReplyDelta, Iterator[ScoredToken] | None]
"""A delta, and its log probabilities, which are not written yet."""


class Form(Protocol):
    """The form in which one of the API's methods writes a reply."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def choice(self, delta: ReplyDelta) -> JSON:
        """A whole choice."""
        ...

    def delta(self, delta: ReplyDelta) -> JSON:
        """What is new of a choice, in a stream."""
        ...

    def scores(self, tokens: Sequence[ScoredToken]) -> JSON:
        """Log probabilities, in lists by token."""
        ...

    def prompt_ids(self, token_ids: list[int]) -> tuple[JSON, JSON]:
        """Fields for a prompt's ids: of the answer, and of each of the prompt's choices."""
        ...


class Echo(NamedTuple):
    """The prompt, echoed before the output."""

    text: str
    token_ids: Sequence[int] = ()
    """The prompt's ids, if its log probabilities are wanted."""


@dataclass(frozen=True, slots=True)
class ReplyOrder:
    """The contents of a reply."""

    requests: Sequence[GenerationRequest]
    """One for each prompt; they differ only in the prompt."""
    form: Form
    stream_options: StreamOptions
    echoes: Sequence[Echo | None]
    """One for each prompt."""
    tokenizer: Tokenizer | None = None
    """Gives the text of tokens beside log probabilities."""
    tokens_as_ids: bool = False
    echo_only: bool = False
    """Whether only the prompt is wanted. The one token that is generated then is left out."""
    token_ids: bool = False
    """Whether the ids of prompts and outputs are wanted."""
    service_tier: str | None = None
    """The tier that the request names."""
    ignored: Sequence[str] = ()
    """Fields of the request that have no effect."""
    name_of: Callable[[str], str] = chat_name
    """The request's name for a field of `inference.proto`."""

    @property
    def stream(self) -> bool:
        """Whether the caller wants chunks."""
        return isinstance(self.requests[0], api.StreamGenerateRequest)

    @property
    def may_go_straight(self) -> bool:
        """Whether chunks with text differ in nothing but it, and go out as their tokens come."""
        return (
            self.stream
            and len(self.requests) == 1
            and not (self.token_ids or self.echo_only)
            and not self.requests[0].input.output.logprobs
            and not self.stream_options.continuous_usage_stats
        )


class Reply:
    """The answer to one request; `whole` or `chunks` is called once."""

    def __init__(self, generations: Generations, order: ReplyOrder, call: Call) -> None:
        self.stream = order.stream
        self._order = order
        self._call = call
        self._choices_per_prompt = order.requests[0].input.choices or 1
        self.straight: Straight | None = None
        short_way = self if order.may_go_straight else None
        self._streams = [generations.stream(one, call, short_way) for one in order.requests]
        if len(self._streams) > 1:
            self._streams = [of_prompt(*one) for one in enumerate(self._streams)]
        self._templates: dict[tuple[int, str], Template] = {}
        """Templates of a choice's events with text of a kind."""
        self._choices: dict[int, _Choice] = {}
        """Choices by index in the reply. They are added when their prompt's generation starts."""
        self._usage = _Usage()
        self._scores = 0
        """Log probabilities that are held at once."""
        self._head: JSON = {}
        self._id = call.answer_id(f"{order.form.id_prefix}-")
        self.headers: dict[str, str] = ignored_header(order.ignored)
        """Headers of the answer, known when its first delta is."""

    async def whole(self) -> JSON:
        """The reply in one object.

        Raises:
            RouterError: the reply failed.
        """
        whole: dict[int, ReplyDelta] = {}
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                if (earlier := whole.get(delta.choice)) is not None:
                    earlier.extend(delta)
                else:
                    whole[delta.choice] = delta
        form = self._order.form
        choices = [{**form.choice(delta), **delta.extra} for _, delta in sorted(whole.items())]
        return {**self._head, "choices": choices, "usage": self._usage.json()}

    async def chunks(self) -> AsyncGenerator[JSON, None]:
        """The reply as it comes.

        Raises:
            RouterError: the reply is incomplete.
        """
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                yield self._chunk(delta)
        if self._order.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage.json()}

    def take(self, delta: TextDelta) -> bool:
        """Sends a delta that only adds text to a choice that has begun; see `ShortWay`."""
        straight, found = self.straight, text_of(delta)
        if straight is None or found is None or not straight.is_free():
            return False
        kind, text = found
        template = self._templates.get((delta.choice, kind))
        template = template or self._template(delta.choice, kind, straight)
        if template is None:
            return False
        self._count(delta)
        straight.write(template.event(text, 0), time.monotonic())
        return True

    def _template(self, choice: int, kind: str, straight: Straight) -> Template | None:
        if not self._choices[choice].begun:
            return None
        delta = ReplyDelta(choice, [MARK] if kind == "text" else [])
        delta.reasoning = [MARK] if kind == "thinking" else []
        template = Template(straight.frame(self._chunk(delta)))
        self._templates[choice, kind] = template
        return template

    def _chunk(self, delta: ReplyDelta) -> JSON:
        options = self._order.stream_options
        choice = {**self._order.form.delta(delta), **delta.extra}
        chunk: JSON = {**self._head, "choices": [choice]}
        if options.include_usage:
            chunk["usage"] = self._usage.json() if options.continuous_usage_stats else None
        return chunk

    def _count(self, delta: TextDelta) -> None:
        self._usage.output_tokens += len(delta.token_ids)
        self._usage.reasoning_tokens += delta.reasoning_tokens

    def failure(self, error: JSON) -> JSON:
        """The error itself."""
        return error

    async def _deltas(self) -> AsyncGenerator[ReplyDelta, None]:
        with renamed(self._order.name_of):
            async with aclosing(merged(self._streams)) as outputs:
                async for prompt, output in outputs:
                    for delta, scores in self._take(prompt, output):
                        if scores is not None:
                            delta.scored = await written(scores, self._order.form.scores)
                        yield delta

    def _take(self, prompt: int, output: Output) -> Iterable[_Scored]:
        """The deltas that one output of a prompt's generation makes."""
        first = prompt * self._choices_per_prompt
        match output:
            case TextDelta() if self._order.echo_only:
                return []
            case TextDelta():
                self._count(output)
                return [self._choices[first + output.choice].add(output)]
            case Started():
                return self._start(prompt, output)
            case Finished():
                if output.usage is not None:
                    self._usage.output_tokens += output.dropped_tokens
                    self._usage.cached_tokens += output.usage.cached_prompt_tokens
                    self._usage.loaded_tokens.update(output.usage.loaded_prompt_tokens)
                    self._usage.accepted_drafts += output.usage.accepted_draft_tokens
                    self._usage.rejected_drafts += output.usage.rejected_draft_tokens
                return [(self._choices[first + output.choice].finish(output), None)]

    def _start(self, prompt: int, started: Started) -> Iterable[_Scored]:
        """Notes the start of a prompt's generation; returns the deltas that echo the prompt."""
        self._scores = check_scores(self._order.requests[prompt], started.job, self._scores)
        self._usage.prompt_tokens += started.job.prompt_tokens
        echo = self._order.echoes[prompt]
        form = self._order.form
        self._head = {
            "id": self._id,
            "object": form.chunk_object if self.stream else form.whole_object,
            "created": self._call.arrived_ns // 1_000_000_000,
            "model": started.job.model.called,
            "system_fingerprint": started.job.model.revision or None,
        }
        if self._order.service_tier is not None:
            self._head["service_tier"] = served_tier(self._order.service_tier)
        self.headers |= dropped_header(started.dropped_keywords)
        of_model = map(self._order.name_of, started.ignored_fields)
        self.headers |= ignored_header([*self._order.ignored, *of_model])
        first = prompt * self._choices_per_prompt
        indices = range(first, first + self._choices_per_prompt)
        new = [_Choice(index, self._order, started.job.prompt_ids, echo) for index in indices]
        self._choices.update({choice.index: choice for choice in new})
        if self._order.token_ids:
            of_answer, of_choice = form.prompt_ids(started.job.prompt_ids.tolist())
            self._head |= of_answer
            for choice in new:
                choice.extra = of_choice
        if echo is None:
            return []
        return [choice.echo(echo, started.prompt_logprobs) for choice in new]


class _Choice:
    """One choice of a reply, while its deltas come."""

    def __init__(
        self, index: int, order: ReplyOrder, prompt_ids: PromptIds, echo: Echo | None
    ) -> None:
        self.index = index
        self.extra: JSON = {}
        """Further fields of its first delta."""
        self._token_ids = order.token_ids
        self.begun = False
        self._echo_only = order.echo_only
        self._scorer: Scorer | None = None
        output = order.requests[0].input.output
        if output.logprobs:
            shows_special = (
                output.HasField("skip_special_tokens") and not output.skip_special_tokens
            )
            self._scorer = Scorer(
                order.tokenizer,
                as_ids=order.tokens_as_ids,
                shows_special=shows_special,
                prompt_ids=prompt_ids[-CONTEXT_TOKENS:].tolist() if echo is None else (),
            )

    def echo(self, echo: Echo, records: Sequence[TokenScore]) -> _Scored:
        """The prompt. Its first token has no log probability."""
        delta, scores = self._begun([echo.text]), None
        if self._scorer is not None:
            scores = self._scorer.score(echo.token_ids, [None, *records], echo.text)
        return delta, scores

    def add(self, delta: TextDelta) -> _Scored:
        """New tokens. Tokens without text make one, too, since clients count and time them."""
        made = self._begun(delta.texts)
        made.reasoning, made.calls = delta.reasoning, delta.calls
        if self._token_ids:
            made.token_ids = [*delta.token_ids]
        scores = None
        if self._scorer is not None:
            scores = self._scorer.score(delta.token_ids, delta.logprobs)
        return made, scores

    def finish(self, finished: Finished) -> ReplyDelta:
        """The end."""
        delta = self._begun([])
        reason = api.FINISH_REASON_LENGTH if self._echo_only else finished.reason
        delta.finish_reason = FINISH_WORDS[reason]
        return delta

    def _begun(self, texts: list[str]) -> ReplyDelta:
        first, self.begun = not self.begun, True
        delta = ReplyDelta(self.index, texts, first=first, extra=self.extra if first else {})
        delta.token_ids = [] if self._token_ids else None
        return delta


@dataclass(slots=True)
class _Usage:
    """Token counts of a reply so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    """Cached tokens by where they were loaded from. Clients that do not know the field skip it."""
    output_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0

    def json(self) -> JSON:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": self._details(),
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": self.accepted_drafts,
                "rejected_prediction_tokens": self.rejected_drafts,
            },
        }

    def _details(self) -> JSON:
        details: JSON = {"cached_tokens": self.cached_tokens}
        return details | ({"loaded_tokens": dict(self.loaded_tokens)} if self.loaded_tokens else {})
