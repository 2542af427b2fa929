"""Writes the tables of `coming-from-vllm.md` from what the parsers use."""

from __future__ import annotations

from collections.abc import Iterable

from baton.client.other_names import OTHER_NAMES
from local.vllm_flags import FLAGS
from reference import table
from router.doors.batches.pages import BatchRequest
from router.doors.http.values import ApiObject, Unless
from router.doors.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from router.doors.openai.schema import HARMLESS, CompletionRequest, GenerationRequest
from router.doors.openai.turns import ChatRequest
from router.doors.responses.schema import ResponseRequest


def flags_table() -> str:
    """vLLM's flags and ours."""
    return table(("vLLM", "Baton"), *((f"`{flag}`", ours) for flag, ours in FLAGS.items()))


def options_table() -> str:
    """Options of vLLM's `LLM` and ours."""
    return table(("vLLM", "Baton"), *((f"`{name}`", ours) for name, ours in OTHER_NAMES.items()))


def fields_table() -> str:
    """The fields of a request: those that are honoured, and those that are refused."""
    kinds: dict[str, type[ApiObject]] = {
        "all": GenerationRequest,
        "`/v1/completions` alone": CompletionRequest,
        "`/v1/chat/completions` alone": ChatRequest,
        "`/v1/responses` alone": ResponseRequest,
        "`/v1/embeddings`": EmbeddingRequest,
        "`/v1/score`": ScoreRequest,
        "`/v1/rerank`": RerankRequest,
        "`/v1/batches`": BatchRequest,
    }
    return (
        table(
            ("requests", "honoured", "refused, unless they ask for nothing"),
            *(
                (name, _fields(kind, refused=False), _fields(kind, refused=True))
                for name, kind in kinds.items()
            ),
        )
        + f"\n\nWithout effect on an answer, and ignored: {_names(HARMLESS)}."
    )


def _fields(kind: type[ApiObject], *, refused: bool) -> str:
    """Names of the fields of a kind of request. Those of all that generate are named once."""
    old: set[str] = set()
    if issubclass(kind, GenerationRequest) and kind is not GenerationRequest:
        old = set(GenerationRequest.model_fields)
    names = [
        field.alias or name
        for name, field in kind.model_fields.items()
        if name not in old and any(isinstance(mark, Unless) for mark in field.metadata) == refused
    ]
    return _names(names)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
