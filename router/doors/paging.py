"""Pages of a list over HTTP, as OpenAI has them: `limit`, `after`, `order`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from router.errors import RouterError, Violation, invalid_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_LISTED: Final = 100
"""Entries of a page. OpenAI's own bound."""
_ORDERS: Final = ("asc", "desc")


class Page(NamedTuple):
    """The page that a client wants."""

    limit: int
    after: str
    """Id of the entry before; empty: the page is the first one."""
    oldest_first: bool

    def shown(self, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The page of what stands behind `after`, or of its first `limit` + 1 entries."""
        shown = found[: self.limit]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(found) > self.limit,
        }


def page_of(query: Mapping[str, str], usual: int, most: int = MOST_LISTED) -> Page:
    """Reads what a client wants.

    Args:
        query: of the address.
        usual: entries of a page whose request does not say how many.
        most: entries that a request may name. It gets `MOST_LISTED` of them.

    Raises:
        RouterError: INVALID_FIELD.
    """
    limit, order = query.get("limit", str(usual)), query.get("order", "desc")
    if not is_number(limit, 1, most):
        raise invalid_fields([Violation("limit", f"must be in [1, {most}]")])
    if order not in _ORDERS:
        raise invalid_fields([Violation("order", "must be asc or desc")])
    return Page(min(int(limit), MOST_LISTED), query.get("after", ""), order == "asc")


def lost_place() -> RouterError:
    """Nothing has the id that `after` names. An empty page would look like the end of the list."""
    return invalid_fields([Violation("after", "names no entry of the list")])


def is_number(said: str, least: int, most: int) -> bool:
    """Whether a text is a short number within bounds."""
    is_short = said.isascii() and said.isdigit() and len(said) < 10
    return is_short and least <= int(said) <= most
