"""Reads requests: the part that those of every method share, and the errors of all.

Unknown fields are ignored and dropped, as is usual for these APIs. Some known fields change the
result and are not supported. They are refused by name, unless their value asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

from pydantic import BeforeValidator, ValidationError

from router import errors
from router.doors.http.values import ApiObject, name_of
from router.errors import Violation
from router.requests.bounds import LEAST_ELEMENTS

_WRONG_KEY: Final = "[key]"
"""What pydantic adds to the place of a key that is wrong."""


class Body(ApiObject):
    """The body of a request."""

    def refused(self) -> list[Violation]:
        """Violations: fields that are not supported, or that contradict each other."""
        return self.refusals("")


class ModelRequest(Body):
    """The part that every request to a model has."""

    model: Annotated[str, BeforeValidator(name_of)] = ""
    """May be left out if just one model is served."""


def said(texts: list[str]) -> dict[str, Any]:
    """The fields of a turn that hold its texts. Several are parts, which some chat templates go
    through."""
    return {"content_parts": texts} if len(texts) > 1 else {"content": "".join(texts)}


Request = TypeVar("Request", bound=Body)


def parse(kind: type[Request], body: bytes, most_ids: int = LEAST_ELEMENTS) -> Request:
    """Reads a request whose shape was checked (`router.requests.bounds.BodyShape`).

    Args:
        kind: the kind of request.
        body: JSON.
        most_ids: most ids that a prompt may have.

    Raises:
        RouterError: MALFORMED_REQUEST, or INVALID_FIELD with every violation.
    """
    try:
        request = kind.model_validate_json(body, context={"most_ids": most_ids})
    except ValidationError as error:
        raise _refusal(error) from None
    if found := request.refused():
        raise errors.invalid_fields(found)
    return request


def _refusal(error: ValidationError) -> errors.RouterError:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    if any(detail["type"] == "json_invalid" for detail in details):
        return errors.malformed_request("the body is not JSON")
    shown = details[: errors.MAX_VIOLATIONS]
    found = [Violation(_path(detail["loc"]), detail["msg"]) for detail in shown]
    return errors.invalid_fields(found, len(details))


def _path(location: tuple[int | str, ...]) -> str:
    """The path of a location, such as `messages[0].content`. An empty location is the body
    itself. Names of kinds among which a value may choose, and keys that are wrong, are no part of
    it."""
    if location[-1:] == (_WRONG_KEY,):
        location = location[:-2]
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("literal[") and not part[:1].isupper():
            path += f".{part}"
    return path.lstrip(".") or "body"
