"""The HTTP API as an OpenAPI document, made of the models that read requests.

Answers have the form of the API that a path belongs to, so only requests are described.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from baton.version import __version__

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

    from router.doors.http.statuses import JSON

Posts = tuple[tuple[str, type[BaseModel], str], ...]
"""Paths that take a body, its model, and what they do."""
PAGES: Final = (
    ("get", "/v1/responses/{response_id}", "A response that is kept"),
    ("delete", "/v1/responses/{response_id}", "Deletes it"),
    ("post", "/v1/responses/{response_id}/cancel", "Refused: a kept response is complete"),
    ("get", "/v1/responses/{response_id}/input_items", "What it was asked for"),
    ("get", "/v1/files", "Files of requests, and of results"),
    ("get", "/v1/files/{file_id}", "One of them"),
    ("delete", "/v1/files/{file_id}", "Deletes it"),
    ("get", "/v1/files/{file_id}/content", "Its content"),
    ("get", "/v1/batches", "Batches"),
    ("get", "/v1/batches/{batch_id}", "One of them"),
    ("post", "/v1/batches/{batch_id}/cancel", "Cancels it"),
    ("get", "/v1/models", "The models that are served"),
    ("get", "/v1/models/{name}", "One of them"),
    ("get", "/tokenizer_info", "A model's special tokens and chat template"),
    ("get", "/version", "The release"),
    ("get", "/health", "200 while some model can run"),
    ("get", "/healthz", "The same"),
    ("get", "/ping", "The same"),
    ("post", "/ping", "The same"),
    ("get", "/openapi.json", "This description"),
)
"""Methods and paths that take no body, and what they do."""
_UNSUPPORTED: Final = "x-unsupported"


class _Schemas(GenerateJsonSchema):
    """Marks fields that are known and refused."""

    def handle_invalid_for_json_schema(self, schema: CoreSchema, error_info: str) -> JSON:
        """Called for a validator that names no type, as `Unless` does."""
        return {_UNSUPPORTED: True}


@cache
def description(posts: Posts) -> JSON:
    """The document."""
    models = [(model, "validation") for _, model, _ in posts]
    _, schemas = models_json_schema(
        models,  # type: ignore[arg-type]  # a literal that is inferred as str
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    for schema in schemas["$defs"].values():
        _drop_unsupported(schema)
    paths: JSON = {path: {"post": _post(model, summary)} for path, model, summary in posts}
    paths["/v1/files"] = {"post": _UPLOAD}
    for method, path, summary in PAGES:
        paths.setdefault(path, {})[method] = _page(path, summary)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _drop_unsupported(schema: dict[str, Any]) -> None:
    given = schema.get("properties", {})
    for name in [name for name, one in given.items() if one.get(_UNSUPPORTED)]:
        del given[name]


def _post(model: type[BaseModel], summary: str) -> JSON:
    body = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": {"description": "The answer"}, "default": _ERROR},
    }


def _page(path: str, summary: str) -> JSON:
    named = path.partition("{")[2].partition("}")[0]
    name = {"name": named, "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "summary": summary,
        **({"parameters": [name]} if named else {}),
        "responses": {"200": {"description": "The answer"}, "default": _ERROR},
    }


_ERROR: Final = {"description": "An error: docs/errors.md has all of them"}
_FORM: Final = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer"},
    },
}
_UPLOAD: Final = {
    "summary": "Uploads a file of requests, as in OpenAI's API",
    "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}},
    "responses": {"200": {"description": "The answer"}, "default": _ERROR},
}
