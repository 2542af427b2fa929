"""Who holds which pages of a prompt, as the workers have told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from prefixes.index import Held
    from router.jobs import Demand


class Holdings(Protocol):
    """What placement may ask. It may be old, or wrong: workers decide what is true."""

    def held(self, demand: Demand) -> Mapping[str, Held]:
        """The leading pages of the demand's prompt, by `WorkerLink.worker_id`. Workers that hold
        none are left out."""
        ...


class NoHoldings:
    """Nobody is known to hold anything."""

    def held(self, demand: Demand) -> Mapping[str, Held]:
        """See `Holdings`."""
        return {}


NO_HOLDINGS: Final = NoHoldings()
