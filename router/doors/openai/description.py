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
GETS: Final = {
    "/v1/models": "The models that are served",
    "/v1/models/{name}": "One of them",
    "/tokenizer_info": "A model's special tokens and chat template",
    "/version": "The release",
    "/health": "200 while some model can run",
    "/healthz": "The same",
    "/ping": "The same",
}
_UNSUPPORTED: Final = "x-unsupported"


class _Schemas(GenerateJsonSchema):
    """Marks fields that are known and refused."""

    def handle_invalid_for_json_schema(self, schema: CoreSchema, error_info: str) -> JSON:
        """Called for a validator that tells no type, as `Unless` does."""
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
    paths |= {path: {"get": _get(path, summary)} for path, summary in GETS.items()}
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


def _get(path: str, summary: str) -> JSON:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "summary": summary,
        **({"parameters": [name]} if "{name}" in path else {}),
        "responses": {"200": {"description": "The answer"}, "default": _ERROR},
    }


_ERROR: Final = {"description": "An error: docs/errors.md has all of them"}
