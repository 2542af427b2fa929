"""What the scheduler asks of the tiers below the pool, and an engine without any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.loads import TierLoad
from engine.pages.prefix import ReportPages
from engine.types import PageIds


@dataclass(eq=False, slots=True)
class Wait:
    """What a request waits for: pages of its prompt that are on their way into the pool."""

    under_way: set[object] = field(default_factory=set)
    """Copies and fetches that have not ended."""
    pinned: PageIds = field(default_factory=lambda: np.zeros(0, np.int32))
    """Pages in the pool that the request will find, held meanwhile."""
    loaded_pages: Counter[str] = field(default_factory=Counter)
    """Pages that came for it, by the name of their tier."""

    coming_pages: int = 0
    """Pages that come from lower tiers."""

    @property
    def is_over(self) -> bool:
        """Whether the request may be admitted."""
        return not self.under_way


class PageTiers(Protocol):
    """The tiers. Only the step loop's thread calls them, and no call waits."""

    on: bool
    """Whether there are any."""

    def wakes(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, on any thread, when `turn` has something to read."""
        ...

    def turn(self) -> None:
        """Reads which copies have ended and begins others."""
        ...

    def begin(
        self,
        keys: Sequence[bytes],
        room: int,
        queued_tokens: int,
        others_room: Sequence[int] = (),
    ) -> Wait | None:
        """Begins to load what the pool lacks of a prompt, if that is sooner than computing it.

        Args:
            keys: the keys of the prompt's pages.
            room: pages that may be taken.
            queued_tokens: tokens that are computed before the prompt's.
            others_room: pages that may be taken of groups 1, 2, ...

        Returns:
            What the request waits for; None: there is no room now.
        """
        ...

    def preempted(self, pages: PageIds) -> None:
        """Saves those pages of a preempted sequence that have a key. They are still held by it, and
        by the tiers until they are saved."""
        ...

    def published(self, keys: Sequence[bytes], first: int) -> None:
        """The pages of a sequence from index `first` on have their keys now. `keys` has those of
        all its pages."""
        ...

    def drop(self, key: bytes, group: int) -> None:
        """The page of a group with this key is wrong: host memory must not have it."""
        ...

    def report_pages(self, report: ReportPages) -> None:
        """Reports the pages in host memory from now on; see `engine.pages.prefix.report_pages`."""
        ...

    def note_rate(self, tokens_per_s: float) -> None:
        """Prompt tokens that this engine computes in a second; 0: unknown."""
        ...

    @property
    def leaving_pages(self) -> int:
        """Held pages that come free when their copies end."""
        ...

    def wait_s(self, most_s: float) -> float:
        """Seconds until the next deadline, at most `most_s`."""
        ...

    def load(self) -> TierLoad | None:
        """Stats; None without tiers."""
        ...

    def add_holders(self, holders: NDArray[np.int32], group: int = 0) -> None:
        """Adds the pages of a group that the tiers hold to `holders` ([num_pages])."""
        ...

    def stop(self) -> None:
        """Ends all threads."""
        ...

    # For fetches (`engine.tiers.peers`), which are one more thing that a request waits for.

    def is_coming(self, key: bytes, group: int = 0) -> bool:
        """Whether the page of a group with this key is being loaded."""
        ...

    def fetched(self, wait: Wait) -> None:
        """A fetch that the request waited for has ended."""
        ...

    def bring(self, keys: Sequence[Sequence[bytes]], rooms: Sequence[int]) -> Wait:
        """Begins to load those of the leading keys that are in host slots, for a peer. Of several
        groups all keys come or none.

        Args:
            keys: by group, the keys of pages.
            rooms: by group, pages that may be taken.

        Returns:
            What to wait for. It is over if all are in the pool, or if nothing can be loaded now.
        """
        ...


class NoTiers:
    """An engine whose pages live in the pool alone."""

    on = False
    leaving_pages = 0

    def wakes(self, wake: Callable[[], None]) -> None:
        """Never."""

    def turn(self) -> None:
        """Nothing to read."""

    def begin(
        self,
        keys: Sequence[bytes],
        room: int,
        queued_tokens: int,
        others_room: Sequence[int] = (),
    ) -> Wait | None:
        """Nothing to wait for."""
        return Wait()

    def preempted(self, pages: PageIds) -> None:
        """Nothing to save."""

    def published(self, keys: Sequence[bytes], first: int) -> None:
        """Does nothing."""

    def drop(self, key: bytes, group: int) -> None:
        """Nothing to drop."""

    def report_pages(self, report: ReportPages) -> None:
        """Nothing to report."""

    def note_rate(self, tokens_per_s: float) -> None:
        """Does nothing."""

    def wait_s(self, most_s: float) -> float:
        """No deadline."""
        return most_s

    def load(self) -> TierLoad | None:
        """None."""
        return None

    def add_holders(self, holders: NDArray[np.int32], group: int = 0) -> None:
        """None held."""

    def stop(self) -> None:
        """Nothing to end."""

    def is_coming(self, key: bytes, group: int = 0) -> bool:
        """Never."""
        return False

    def fetched(self, wait: Wait) -> None:
        """Nothing to let go."""

    def bring(self, keys: Sequence[Sequence[bytes]], rooms: Sequence[int]) -> Wait:
        """Nothing to wait for."""
        return Wait()
