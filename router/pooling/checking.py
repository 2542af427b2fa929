"""Checks requests to embed and to score against the rules of the API, before they cost anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.inference.v1 import inference_pb2 as api
from router.requests.bounds import MOST_PAIRED_CHARS, MOST_POOLED
from router.requests.validation import (
    MAX_CLIENT_TAG_BYTES,
    MAX_PRIORITY,
    Violations,
    check_ids,
)
from router.structure.fields import MAX_SALT_BYTES

if TYPE_CHECKING:
    from router.jobs import ServedModel


def check_embed(request: api.EmbedRequest) -> Violations:
    """Checks the rules that need no model."""
    found = _common(request)
    if not 1 <= len(request.inputs) <= MOST_POOLED:
        found.add("inputs", f"must have 1 to {MOST_POOLED} entries")
        return found
    for index, given in enumerate(request.inputs):
        match given.WhichOneof("input"):
            case "text":
                found.unless(bool(given.text), f"inputs[{index}].text", "must not be empty")
            case "token_ids":
                path = f"inputs[{index}].token_ids.ids"
                found.unless(bool(given.token_ids.ids), path, "must not be empty")
            case None:
                found.add(f"inputs[{index}]", "an input must be set")
    if request.HasField("dimensions"):
        found.unless(request.dimensions >= 1, "dimensions", "must be at least 1")
    known = request.pooling in api.PoolingKind.values()
    found.unless(known, "pooling", "must be a known kind")
    return found


def check_embed_for(found: Violations, request: api.EmbedRequest, model: ServedModel) -> None:
    """Checks the rules that need the model."""
    _check_pools(found, model)
    if model.pooling is not None and request.dimensions > model.pooling.width:
        found.add("dimensions", f"must be at most {model.pooling.width}, as the model has")
    for index, given in enumerate(request.inputs[:MOST_POOLED]):
        ids = given.token_ids.ids
        if len(ids) <= model.max_context_tokens:  # A longer one is refused for its length.
            check_ids(found, f"inputs[{index}].token_ids.ids", ids, model.vocab_size)


def check_score(request: api.ScoreRequest) -> Violations:
    """Checks the rules that need no model."""
    found = _common(request)
    documents, queries = len(request.documents), len(request.queries)
    found.unless(1 <= documents <= MOST_POOLED, "documents", f"must be 1 to {MOST_POOLED} texts")
    found.unless(queries in (1, documents), "queries", "must be one text, or one for each document")
    for name in ("queries", "documents"):
        for index, text in enumerate(getattr(request, name)[:MOST_POOLED]):
            found.unless(bool(text), f"{name}[{index}]", "must not be empty")
    return found


def check_score_for(found: Violations, request: api.ScoreRequest, model: ServedModel) -> None:
    """Checks the rules that need the model."""
    _check_pools(found, model)
    if model.pooling is None:
        return
    if model.pooling.labels > 1:
        rule = f"has a head with {model.pooling.labels} scores, and a score is one number"
        found.add("model", rule)
    if model.pooling.labels == 1 and _paired_chars(request) > MOST_PAIRED_CHARS:
        rule = f"have more than {MOST_PAIRED_CHARS} characters, with a query read for each"
        found.add("documents", rule)
    if request.instruction and not model.pooling.by_turns:
        found.add("instruction", "means nothing to this model: it has no template for pairs")
    if request.raw and not model.pooling.labels:
        found.add("raw", "means nothing to this model: its scores are cosines")


def _paired_chars(request: api.ScoreRequest) -> int:
    """Characters of all pairs together."""
    repeated = len(request.documents) // max(1, len(request.queries))
    queries = repeated * sum(map(len, request.queries))
    instructions = len(request.documents) * len(request.instruction)
    return queries + sum(map(len, request.documents)) + instructions


def _check_pools(found: Violations, model: ServedModel) -> None:
    if model.pooling is None:
        found.add("model", "its workers are of a release that pools no prompts")


def _common(request: api.EmbedRequest | api.ScoreRequest) -> Violations:
    found = Violations()
    ok = len(request.client_tag.encode()) <= MAX_CLIENT_TAG_BYTES
    found.unless(ok, "client_tag", f"must have at most {MAX_CLIENT_TAG_BYTES} bytes")
    ok = len(request.cache_salt.encode()) <= MAX_SALT_BYTES
    found.unless(ok, "cache_salt", f"must have at most {MAX_SALT_BYTES} bytes")
    ok = abs(request.priority) <= MAX_PRIORITY
    found.unless(ok, "priority", f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    if request.HasField("truncate_prompt_tokens"):
        ok = request.truncate_prompt_tokens >= 1
        found.unless(ok, "truncate_prompt_tokens", "must be at least 1")
    return found
