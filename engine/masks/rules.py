"""Rules beside a grammar that narrow a mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.step.sampling import words_of
from engine.types import ThinkingBudget

Bits = NDArray[np.int32]
"""[W]: bit i % 32 of word i // 32 stands for token i."""


class Rule(Protocol):
    """Narrows the masks of one sequence."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Takes the sequence's next tokens."""
        ...

    def narrow(self, bits: Bits, index: int) -> None:
        """Clears bits of the mask of output token `index`."""
        ...

    def copy(self) -> Rule:
        """A rule for another sequence with the same tokens so far."""
        ...


class AllowedTokens:
    """Allows only the given tokens."""

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        self._bits = bits_of(token_ids, vocab_size)

    def consume(self, token_ids: Sequence[int]) -> None:
        """Does not depend on them."""

    def narrow(self, bits: Bits, index: int) -> None:
        """Clears all other tokens."""
        bits &= self._bits

    def copy(self) -> AllowedTokens:
        """Has no state."""
        return self


class BadWords:
    """Forbids the last token of each word once the tokens before it have been drawn."""

    def __init__(self, words: Iterable[Sequence[int]], tail: Sequence[int] = ()) -> None:
        self._words = [tuple(word) for word in words]
        self._longest = max((len(word) for word in self._words), default=1) - 1
        self._tail = tuple(tail)

    def consume(self, token_ids: Sequence[int]) -> None:
        """Remembers as many tokens as the longest word needs."""
        tail = (*self._tail, *token_ids)
        self._tail = tail[len(tail) - self._longest :] if len(tail) > self._longest else tail

    def narrow(self, bits: Bits, index: int) -> None:
        """Clears the tokens that would complete a word."""
        for *first, last in self._words:
            if not first or self._tail[-len(first) :] == tuple(first):
                _clear(bits, last)

    def copy(self) -> BadWords:
        """One with a tail of its own."""
        return BadWords(self._words, self._tail)


class MinTokens:
    """Forbids to end before `least` tokens, unless nothing else is left: a grammar that has come to
    its end is stronger."""

    def __init__(self, least: int, end_ids: Iterable[int], vocab_size: int) -> None:
        self._least = least
        self._others = ~bits_of(end_ids, vocab_size)

    def consume(self, token_ids: Sequence[int]) -> None:
        """Does not depend on them."""

    def narrow(self, bits: Bits, index: int) -> None:
        """Clears the tokens that end the sequence."""
        if index < self._least and (narrowed := bits & self._others).any():
            bits[:] = narrowed

    def copy(self) -> MinTokens:
        """Has no state."""
        return self


class ThinkingEnds:
    """Ends the thinking of a model when its tokens are spent: then only the tokens that end it may
    be drawn, one after the other."""

    def __init__(self, budget: ThinkingBudget, vocab_size: int) -> None:
        self._budget = budget
        self._vocab_size = vocab_size
        self._tokens: tuple[int, ...] = ()
        """All tokens so far, while the sequence thinks; then nothing is kept."""
        self._is_over = False

    def consume(self, token_ids: Sequence[int]) -> None:
        """Looks for the beginning and the end of the thinking."""
        if self._is_over:
            return
        begin, end = self._budget.begin_ids, self._budget.end_ids
        for token_id in token_ids:
            self._tokens = (*self._tokens, token_id)
            count = min(len(self._tokens), len(begin))
            if self._tokens[:count] != begin[:count] or self._tokens[-len(end) :] == end:
                self._is_over, self._tokens = True, ()
                return
        kept = len(begin) + len(end)
        if len(self._tokens) > kept:
            self._tokens = (*begin, *self._tokens[-len(end) :])

    def narrow(self, bits: Bits, index: int) -> None:
        """Leaves only the next token of the end, once `tokens` of them are spent."""
        begin, end = self._budget.begin_ids, self._budget.end_ids
        if self._is_over or index < max(self._budget.tokens, len(begin)):
            return
        count = len(end) - 1
        while count and self._tokens[-count:] != end[:count]:
            count -= 1
        bits[:] = bits_of((end[count],), self._vocab_size)

    def copy(self) -> ThinkingEnds:
        """Copies the state, for a sequence that forks."""
        other = ThinkingEnds(self._budget, self._vocab_size)
        other._tokens, other._is_over = self._tokens, self._is_over
        return other


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Bits:
    """A mask that has just these tokens; ids beyond the vocabulary are dropped."""
    ids = np.fromiter((one for one in token_ids if 0 <= one < vocab_size), np.int64)
    flags = np.zeros(words_of(vocab_size) * 32, np.uint8)
    flags[ids] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def _clear(bits: Bits, token_id: int) -> None:
    word, bit = divmod(token_id, 32)
    if word < len(bits):
        bits[word] &= np.int32(~(1 << bit)) if bit < 31 else np.int32(0x7FFFFFFF)
