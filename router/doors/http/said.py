"""An answer that is complete when its method returns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING

from router.doors.http.statuses import ignored_header

if TYPE_CHECKING:
    from router.doors.http.statuses import JSON
    from router.doors.straight import Straight


class Said:
    """An answer that is complete already."""

    stream = False
    straight: Straight | None = None

    def __init__(self, content: JSON, ignored: Sequence[str]) -> None:
        """An answer. `ignored`: fields of the request that have no effect."""
        self._content = content
        self.headers: Mapping[str, str] = ignored_header(ignored)

    async def whole(self) -> JSON:
        """All of it."""
        return self._content

    async def chunks(self) -> AsyncGenerator[JSON, None]:
        """Yields the answer in chunks."""
        yield self._content

    def failure(self, error: JSON) -> JSON:
        """The error itself."""
        return error
