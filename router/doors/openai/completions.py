"""/v1/completions: texts or token ids in, text out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.doors.http.parsing import parse
from router.doors.http.values import Prompt
from router.doors.openai.logprobs import completion_logprobs
from router.doors.openai.reply import Echo, Reply, ReplyDelta, ReplyOrder
from router.doors.openai.schema import CompletionRequest, StreamOptions
from router.errors import Violation
from router.requests.filling import most_kept
from router.requests.selecting import runs
from router.visible import Visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.call import Call
    from router.doors.http.statuses import JSON
    from router.jobs import Dispatcher, Quota, ServedModel
    from router.requests.bounds import BodyShape
    from router.requests.generation import GenerationRequest, Generations
    from router.requests.tokenization import Tokenizer, Tokenizers


class CompletionForm:
    """Writes completions. A chunk has the same form as a whole completion."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, delta: ReplyDelta) -> JSON:
        """A whole choice."""
        return {
            "index": delta.choice,
            "text": delta.text,
            "logprobs": delta.scored,
            "finish_reason": delta.finish_reason,
            **({} if delta.token_ids is None else {"token_ids": delta.token_ids}),
        }

    delta = choice

    scores = staticmethod(completion_logprobs)

    def prompt_ids(self, token_ids: list[int]) -> tuple[JSON, JSON]:
        """The prompt's ids stand in each of its choices, since there may be several prompts."""
        return {}, {"prompt_token_ids": token_ids}


class Completions:
    """The method."""

    def __init__(
        self,
        generations: Generations,
        dispatcher: Dispatcher,
        tokenizers: Tokenizers,
        shape: BodyShape,
    ) -> None:
        self._generations = generations
        self._dispatcher = dispatcher
        self._tokenizers = tokenizers
        self._shape = shape

    async def __call__(self, body: bytes, call: Call, client_tag: str) -> Reply:
        """Reads a request. Nothing runs before the reply is read.

        Raises:
            RouterError: the request cannot be understood, or its prompts cannot be echoed.
        """
        request = parse(CompletionRequest, body, self._shape.most_elements())
        tokenizer = None
        requests = [_generation(request, one, None, client_tag) for one in request.prompt]
        _check_quota(call.quota, [one.input for one in requests])
        request.model = self._generations.model_for(requests[0].input, call)
        if request.echo or request.logprobs is not None:
            model = Visible(self._dispatcher, call).model(request.model)
            tokenizer = await self._tokenizers.get(model.path)
        echoes: list[Echo | None] = [None] * len(request.prompt)
        if request.echo:
            async with self._generations.deadline(call):
                echoes = [
                    await self._echo(request, one.input, model, tokenizer, call) for one in requests
                ]
            requests = [
                _generation(request, prompt, echo, client_tag)
                for prompt, echo in zip(request.prompt, echoes, strict=True)
            ]
        for one in requests:
            one.input.model = request.model
        order = ReplyOrder(
            requests,
            CompletionForm(),
            request.stream_options or StreamOptions(),
            echoes,
            tokenizer,
            bool(request.return_tokens_as_token_ids),
            request.echo_only,
            bool(request.return_token_ids),
            request.service_tier,
            request.ignored(),
            request.name_of,
        )
        return Reply(self._generations, order, call)

    async def _echo(
        self,
        request: CompletionRequest,
        generation: api.GenerationInput,
        model: ServedModel,
        tokenizer: Tokenizer | None,
        call: Call,
    ) -> Echo:
        """The prompt as far as it is kept, as text, and also as ids if their log probabilities are
        wanted."""
        kept, scores = most_kept(generation, model.max_context_tokens), request.logprobs is not None
        is_text = generation.WhichOneof("prompt") == "text"
        if is_text and kept is None and not scores:
            return Echo(generation.text)
        if is_text:
            asked = api.TokenizeRequest(
                model=request.model,
                text=generation.text,
                add_special_tokens=request.add_special_tokens,
            )
            ids = list((await self._generations.tokenize(asked, call)).token_ids)
            if kept is None or len(ids) <= kept:
                return Echo(generation.text, ids if scores else ())
        else:
            ids = list(generation.token_ids.ids)
        if tokenizer is None:
            raise errors.invalid_fields([Violation("echo", "the model has no tokenizer")])
        ids = ids if kept is None else ids[-kept:]
        text = await self._tokenizers.decode(tokenizer, ids, not is_text, call.sharer)
        return Echo(text, ids if scores else ())


def _check_quota(quota: Quota, prompts: Sequence[api.GenerationInput]) -> None:
    """Refuses prompts that together are never within a tenant's quota, since all of them run at
    once: one of them would be refused for the others, and sent again for ever. The tokens of a text
    are not known yet, and count as one.

    Raises:
        RouterError: QUOTA_EXCEEDED, not to be tried again.
    """
    if len(prompts) == 1:
        return
    tokens = sum(runs(one) * one.stop.max_tokens + (len(one.token_ids.ids) or 1) for one in prompts)
    for name, wanted, limit in (
        ("requests", len(prompts), quota.requests),
        ("sequences", sum(map(runs, prompts)), quota.sequences),
        ("tokens", tokens, quota.tokens),
    ):
        if limit is not None and wanted > limit:
            raise errors.quota_exceeded(name, 0, wanted, limit)


def _generation(
    request: CompletionRequest, prompt: Prompt, echo: Echo | None, client_tag: str
) -> GenerationRequest:
    if isinstance(prompt, list):
        chosen: JSON = {"token_ids": api.TokenIds(ids=prompt)}
    elif echo is not None and echo.token_ids:
        chosen = {"token_ids": api.TokenIds(ids=echo.token_ids)}
        request = request.model_copy(update={"add_special_tokens": None})
    else:
        chosen = {"text": prompt}
    max_tokens = 1 if request.echo_only else request.max_tokens
    best_of = None if request.use_beam_search or request.echo_only else request.best_of
    generation = request.input(max_tokens, request.logprobs, best_of=best_of, **chosen)
    generation.output.prompt_logprobs = echo is not None and request.logprobs is not None
    kind = api.StreamGenerateRequest if request.stream else api.GenerateRequest
    return kind(input=generation, client_tag=client_tag)
