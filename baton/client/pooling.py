"""Embeddings and scores: what clients take and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypedDict

from baton.client.other_names import stated
from baton.client.setting import set_fields
from baton.inference.v1 import inference_pb2 as pb

Input = str | Sequence[int]
"""A text, or token ids."""
_KINDS: Final = {
    "last": pb.POOLING_KIND_LAST,
    "mean": pb.POOLING_KIND_MEAN,
    "cls": pb.POOLING_KIND_CLS,
}


class EmbedOptions(TypedDict, total=False):
    """Options of `embed`. What is left out is as the checkpoint says."""

    pooling: Literal["last", "mean", "cls"]
    """Which hidden states make a vector."""
    normalize: bool
    """Whether vectors get length 1."""
    dimensions: int
    """Leading numbers of each vector to keep."""
    add_special_tokens: bool
    truncate_prompt_tokens: int
    """Only so many tokens of each input are kept, its last."""
    cache_salt: str
    priority: int


class ScoreOptions(TypedDict, total=False):
    """Options of `score`."""

    raw: bool
    """Scores of a head as they are, without a sigmoid."""
    instruction: str
    """What relevance means, for a model whose chat template asks for it."""
    truncate_prompt_tokens: int
    cache_salt: str
    priority: int


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A vector for each input, in order."""

    vectors: list[list[float]]
    model: str
    prompt_tokens: int
    """Tokens of all inputs together."""
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """A number for each document, in order."""

    scores: list[float]
    model: str
    prompt_tokens: int
    cached_prompt_tokens: int


def embed_request(
    inputs: str | Sequence[Input], model: str, options: EmbedOptions
) -> pb.EmbedRequest:
    """Makes the request of `embed`.

    Raises:
        TypeError, ValueError: an input or an option is wrong.
    """
    rest = stated(options, EmbedOptions)
    given = [inputs] if isinstance(inputs, str) else inputs
    kind = rest.pop("pooling", None)
    if kind is not None and kind not in _KINDS:
        raise ValueError(f"pooling is last, mean or cls, not {kind!r}")
    pooling = _KINDS[str(kind)] if kind is not None else pb.POOLING_KIND_UNSPECIFIED
    request = pb.EmbedRequest(inputs=map(_input, given), model=model, pooling=pooling)
    set_fields(request, rest, rest)
    return request


def _input(given: Input) -> pb.EmbedInput:
    if isinstance(given, str):
        return pb.EmbedInput(text=given)
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=given))


def score_request(
    query: str | Sequence[str], documents: str | Sequence[str], model: str, options: ScoreOptions
) -> pb.ScoreRequest:
    """Makes the request of `score`.

    Raises:
        TypeError, ValueError: a text or an option is wrong.
    """
    rest = stated(options, ScoreOptions)
    request = pb.ScoreRequest(
        queries=[query] if isinstance(query, str) else query,
        documents=[documents] if isinstance(documents, str) else documents,
        model=model,
    )
    set_fields(request, rest, rest)
    return request


def embeddings_of(response: pb.EmbedResponse) -> Embeddings:
    """Reads the answer."""
    usage = response.usage
    vectors = [list(one.values) for one in response.embeddings]
    return Embeddings(vectors, response.model, usage.prompt_tokens, usage.cached_prompt_tokens)


def scores_of(response: pb.ScoreResponse) -> Scores:
    """Reads the answer."""
    usage, scores = response.usage, list(response.scores)
    return Scores(scores, response.model, usage.prompt_tokens, usage.cached_prompt_tokens)
