"""How many tokens may yet come late, so that prompts are computed in long steps.

Beside sequences that decode, prompts are computed in pieces so short that the others' pace hardly
suffers. A prompt that came in a burst waits the longer for that. Bounds on the time between tokens
are percentiles, though: a small share may come late. That share is a budget here. Every decoded
token earns its part; a step with more of a prompt than the pace allows costs one token for each
sequence that decodes in it, and is made only while the budget lasts, for prompts that were
submitted as urgent, and for all where the batch keeps no pace by itself: each of their pieces
would make as many tokens late. SHORT_STEPS of others come between two: the one behind it is
launched as it begins, so who is delivered during it joins the second, and would wait for both.

What is not spent of WINDOW_TOKENS is kept, and no more: among any n tokens at most

    share * (n + WINDOW_TOKENS)

come late by this, and those of one step.
"""

from __future__ import annotations

from typing import Final

WINDOW_TOKENS: Final = 25_000
SHORT_STEPS: Final = 2


class LateBudget:
    """Told of every step planned."""

    def __init__(self, share: float) -> None:
        """
        Args:
            share: of all tokens, 0 to 1; with 0 none may be late.
        """
        self._share = share
        self._left = self._most = share * WINDOW_TOKENS
        self._since_long = SHORT_STEPS
        """Steps."""

    def suffices(self, decodes: int) -> bool:
        """Whether it will allow long steps with so many, now or later."""
        return 0 < decodes <= self._most

    def steps(self, decodes: int) -> int:
        """How many long steps in which so many sequences decode, at least one, it allows now."""
        return int(self._left / decodes)

    def allows(self, decodes: int) -> bool:
        """Whether the next step may be a long one."""
        return self._since_long >= SHORT_STEPS and self.steps(decodes) > 0

    def planned(self, decodes: int, *, is_long: bool) -> None:
        """A step that decodes so many."""
        self._since_long = 0 if is_long else self._since_long + 1
        self._left = min(self._most, self._left + self._share * decodes)
        if is_long:
            self._left -= decodes
