"""Requests and tokens by adapter, for a bounded number of names."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from telemetry.metrics.collectors import Labels

MOST_NAMES: Final = 16
"""Adapters that have samples of their own. All others are counted together."""
OTHERS: Final = "other"
"""The label of these. It is no name: names of adapters that are called so are counted here, too."""
KEPT_S: Final = 3600.0
"""An adapter that was not asked for as long makes room for another, as after a new version. What
was counted of it is gone then."""


@dataclass(slots=True)
class _Counts:
    used_s: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    """By outcome."""
    tokens: Counter[str] = field(default_factory=Counter)
    """By kind."""


class AdapterCounts:
    """See the module. The first names that come have samples of their own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._named: dict[str, _Counts] = {}
        self._others = _Counts()

    def ended(self, adapter: str, went_well: bool) -> None:
        """A request has ended."""
        self._of(adapter).requests["ok" if went_well else "failed"] += 1

    def tokens(self, adapter: str, kind: str, count: int) -> None:
        """Tokens of a request; `kind` is "prompt" or "output"."""
        self._of(adapter).tokens[kind] += count

    def by_outcome(self) -> dict[Labels, float]:
        """Requests by adapter and outcome."""
        return self._samples(lambda counts: counts.requests)

    def by_kind(self) -> dict[Labels, float]:
        """Tokens by adapter and kind."""
        return self._samples(lambda counts: counts.tokens)

    def _samples(self, read: Callable[[_Counts], Counter[str]]) -> dict[Labels, float]:
        every = {**self._named, OTHERS: self._others}
        return {
            (name, label): float(value)
            for name, counts in every.items()
            for label, value in read(counts).items()
        }

    def _of(self, adapter: str) -> _Counts:
        found = self._named.get(adapter)
        if found is None:
            if adapter == OTHERS or not self._has_room():
                return self._others
            found = self._named[adapter] = _Counts()
        found.used_s = self._clock()
        return found

    def _has_room(self) -> bool:
        if len(self._named) < MOST_NAMES:
            return True
        oldest = min(self._named, key=lambda name: self._named[name].used_s)
        if self._clock() - self._named[oldest].used_s < KEPT_S:
            return False
        del self._named[oldest]
        return True
