"""Embeddings and scores: what clients take and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypedDict

from baton.client.other_names import refuse_unknown
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
    refuse_unknown(options, EmbedOptions)
    given = [inputs] if isinstance(inputs, str) else inputs
    kind = options.get("pooling")
    if kind is not None and kind not in _KINDS:
        raise ValueError(f"pooling is last, mean or cls, not {kind!r}")
    pooling = _KINDS[str(kind)] if kind is not None else pb.POOLING_KIND_UNSPECIFIED
    request = pb.EmbedRequest(inputs=map(_input, given), model=model, pooling=pooling)
    _set_rest(request, options, EmbedOptions)
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
    refuse_unknown(options, ScoreOptions)
    request = pb.ScoreRequest(
        queries=[query] if isinstance(query, str) else query,
        documents=[documents] if isinstance(documents, str) else documents,
        model=model,
    )
    _set_rest(request, options, ScoreOptions)
    return request


def _set_rest(
    request: pb.EmbedRequest | pb.ScoreRequest, options: EmbedOptions | ScoreOptions, known: type
) -> None:
    """Sets the options that are fields by themselves. None counts as left out."""
    given = {name: value for name, value in options.items() if value is not None}
    set_fields(request, given, known.__annotations__.keys() - {"pooling"})


def embeddings_of(response: pb.EmbedResponse) -> Embeddings:
    """Reads the answer."""
    usage = response.usage
    vectors = [list(one.values) for one in response.embeddings]
    return Embeddings(vectors, response.model, usage.prompt_tokens, usage.cached_prompt_tokens)


def scores_of(response: pb.ScoreResponse) -> Scores:
    """Reads the answer."""
    usage, scores = response.usage, list(response.scores)
    return Scores(scores, response.model, usage.prompt_tokens, usage.cached_prompt_tokens)
