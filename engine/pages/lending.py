"""Which cached pages a lower tier holds, and which are on loan: being copied there.

A page on loan may be evicted, since nobody waits for a copy. Then the loan is void, although the
copy goes on, and the copier must not use what it reads. A loan is known by its number, because the
page may have another key, or the same one again, before the copy ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from itertools import islice
from typing import Final, NamedTuple

from engine.pages.eviction import EvictionPolicy

COLD_SHARE: Final = 8
"""The coldest pages are an eighth of those that can be evicted. Among them, saved ones go first."""


class Loan(NamedTuple):
    """A page that is being copied to a lower tier."""

    page: int
    key: bytes
    number: int


class Lending:
    """The books of a block manager's loans. `order` has the pages that can be evicted."""

    def __init__(self, order: EvictionPolicy) -> None:
        self._order = order
        self.on = False
        """Whether there is a lower tier."""
        self._saved: set[int] = set()
        self._loans: dict[int, int] = {}
        """Page -> number of its loan."""
        self._numbers = 0
        self._unsaved: OrderedDict[int, None] = OrderedDict()
        """Pages that can be evicted, are not saved and not on loan. The longest idle is first."""
        self.ready = 0
        """Pages that can be evicted and are saved."""

    def idle(self, page: int) -> None:
        """The page can be evicted now."""
        if not self.on:
            return
        if page in self._saved:
            self.ready += 1
        elif page not in self._loans:
            self._unsaved[page] = None

    def in_use(self, page: int) -> None:
        """The page cannot be evicted any more."""
        if not self.on:
            return
        if page in self._saved:
            self.ready -= 1
        else:
            self._unsaved.pop(page, None)

    def saved(self, page: int, *, idle: bool) -> None:
        """A lower tier holds the page's key."""
        self.ready += idle and page not in self._saved
        self._saved.add(page)
        self._unsaved.pop(page, None)

    def unsaved(self, page: int, *, idle: bool) -> None:
        """The lower tier has lost the page's key."""
        if page in self._saved:
            self._saved.remove(page)
            self.ready -= idle
            if idle and page not in self._loans:
                self._unsaved[page] = None

    def unkeyed(self, page: int) -> None:
        """The page has lost its key, and is not in the order of eviction."""
        self._saved.discard(page)
        self._loans.pop(page, None)

    def lacks(self, page: int) -> bool:
        """Whether no lower tier has the page or is about to get it."""
        return page not in self._saved and page not in self._loans

    def evict(self, count: int) -> list[int]:
        """Takes pages out of the order: saved ones among the coldest, then those that no loan would
        lose."""
        if not self.on:
            return [self._order.pop() for _ in range(count)]
        saved: list[int] = []
        lent: list[int] = []
        rest: list[int] = []
        looked_at = max(count, len(self._order) // COLD_SHARE)
        most_saved = min(count, self.ready)  # So a store that hangs makes nobody look at them all.
        for page in islice(self._order.coldest(), looked_at):
            if page in self._saved:
                saved.append(page)
            else:
                (lent if page in self._loans else rest).append(page)
            if len(saved) == most_saved and len(rest) >= count - most_saved:
                break
        chosen = [*saved, *rest, *lent][:count]
        for page in chosen:
            self.in_use(page)
            self._order.evict(page)
        return chosen

    def coldest(self, count: int) -> list[int]:
        """Up to `count` of the pages that can be evicted and that no lower tier has, those that
        are idle longest."""
        return list(islice(self._unsaved, count))

    def lend(self, pages: Iterable[tuple[int, bytes]]) -> list[Loan]:
        """Notes loans of (page, key)."""
        self._numbers += 1
        loans = [Loan(page, key, self._numbers) for page, key in pages]
        for loan in loans:
            self._loans[loan.page] = loan.number
            self._unsaved.pop(loan.page, None)
        return loans

    def end(self, loans: Iterable[Loan], is_idle: Callable[[int], bool]) -> list[Loan]:
        """Ends loans. Returns those that are not void."""
        kept = [loan for loan in loans if self._loans.get(loan.page) == loan.number]
        for page in (loan.page for loan in kept):
            del self._loans[page]
            if is_idle(page) and page not in self._saved:
                self._unsaved[page] = None
        return kept

    def check(self, keyed: Container[int], is_idle: Callable[[int], bool]) -> None:
        """Raises AssertionError if the books are off."""
        assert all(page in keyed for page in self._saved), "a page without a key is saved"
        assert all(page in keyed for page in self._loans), "a page without a key is lent"
        assert self.ready == sum(map(is_idle, self._saved)), "count of saved pages is off"
        idle = sum(map(is_idle, self._unsaved))
        assert idle == len(self._unsaved), "a page in use is among the unsaved"
        assert self.ready + len(self._unsaved) <= len(self._order), "a page counts twice"
