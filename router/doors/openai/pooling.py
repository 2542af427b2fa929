"""/v1/embeddings in OpenAI's form, /v1/score in vLLM's, /v1/rerank in Cohere's and vLLM's."""

from __future__ import annotations

import base64
import re
import time
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
from pydantic import BeforeValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.doors.http.block_reply import renamed
from router.doors.http.parsing import ModelRequest, parse
from router.doors.http.said import Said
from router.doors.http.statuses import name_by
from router.doors.http.values import Int, Kept, Prompt, Unless, ids_of, kept_tokens
from router.errors import Violation
from router.pooling.pooling import in_turns
from router.requests.bounds import MOST_POOLED, MOST_WRITTEN_NUMBERS

if TYPE_CHECKING:
    from router.call import Call
    from router.doors.http.statuses import JSON
    from router.pooling.pooling import Poolings
    from router.requests.bounds import BodyShape

_KINDS: Final = {
    None: api.POOLING_KIND_UNSPECIFIED,
    "last": api.POOLING_KIND_LAST,
    "mean": api.POOLING_KIND_MEAN,
    "cls": api.POOLING_KIND_CLS,
}

_KIND_OF_INPUT: Final = re.compile(r"^inputs(\[\d+\])?(?:\.text|\.token_ids\.ids|\.token_ids)?")


def _inputs(value: object, info: ValidationInfo) -> list[Prompt]:
    """One input or several, each a text or token ids. A list of numbers means token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and len(value) >= 1:
        if isinstance(value[0], int):
            return [ids_of(value, info)]
        if len(value) <= MOST_POOLED:
            return [one if isinstance(one, str) else ids_of(one, info) for one in value]
    rule = "must be a text, a list of token ids, or a list of at most {most} of these"
    raise PydanticCustomError("input", rule, {"most": MOST_POOLED})


def _texts(value: object) -> list[str]:
    """One text or several."""
    found = [value] if isinstance(value, str) else value
    if isinstance(found, list) and 1 <= len(found) <= MOST_POOLED:
        texts: list[Any] = [one.get("text") if isinstance(one, dict) else one for one in found]
        if all(isinstance(one, str) for one in texts):
            return texts
    rule = "must be a text, or a list of at most {most} texts"
    raise PydanticCustomError("texts", rule, {"most": MOST_POOLED})


Texts = Annotated[list[str], BeforeValidator(_texts)]


class PoolingRequest(ModelRequest):
    """The part that the requests of this module share."""

    truncate_prompt_tokens: Kept | None = None
    priority: Int | None = None
    """Lower runs first, as in vLLM's server."""
    cache_salt: str | None = None
    user: Any = None
    """Ignored, as it changes nothing here."""

    def common(self, client_tag: str) -> dict[str, Any]:
        """The fields of a message for all of them."""
        priority = None if self.priority is None else -self.priority
        if priority is not None and not -(1 << 31) <= priority < 1 << 31:
            raise errors.invalid_fields([Violation("priority", "must be a number of 32 bits")])
        return {
            "model": self.model,
            "client_tag": client_tag,
            "cache_salt": self.cache_salt or "",
            "truncate_prompt_tokens": kept_tokens(self.truncate_prompt_tokens),
            "priority": priority,
        }


class EmbeddingRequest(PoolingRequest):
    """The body of /v1/embeddings."""

    input: Annotated[list[Prompt], BeforeValidator(_inputs, str | list[Any])]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    """Whether vectors get length 1; null: as the checkpoint says, or true."""
    pooling: Literal["last", "mean", "cls"] | None = None
    """Which hidden states make a vector; null: as the checkpoint says, or that of the last
    token."""
    embed_dtype: Annotated[Any, Unless("float32")] = None


class ScoreRequest(PoolingRequest):
    """The body of /v1/score."""

    text_1: Texts | None = None
    """The query; one for all, or one for each text."""
    text_2: Texts | None = None
    """The texts to be scored."""
    queries: Texts | None = None
    """Another name of `text_1`."""
    documents: Texts | None = None
    """Another name of `text_2`."""
    instruction: str | None = None
    use_activation: bool | None = None
    """False: scores of a head as they are, without a sigmoid."""

    def refused(self) -> list[Violation]:
        """Violations of fields."""
        found = super().refused()
        for name, other in (("text_1", "queries"), ("text_2", "documents")):
            if (getattr(self, name) is None) == (getattr(self, other) is None):
                found.append(Violation(name, f"just one of {name} and {other} must be given"))
        return found


class RerankRequest(PoolingRequest):
    """The body of /v1/rerank."""

    query: str
    documents: Texts
    """Texts, or objects with a `text`."""
    top_n: Int | None = None
    """Only so many of the best are returned; null or 0: all."""
    return_documents: bool | None = None
    instruction: str | None = None
    use_activation: bool | None = None
    max_tokens_per_doc: Annotated[Any, Unless()] = None
    rank_fields: Annotated[Any, Unless(["text"])] = None


class Embeddings:
    """The method of /v1/embeddings."""

    def __init__(self, poolings: Poolings, shape: BodyShape) -> None:
        self._poolings = poolings
        self._shape = shape

    async def __call__(self, body: bytes, call: Call, client_tag: str) -> Said:
        """Embeds.

        Raises:
            RouterError: the request cannot be understood or answered.
        """
        asked = parse(EmbeddingRequest, body, self._shape.most_elements())
        if asked.dimensions is not None and not 1 <= asked.dimensions < 1 << 31:
            raise errors.invalid_fields([Violation("dimensions", "must be at least 1")])
        in_decimal = asked.encoding_format != "base64"
        if in_decimal:
            width = asked.dimensions or self._poolings.width(asked.model, call)
            if len(asked.input) * width > MOST_WRITTEN_NUMBERS:
                rule = f"float is for at most {MOST_WRITTEN_NUMBERS} numbers in all; base64 is not"
                raise errors.invalid_fields([Violation("encoding_format", rule)])
        request = api.EmbedRequest(
            inputs=[
                api.EmbedInput(text=one)
                if isinstance(one, str)
                else api.EmbedInput(token_ids=api.TokenIds(ids=one))
                for one in asked.input
            ],
            pooling=_KINDS[asked.pooling],
            normalize=asked.normalize,
            dimensions=asked.dimensions,
            add_special_tokens=asked.add_special_tokens,
            **asked.common(client_tag),
        )
        with renamed(_input_name):
            response = await self._poolings.embed(request, call)
        data: list[JSON] = []
        width = len(response.embeddings[0].values)
        async for one in in_turns(response.embeddings, width):
            written = list(one.values) if in_decimal else _base64(one)
            data.append({"object": "embedding", "index": len(data), "embedding": written})
        content = {"object": "list", "data": data, "model": response.model}
        return Said({**content, "usage": _usage(response.usage)}, asked.ignored())


class Scores:
    """The methods of /v1/score and /v1/rerank. They raise RouterError if a request cannot be
    understood or answered."""

    def __init__(self, poolings: Poolings) -> None:
        self._poolings = poolings

    async def score(self, body: bytes, call: Call, client_tag: str) -> Said:
        """Scores pairs."""
        asked = parse(ScoreRequest, body)
        queries = asked.text_1 or asked.queries or []
        documents = asked.text_2 or asked.documents or []
        names = [("raw", "use_activation")]
        names += [("queries", "text_1")] if asked.text_1 is not None else []
        names += [("documents", "text_2")] if asked.text_2 is not None else []
        with renamed(lambda path: name_by(names, path)):
            response = await self._scored(asked, queries, documents, call, client_tag)
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(response.scores)
        ]
        content = {
            "id": call.answer_id("score-"),
            "object": "list",
            "created": int(time.time()),
            "model": response.model,
            "data": data,
        }
        return Said({**content, "usage": _usage(response.usage)}, asked.ignored())

    async def rerank(self, body: bytes, call: Call, client_tag: str) -> Said:
        """Documents by their scores, best first."""
        asked = parse(RerankRequest, body)
        if asked.top_n is not None and asked.top_n < 0:
            raise errors.invalid_fields([Violation("top_n", "must not be negative")])
        names = (("queries[0]", "query"), ("raw", "use_activation"))
        with renamed(lambda path: name_by(names, path)):
            response = await self._scored(asked, [asked.query], asked.documents, call, client_tag)
        scores = list(response.scores)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[JSON] = []
        for index in order[: asked.top_n or None]:
            result: JSON = {"index": index, "relevance_score": scores[index]}
            if asked.return_documents:
                result["document"] = {"text": asked.documents[index]}
            results.append(result)
        content = {
            "id": call.answer_id("rerank-"),
            "model": response.model,
            "results": results,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }
        return Said({**content, "usage": _usage(response.usage)}, asked.ignored())

    async def _scored(
        self,
        asked: ScoreRequest | RerankRequest,
        queries: list[str],
        documents: list[str],
        call: Call,
        client_tag: str,
    ) -> api.ScoreResponse:
        request = api.ScoreRequest(
            queries=queries,
            documents=documents,
            raw=asked.use_activation is False,
            instruction=asked.instruction or "",
            **asked.common(client_tag),
        )
        return await self._poolings.score(request, call)


def _input_name(path: str) -> str:
    """The place of an input in the request. It is a text or ids, not an object that holds them."""
    return _KIND_OF_INPUT.sub(r"input\1", path)


def _base64(embedding: api.Embedding) -> str:
    return base64.b64encode(np.asarray(embedding.values, "<f4").tobytes()).decode()


def _usage(usage: api.Usage) -> JSON:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
    }
