"""How a worker comes by the first token of a prompt, and the parts of a worker that decide it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from router.workers.load_estimate import Capacity

NONE: Final[Mapping[str, int]] = MappingProxyType({})


class Peer(Protocol):
    """The parts of a worker that policies use."""

    @property
    def worker_id(self) -> str:
        """Its stable name."""
        ...

    @property
    def agent_name(self) -> str:
        """Name of its transfer agent, which is new at every start; empty if it has none."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of a KV page."""
        ...

    def capacity(self) -> Capacity:
        """Its capacity, by the router's estimate."""
        ...

    def can_fetch_from(self, other: Self) -> bool:
        """Whether it could fetch pages from another worker now."""
        ...

    def path_bytes_per_s(self, other: Self) -> float:
        """Measured rate of the path between the two; 0 while unknown."""
        ...


class Way(NamedTuple):
    """How a worker comes by the first token of a prompt."""

    seconds: float
    """Until then, by estimate, the delay of other streams included."""
    cached_tokens: int = 0
    """Tokens that it need not compute."""
    holder: Peer | None = None
    """The peer from which it fetches pages; None: from nobody."""
    fetched_pages: int = 0
    """The leading pages that it has after the fetch."""
    again: Mapping[str, int] = NONE
    """Pages that it computes although another worker holds them, by reason."""
    just_routed: bool = False
    """Whether it does not hold all of the cached tokens yet."""
