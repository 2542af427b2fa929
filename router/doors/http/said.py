"""An answer that is complete when its method returns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.doors.http.statuses import JSON


class Said:
    """An answer that is complete already."""

    stream = False
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, content: JSON) -> None:
        self._content = content

    async def whole(self) -> JSON:
        """All of it."""
        return self._content

    async def chunks(self) -> AsyncGenerator[JSON, None]:
        """The same."""
        yield self._content

    def failure(self, error: JSON) -> JSON:
        """The error itself."""
        return error
