"""One generation, from the request to the last message; every front door goes through here.

1. Admit: validate, find the model and its tokenizer. All violations are reported at once.
2. Tokenize, fill in every default, draw a seed: a `Job`.
3. Run: the dispatcher reports events from within the handler of a worker's message. Stop texts are
   searched and an `OutputBuffer` is filled right there. So a slow client delays neither the
   dispatcher nor its own stop texts.
4. The client's task takes the outputs out at the client's pace. A token wakes only that task.

In every case the dispatcher is done with the job before `Generations.stream` returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.errors import Violation
from router.events import NO_EVENTS, RouterEvents
from router.jobs import (
    ChoiceEnded,
    Dispatcher,
    Job,
    JobEvent,
    JobFinished,
    JobStarted,
    JobTokens,
    ServedModel,
)
from router.requests import filling, validation
from router.requests.chat_template import ChatTemplateError
from router.requests.deadlines import deadline_ns, until
from router.requests.outputs import (
    FINISH_REASONS,
    ChoiceOutput,
    Finished,
    Output,
    OutputBuffer,
    ShortWay,
    Started,
    check_scores,
    most_scored,
)
from router.requests.request_span import ObservedWay, RequestSpan
from router.requests.selecting import Selection, runs, selects
from router.requests.tokenization import PromptIds, PromptTooLongError, Tokenizer, Tokenizers
from router.split_names import Prompted
from router.structure.plan import AnswerPlan
from router.visible import Visible
from telemetry.names import SpanName

if TYPE_CHECKING:
    from router.call import Call
    from router.requests.validation import Limits

GenerationRequest = api.GenerateRequest | api.StreamGenerateRequest


class Generations:
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

    async def stream(
        self, request: GenerationRequest, call: Call, short_way: ShortWay | None = None
    ) -> AsyncGenerator[Output, None]:
        """The outputs of one generation, in the order of StreamGenerate's messages. Deltas that the
        short way takes are not among them.

        Raises:
            RouterError: it was refused or could not be finished.
        """
        path = validation.prompt_path(request.input)
        request.input.model = self.model_for(request.input, call)
        with RequestSpan.of(call, request, self._events) as span, errors.naming_prompt(path):
            async with self.deadline(call):
                with span.step(SpanName.ADMIT):
                    model, tokenizer = await self._admit(request, call)
                    await asyncio.sleep(0)  # A callback for what the door did, one for the rest.
                with span.step(SpanName.TOKENIZE):
                    most = model.max_context_tokens
                    ids, text = await self._tokenize(
                        request.input, tokenizer, "input", call.sharer, most
                    )
                    validation.check_encoded(request.input, ids, model)
                    plan = await self._tokenizers.plans.plan(
                        request.input, model, tokenizer, text, call.sharer
                    )
                    job = self._job(request.input, call, span, model, ids)
                    job = replace(job, keys=await self._tokenizers.page_keys(job))
                    words = await self._tokenizers.words(
                        tokenizer, request.input.sampling.bad_words, model.vocab_size, call.sharer
                    )
                    filling.restrict(job, words, plan)
            if (stop := request.input.stop).cut_max_tokens or not stop.HasField("max_tokens"):
                self._shorten(request, job)
            check_scores(request, job)
            span.describe_job(job)
            seen = short_way and ObservedWay(short_way, span, call)
            most = self._limits.max_unread_tokens
            apart_s = request.input.output.min_message_ms / 1e3
            if selects(request.input):  # All comes at the end, and the reader waits for it.
                most = max(most, job.choices * job.stopping.max_tokens)
            buffer = OutputBuffer(most, whole=call.whole, short_way=seen, min_message_s=apart_s)
            chosen = Selection(request.input, buffer) if selects(request.input) else buffer
            generation = _Generation(self._dispatcher, job, buffer, plan, chosen.put)
            generation.choices += filling.choices_of(job, request.input, tokenizer, plan)
            async with generation.running():
                while (output := await buffer.take()) is not None:
                    left_s = call.passed_s
                    try:
                        yield output
                    finally:  # a reader that leaves got this output, too
                        span.observe(output, left_s)

    def deadline(self, call: Call) -> AbstractAsyncContextManager[None]:
        """Limits the waits of a call before its job runs.

        Raises:
            RouterError: DEADLINE_EXCEEDED.
        """
        return until(self._deadline_ns(call), int)

    async def tokenize(self, request: api.TokenizeRequest, call: Call) -> api.TokenizeResponse:
        """Token ids of a text or of chat turns, and their texts if the request asks for them.

        Raises:
            RouterError: INVALID_FIELD, QUOTA_EXCEEDED, or the model is not served.
        """
        with self._dispatcher.quotas.counted(call.tenant, call.quota):
            return await self._tokenized(request, call)

    async def _tokenized(self, request: api.TokenizeRequest, call: Call) -> api.TokenizeResponse:
        found, sharer = validation.check_tokenize(request), call.sharer
        found.raise_if_any()
        model = Visible(self._dispatcher, call).model(self.model_for(request, call))
        tokenizer = await self._tokenizers.get(model.path)
        if tokenizer is None:
            validation.check_tokenizable(found, request)
            found.raise_if_any()
        ids, _ = await self._tokenize(request, tokenizer, "", sharer)
        token_ids = ids.tolist()
        texts: list[str] = []
        if tokenizer is not None and request.token_texts:
            texts = await self._tokenizers.texts(tokenizer, token_ids, sharer)
        return api.TokenizeResponse(token_ids=token_ids, token_texts=texts)

    async def detokenize(self, model_name: str, token_ids: Sequence[int], call: Call) -> str:
        """Text of token ids, special tokens by their names.

        Raises:
            RouterError: INVALID_FIELD, or the model is not served.
        """
        model, found = Visible(self._dispatcher, call).model(model_name), validation.Violations()
        validation.check_ids(found, "tokens", token_ids, model.vocab_size)
        tokenizer = await self._tokenizers.get(model.path)
        if tokenizer is None:
            found.add("tokens", "the model has no tokenizer")
        found.raise_if_any()
        assert tokenizer is not None
        with self._dispatcher.quotas.counted(call.tenant, call.quota):
            return await self._tokenizers.decode(tokenizer, token_ids, False, call.sharer)

    def model_for(self, request: Prompted, call: Call) -> str:
        """The name of the model that a prompt is for, where the request's stands for several."""
        names, visible = self._limits.split_names, Visible(self._dispatcher, call)
        return names.model_for(request, call.tenant, visible)

    async def _admit(
        self, request: GenerationRequest, call: Call
    ) -> tuple[ServedModel, Tokenizer | None]:
        found = validation.check_request(request, self._limits)
        try:
            model = Visible(self._dispatcher, call).model(request.input.model)
        except errors.RouterError:
            # Errors that the client can correct come before those for which it can only wait.
            found.raise_if_any()
            raise
        validation.check_against_model(found, request.input, model)
        tokenizer = await self._tokenizers.get(model.path)
        if tokenizer is None:
            validation.check_without_tokenizer(found, request.input)
        found.raise_if_any()
        validation.check_prompt_ids(request.input, model)
        return model, tokenizer

    async def _tokenize(
        self,
        holder: api.GenerationInput | api.TokenizeRequest,
        tokenizer: Tokenizer | None,
        path: str,
        sharer: str,
        max_tokens: int | None = None,
    ) -> tuple[PromptIds, str]:
        """The prompt's ids, and its text if it is not given as ids. A prompt that certainly has
        more than `max_tokens` is refused instead, unless it is truncated."""
        kind, keep = holder.WhichOneof("prompt"), None
        if isinstance(holder, api.GenerationInput):
            assert max_tokens is not None
            keep = filling.most_kept(holder, max_tokens)
            max_tokens = max_tokens if keep is None else None
            if kind == "token_ids":
                given = holder.token_ids.ids
                return np.array(given if keep is None else given[-keep:], np.uint32), ""
        assert tokenizer is not None  # Validation made sure: text and chat need one.
        field = f"{path}.{kind}".lstrip(".")
        special = holder.add_special_tokens if holder.HasField("add_special_tokens") else None
        try:
            prompt = holder.chat if kind == "chat" else holder.text
            ids, text = await self._tokenizers.encode(
                tokenizer, prompt, special, max_tokens, sharer
            )
        except ChatTemplateError as error:
            broken = Violation(f"{field}.{error.field}".rstrip("."), error.rule)
            raise errors.invalid_fields([broken]) from None
        except PromptTooLongError as error:
            raise errors.context_length_exceeded(
                error.least_tokens, 1, error.max_tokens, at_least=True
            ) from None
        if not len(ids):
            raise errors.invalid_fields([Violation(field, "has no tokens")])
        return filling.last(ids, keep), text

    def _job(
        self,
        generation: api.GenerationInput,
        call: Call,
        span: RequestSpan,
        model: ServedModel,
        prompt_ids: PromptIds,
    ) -> Job:
        return Job(
            id=call.id,
            model=model,
            prompt_ids=prompt_ids,
            sampling=filling.fill_sampling(generation, model),
            stopping=filling.fill_stopping(generation.stop, len(prompt_ids), model, self._limits),
            choices=runs(generation),
            arrived_ns=call.arrived_ns,
            deadline_ns=self._deadline_ns(call),
            context=span.context,
            began_s=call.began_s,
            priority=generation.priority,
            prompt_logprobs=generation.output.prompt_logprobs,
            tenant=call.tenant,
            holder=call.holder,
            line=call.tenant or call.peer.address,
            turn=call.id if call.tenant else call.peer.connection or call.id,
            quota=call.quota,
            cache_salt=filling.salted(call.tenant, generation.cache_salt),
            extensions=dict(generation.extensions),
            speculates=generation.speculation or not generation.HasField("speculation"),
            beams=filling.fill_beams(generation),
            workers=call.record.workers,
        )

    def _deadline_ns(self, call: Call) -> int:
        return deadline_ns(call, self._limits.max_request_duration_s)

    def _shorten(self, request: GenerationRequest, job: Job) -> None:
        """Cuts a `max_tokens` that the client did not ask for to the room that there is."""
        stopping, pool_tokens = job.stopping, self._dispatcher.largest_pool_tokens(job)
        room = min(stopping.max_tokens, most_scored(request, job))
        if pool_tokens is not None:
            room = min(room, pool_tokens - job.prompt_tokens)
        stopping.max_tokens = max(1, stopping.min_tokens, room)


class _Generation:
    """A job on its way through the dispatcher."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        job: Job,
        buffer: OutputBuffer,
        plan: AnswerPlan,
        put: Callable[[Output], None],
    ) -> None:
        """`put` takes the outputs on their way to the buffer."""
        self._put = put
        self._dispatcher = dispatcher
        self._job = job
        self._buffer = buffer
        self._plan = plan
        self.choices: list[ChoiceOutput] = []
        self._started: Started | None = None
        self._last: Finished | None = None
        self._finished = False
        self._drafted = self._accepted = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the job while its outputs are taken out of the buffer."""
        work = asyncio.create_task(self._run())
        try:
            yield
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work])

    async def _run(self) -> None:
        """Runs the job to its end, and closes the buffer in every case."""
        try:
            async with until(self._job.deadline_ns, lambda: self._buffer.tokens_put):
                await self._dispatcher.run(self._job, self._hear)
            if not self._finished:
                raise RuntimeError("the dispatcher returned before JobFinished")
        except Exception as error:
            self._buffer.close(error)
        except asyncio.CancelledError:
            # The reader left. If it did not, the cancellation came from the dispatcher.
            self._buffer.close(RuntimeError("cancelled from inside"))
            raise
        else:
            self._buffer.close()

    def _hear(self, event: JobEvent) -> None:
        match event:
            case JobTokens():
                self._take_tokens(event)
            case JobStarted():
                self._started = Started(self._job, *event, self._plan.dropped, self._plan.ignored)
                self._put(self._started)
            case ChoiceEnded():
                self._end_by_worker(event)
            case JobFinished():
                self._finish(event)
                self._finished = True

    def _take_tokens(self, event: JobTokens) -> None:
        if self._started is None:
            raise RuntimeError("tokens before JobStarted")
        choice = self.choices[event.choice]
        if choice.ended:
            return
        self._put(choice.push(event))
        if choice.stop_text is not None:
            self._dispatcher.end_choice(self._job, choice.choice)
            self._end(choice, api.FINISH_REASON_STOP, choice.stop_text)

    def _end_by_worker(self, event: ChoiceEnded) -> None:
        choice = self.choices[event.choice]
        if choice.ended:
            return
        if choice.num_tokens != event.output_tokens:
            raise RuntimeError("a choice ended before all its tokens came")
        self._drafted += event.drafted_tokens
        self._accepted += event.accepted_tokens
        reason = FINISH_REASONS[event.reason]
        if (rest := choice.rest(reason)) is not None:
            self._put(rest)
        self._end(choice, reason, score=event.score)

    def _end(
        self,
        choice: ChoiceOutput,
        reason: api.FinishReason.ValueType,
        stop_text: str = "",
        score: float | None = None,
    ) -> None:
        """Announces the end of a choice; the last one's waits for the totals."""
        choice.ended = True
        finished = Finished(choice.choice, choice.reason(reason), stop_text, score=score)
        if all(one.ended for one in self.choices):
            self._last = finished
        else:
            self._put(finished)

    def _finish(self, event: JobFinished) -> None:
        if self._last is None or self._started is None:
            raise RuntimeError("JobFinished before every choice ended")
        usage = api.Usage(
            prompt_tokens=self._job.prompt_tokens,
            cached_prompt_tokens=event.cached_prompt_tokens,
            output_tokens=sum(choice.num_tokens for choice in self.choices),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices),
            loaded_prompt_tokens=event.loaded_prompt_tokens,
            accepted_draft_tokens=self._accepted,
            rejected_draft_tokens=self._drafted - self._accepted,
        )
        self._put(replace(self._last, usage=usage, timings=event.timings))
