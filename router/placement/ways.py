"""How a worker comes by the first token of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from router.workers.link import WorkerLink

NONE: Final[Mapping[str, int]] = MappingProxyType({})


class Way(NamedTuple):
    """How a worker comes by the first token of a prompt."""

    seconds: float
    """Until then, by estimate, the delay of other streams included."""
    cached_tokens: int = 0
    """Tokens that it need not compute."""
    holder: WorkerLink | None = None
    """The peer from which it fetches pages; None: from nobody."""
    fetched_pages: int = 0
    """The leading pages that it has after the fetch."""
    again: Mapping[str, int] = NONE
    """Pages that it computes although another worker holds them or is about to, by reason."""
    just_routed: bool = False
    """Whether it does not hold all of the cached tokens yet."""
