"""Embeddings and scores, from the request to the answer; every front door goes through here.

1. Admit: check the fields, find the model and its tokenizer. All violations are reported at once.
2. Tokenize every input. Their number, and that of their tokens together, are bounded.
3. Run a job for each input, some at a time. Workers pack the inputs of all calls into steps.

If one input fails, the others are cancelled. A job needs no decode worker.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from router import errors
from router.errors import Violation
from router.events import NO_EVENTS, RouterEvents
from router.jobs import Dispatcher, Job, JobEvent, JobFinished, JobPooled, ServedModel
from router.pooling import checking
from router.requests.bounds import MOST_POOLED_TOKENS
from router.requests.chat_template import ChatTemplateError
from router.requests.deadlines import deadline_ns, until
from router.requests.filling import last, salted
from router.requests.request_span import RequestSpan
from router.requests.tokenization import PromptIds, PromptTooLongError, Tokenizer, Tokenizers
from router.visible import Visible
from telemetry.names import Attr, SpanName

if TYPE_CHECKING:
    from router.call import Call
    from router.jobs import Quota
    from router.requests.validation import Limits, Violations

AT_ONCE: Final = 64
"""Jobs of a call that run at the same time: some steps of short texts, so that workers never wait
for a call, and a long call does not fill the queue."""
NUMBERS_A_TURN: Final = 4096
"""Numbers of vectors that become a message, or text, in one turn of the event loop: 0.1 ms."""
Floats = NDArray[np.float32]
Vector = TypeVar("Vector")
_KINDS: Final = {
    api.POOLING_KIND_LAST: worker_pb2.POOL_KIND_LAST,
    api.POOLING_KIND_MEAN: worker_pb2.POOL_KIND_MEAN,
    api.POOLING_KIND_CLS: worker_pb2.POOL_KIND_FIRST,
}


class Prompts(NamedTuple):
    """What a call pools."""

    model: ServedModel
    ids: Sequence[PromptIds]
    pooling: worker_pb2.Pooling
    cache_salt: str
    priority: int

    @property
    def tokens(self) -> int:
        """Tokens of all together."""
        return sum(map(len, self.ids))


async def in_turns(vectors: Iterable[Vector], width: int) -> AsyncIterator[Vector]:
    """Vectors of `width` numbers, few of them in one turn of the event loop."""
    numbers = 0
    for vector in vectors:
        if (numbers := numbers + width) > NUMBERS_A_TURN:
            await asyncio.sleep(0)
            numbers = width
        yield vector


class Poolings:
    """Runs the requests of all front doors of a process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizers: Tokenizers,
        limits: Limits,
        events: RouterEvents = NO_EVENTS,
    ) -> None:
        self._dispatcher = dispatcher
        self._tokenizers = tokenizers
        self._limits = limits
        self._events = events

    def width(self, model: str, call: Call) -> int:
        """Numbers of an embedding of a model; 0: its workers pool nothing.

        Raises:
            RouterError: the model is not served.
        """
        pooling = Visible(self._dispatcher, call).model(model).pooling
        return 0 if pooling is None else pooling.width

    async def embed(self, request: api.EmbedRequest, call: Call) -> api.EmbedResponse:
        """A vector for each input.

        Raises:
            RouterError: it was refused or could not be finished.
        """
        given = Attr.EMBEDDINGS, request.model, request.client_tag
        with RequestSpan(call, self._events, *given) as span:
            async with until(self._deadline_ns(call), int):
                prompts = await self._embedded(request, call, span)
                vectors, usage = await self._run(prompts, call, span)
        response = api.EmbedResponse(model=prompts.model.called, usage=usage)
        async for vector in in_turns(vectors, len(vectors[0])):
            # A list is read six times as fast as numbers of numpy, which are objects.
            response.embeddings.add().values.extend(vector.tolist())
        return response

    async def score(self, request: api.ScoreRequest, call: Call) -> api.ScoreResponse:
        """A number for each document.

        Raises:
            RouterError: it was refused or could not be finished.
        """
        given = Attr.SCORE, request.model, request.client_tag
        with RequestSpan(call, self._events, *given) as span:
            async with until(self._deadline_ns(call), int):
                prompts = await self._scored(request, call, span)
                vectors, usage = await self._run(prompts, call, span)
        if prompts.pooling.scores:
            scores = np.array([vector[0] for vector in vectors], np.float64)
            scores = scores if request.raw else 1 / (1 + np.exp(-scores))
        else:
            queries = vectors[: len(request.queries)]
            documents = vectors[len(request.queries) :]
            pairs = zip(itertools.cycle(queries), documents, strict=False)
            each = in_turns(pairs, len(vectors[0]))
            scores = np.array([query @ document async for query, document in each])
        return api.ScoreResponse(model=prompts.model.called, scores=scores, usage=usage)

    # -- the prompts ---------------------------------------------------------------------------

    async def _embedded(self, request: api.EmbedRequest, call: Call, span: RequestSpan) -> Prompts:
        with span.step(SpanName.ADMIT):
            found = checking.check_embed(request)
            model, tokenizer = await self._admit(request, call, found)
            checking.check_embed_for(found, request, model)
            for index, one in enumerate(request.inputs):
                if one.WhichOneof("input") == "text" and tokenizer is None:
                    found.add(f"inputs[{index}].text", "the model has no tokenizer")
            found.raise_if_any()
        defaults = model.pooling
        assert defaults is not None, "checked"
        pooling = worker_pb2.Pooling(
            kind=_KINDS.get(request.pooling, defaults.kind),
            normalise=request.normalize if request.HasField("normalize") else defaults.normalise,
            dimensions=request.dimensions,
        )
        special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        room = _Room(model, request, "inputs")

        async def encoded(index: int) -> PromptIds:
            one = request.inputs[index]
            if one.WhichOneof("input") == "token_ids":
                return np.array(one.token_ids.ids, np.uint32)
            assert tokenizer is not None, "checked"
            encode = partial(self._tokenizers.encode, tokenizer, one.text, special)
            return (await encode(room.most, call.sharer))[0]

        with span.step(SpanName.TOKENIZE):
            for index in range(len(request.inputs)):
                with room.entry(index):
                    room.add(await encoded(index))
        return Prompts(model, room.ids, pooling, request.cache_salt, request.priority)

    async def _scored(self, request: api.ScoreRequest, call: Call, span: RequestSpan) -> Prompts:
        with span.step(SpanName.ADMIT):
            found = checking.check_score(request)
            model, tokenizer = await self._admit(request, call, found)
            checking.check_score_for(found, request, model)
            if tokenizer is None:
                found.add("documents", "the model has no tokenizer")
            found.raise_if_any()
        defaults = model.pooling
        assert defaults is not None, "checked"
        assert tokenizer is not None, "checked"
        pooling = worker_pb2.Pooling(kind=defaults.kind, scores=defaults.labels == 1)
        if not pooling.scores:
            pooling.normalise = True
        with span.step(SpanName.TOKENIZE):
            room = _Room(model, request, "documents")
            if not pooling.scores:
                for name in ("queries", "documents"):
                    room.field = name
                    for index, text in enumerate(getattr(request, name)):
                        with room.entry(index):
                            encode = partial(self._tokenizers.encode, tokenizer, text, None)
                            room.add((await encode(room.most, call.sharer))[0])
                return Prompts(model, room.ids, pooling, request.cache_salt, request.priority)
            queries = list(request.queries) * (len(request.documents) // len(request.queries))
            for index, pair in enumerate(zip(queries, request.documents, strict=True)):
                with room.entry(index):
                    room.add(await self._pair(pair, request, room, tokenizer, call.sharer))
        return Prompts(model, room.ids, pooling, request.cache_salt, request.priority)

    async def _pair(
        self,
        pair: tuple[str, str],
        request: api.ScoreRequest,
        room: _Room,
        tokenizer: Tokenizer,
        sharer: str,
    ) -> PromptIds:
        """The prompt by which a query and a document are scored."""
        pooling = room.model.pooling
        if pooling is None or not pooling.by_turns:
            return await self._tokenizers.encode_pair(tokenizer, pair, room.most, sharer)
        turns = [(api.ROLE_QUERY, pair[0]), (api.ROLE_DOCUMENT, pair[1])]
        if request.instruction:
            turns.insert(0, (api.ROLE_SYSTEM, request.instruction))
        messages = [api.ChatMessage(role=role, content=text) for role, text in turns]
        chat = api.ChatPrompt(messages=messages)
        return (await self._tokenizers.encode(tokenizer, chat, None, room.most, sharer))[0]

    async def _admit(
        self, request: api.EmbedRequest | api.ScoreRequest, call: Call, found: Violations
    ) -> tuple[ServedModel, Tokenizer | None]:
        try:
            model = Visible(self._dispatcher, call).model(request.model)
        except errors.RouterError:
            # Errors that the client can correct come before those for which it can only wait.
            found.raise_if_any()
            raise
        found.raise_if_any()
        return model, await self._tokenizers.get(model.path)

    # -- running -------------------------------------------------------------------------------

    async def _run(
        self, prompts: Prompts, call: Call, span: RequestSpan
    ) -> tuple[list[Floats], api.Usage]:
        """Runs a job for each prompt. Returns their numbers, in order."""
        span.describe_prompts(prompts.model, prompts.tokens)
        usage = api.Usage(prompt_tokens=prompts.tokens)
        room = asyncio.Semaphore(_at_once(call.quota, prompts))
        found: list[Floats] = [np.zeros(0, np.float32)] * len(prompts.ids)
        begun = False

        def hear(index: int, event: JobEvent) -> None:
            match event:
                case JobPooled():
                    found[index] = np.frombuffer(event.values, "<f4").astype(np.float32)
                case JobFinished():
                    usage.cached_prompt_tokens += event.cached_prompt_tokens
                    span.pooled(event)

        async def run(index: int, ids: PromptIds) -> None:
            nonlocal begun
            async with room:
                job = await self._job(prompts, ids, call, span)
                if begun:  # Another call may have taken the place of a job that ended.
                    await self._dispatcher.quotas.room(job)
                begun = True
                await self._dispatcher.run(job, partial(hear, index))

        tasks = [asyncio.create_task(run(*each)) for each in enumerate(prompts.ids)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return found, usage

    async def _job(self, prompts: Prompts, ids: PromptIds, call: Call, span: RequestSpan) -> Job:
        job = Job(
            id=call.id,
            model=prompts.model,
            prompt_ids=ids,
            sampling=worker_pb2.Sampling(),
            stopping=worker_pb2.Stopping(),
            choices=1,
            arrived_ns=call.arrived_ns,
            deadline_ns=self._deadline_ns(call),
            context=span.context,
            began_s=call.began_s,
            priority=prompts.priority,
            tenant=call.tenant,
            holder=call.holder,
            line=call.tenant or call.peer.address,
            turn=call.id if call.tenant else call.peer.connection or call.id,
            quota=call.quota,
            cache_salt=salted(call.tenant, prompts.cache_salt),
            pooling=prompts.pooling,
            workers=call.record.workers,
        )
        return replace(job, keys=await self._tokenizers.page_keys(job))

    def _deadline_ns(self, call: Call) -> int:
        return deadline_ns(call, self._limits.max_request_duration_s)


def _at_once(quota: Quota, prompts: Prompts) -> int:
    """Jobs of a call at once. All count for its tenant's quota, so a call that fits in turns is not
    refused for jobs of its own: it would be for ever."""
    longest = max(map(len, prompts.ids))
    limits = (quota.requests, quota.sequences, quota.tokens and quota.tokens // longest)
    return max(1, min([AT_ONCE, *(limit for limit in limits if limit is not None)]))


class _Room:
    """The prompts of a call so far, within their bounds. A prompt of the whole context fits, since
    nothing is drawn behind it."""

    def __init__(
        self, model: ServedModel, request: api.EmbedRequest | api.ScoreRequest, field: str
    ) -> None:
        self.model = model
        self.field = field
        """Name of the field that is read."""
        cut = request.HasField("truncate_prompt_tokens")
        most = model.max_context_tokens
        self._keep = min(request.truncate_prompt_tokens, most) if cut else None
        self.most = None if cut else model.max_context_tokens
        """A text that certainly has more tokens need not be encoded."""
        self.ids: list[PromptIds] = []
        self._index = 0
        self._tokens = 0

    def entry(self, index: int) -> _Room:
        """A block around the entry of this index, whose errors name it."""
        self._index = index
        return self

    def add(self, ids: PromptIds) -> None:
        """Adds a prompt.

        Raises:
            RouterError: it does not fit.
        """
        path, model = f"{self.field}[{self._index}]", self.model
        if not len(ids):
            raise errors.invalid_fields([Violation(path, "has no tokens")])
        kept = last(ids, self._keep)
        if len(kept) > model.max_context_tokens:
            raise errors.invalid_fields([self._too_long(len(kept))])
        if int(kept.max()) >= model.vocab_size:
            rule = "holds a special token for which the model has no weights"
            raise errors.invalid_fields([Violation(path, rule)])
        self._tokens += len(kept)
        if self._tokens > MOST_POOLED_TOKENS:
            rule = f"must have at most {MOST_POOLED_TOKENS} tokens together"
            raise errors.invalid_fields([Violation(self.field, rule)])
        self.ids.append(kept)

    def _too_long(self, tokens: int, at_least: str = "") -> Violation:
        rule = f"has {at_least}{tokens} tokens; the context has {self.model.max_context_tokens}"
        return Violation(f"{self.field}[{self._index}]", rule)

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, PromptTooLongError):
            found = self._too_long(error.least_tokens, "at least ")
            raise errors.invalid_fields([found]) from None
        if isinstance(error, ChatTemplateError):
            path = f"{self.field}[{self._index}]"
            raise errors.invalid_fields([Violation(path, error.rule)]) from None
