"""Makes matchers from the options of requests, and fills masks."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from engine.masks.rules import AllowedTokens, BadWords, MinTokens, Rule, ThinkingEnds
from engine.step.sampling import words_of
from engine.stopping import end_ids
from engine.types import FailureReason, Request

Masks = NDArray[np.int32]
"""[M, W]"""

ITEMS_A_MASK: Final = 15_000
"""Most parser items that one mask may take. A schema with 150 optional properties needs up to
14,000: 10,000 end 9 of 24 texts, 15,000 none. A grammar made to be ambiguous is stopped where a
mask takes 0.2 s, which every row of the step waits for; with 25,000 that is 0.8 s
(`tests/router/test_structure_fuel.py`)."""
LIMITS: Final = LLParserLimits(step_max_items=ITEMS_A_MASK, verbose_errors=False)
"""Fuel of a compilation and of each mask. Errors do not show the grammar. A router checks with the
same (`router.structure.schema`)."""
KEPT_COMPILATIONS: Final = 128
"""Compiled grammars that are kept, the latest used ones; the largest allowed take 1 MB each."""
MASK_THREADS: Final = max(1, min(16, os.cpu_count() or 1))
"""Threads that fill the masks of a step."""
STACK_BYTES: Final = 64 << 20
"""Stack of the thread that compiles. llguidance recurses along chains of rules, by some 3 KB a
rule. A router has checked each grammar with a 64th of it (`router.structure.checking`)."""
_ALL: Final = np.int32(-1)
_THREADS_START: Final = threading.Lock()


class GrammarError(Exception):
    """A grammar cannot be followed here: it needs more fuel than it has, or is not one; or what
    narrows the tokens leaves none from the beginning."""

    def __init__(self, what: str, reason: FailureReason = FailureReason.STRUCTURE) -> None:
        super().__init__(what)
        self.reason = reason


class TokenMatcher:
    """Follows one sequence and knows the tokens that it may draw next."""

    def __init__(self, grammar: LLMatcher | None, rules: Sequence[Rule] = ()) -> None:
        self.grammar = grammar
        self._rules = tuple(rules)

    @property
    def is_broken(self) -> bool:
        """Whether the grammar cannot go on, because its fuel was spent."""
        return self.grammar is not None and self.grammar.is_error()

    @property
    def failure(self) -> FailureReason:
        """Why no token may be drawn, where none may."""
        return FailureReason.STRUCTURE if self.is_broken else FailureReason.NO_TOKEN

    def consume(self, token_ids: Sequence[int]) -> None:
        """Takes the sequence's next tokens."""
        if self.grammar is not None and token_ids:
            self.grammar.consume_tokens(list(token_ids))
        for rule in self._rules:
            rule.consume(token_ids)

    def narrow(self, masks: Masks, index: int, drafts: Sequence[int]) -> int:
        """Applies the rules to the grammar's masks of output token `index` and of those behind the
        drafts. Where a mask leaves no token, all may be drawn, so that the row yields one, which
        nobody takes.

        Args:
            masks: [1 + drafts, W].
            index: of the first of them.
            drafts: the tokens between them.

        Returns:
            How many leading masks hold. 0: there is no token left, or the fuel is spent.
        """
        holding = len(masks)
        if self.grammar is not None and drafts:
            holding = 1 + self.grammar.validate_tokens(list(drafts))
        rules = [rule.copy() for rule in self._rules] if drafts else self._rules
        for column, bits in enumerate(masks[:holding]):
            for rule in rules:
                if column:
                    rule.consume(drafts[column - 1 : column])
                rule.narrow(bits, index + column)
            if self.is_broken or not bits.any():
                bits[:] = _ALL
                return column
        return holding


class Wanted(NamedTuple):
    """Masks that a step needs of one matcher: one, and one behind each draft."""

    matcher: TokenMatcher
    place: int
    """Output index of the first token."""
    drafts: Sequence[int] = ()

    @property
    def masks(self) -> int:
        """How many they are."""
        return 1 + len(self.drafts)


class Matchers:
    """Makes matchers for one model. Safe to use from several threads."""

    def __init__(self, folder: str, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._folder = Path(folder)
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._thread = _thread_with_stack()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[bytes, int], LLMatcher] = OrderedDict()
        self._turns = itertools.cycle(range(MASK_THREADS))

    @staticmethod
    def are_wanted(request: Request) -> bool:
        """Whether the tokens of a request are restricted."""
        return request.sampling.is_restricted

    def prepare(self, request: Request) -> Future[list[TokenMatcher]]:
        """Makes one matcher for each choice, which have taken the choices' earlier tokens.

        Raises:
            GrammarError: from the future.
        """
        return self._thread.submit(self._prepare, request)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, request: Request) -> list[TokenMatcher]:
        options, stop = request.sampling, request.stop
        rules: list[Rule] = []
        if options.allowed_token_ids:
            rules.append(AllowedTokens(options.allowed_token_ids, self._vocab_size))
        if options.bad_words:
            rules.append(BadWords(options.bad_words))
        if options.thinking is not None:
            rules.append(ThinkingEnds(options.thinking, self._vocab_size))
        if stop.min_tokens:
            ends = end_ids(stop, self._eos_ids)
            rules.append(MinTokens(stop.min_tokens, ends, self._vocab_size))
        matchers = [
            TokenMatcher(
                self._grammar(options.grammar) if options.grammar else None,
                [rule.copy() for rule in rules],
            )
            for _ in range(request.choices)
        ]
        for matcher, tokens in zip(matchers, request.generated, strict=False):
            matcher.consume(tokens.tolist())
        if any(matcher.is_broken for matcher in matchers):
            raise GrammarError("the grammar's fuel is spent")
        if (options.allowed_token_ids or options.bad_words) and not request.generated:
            self._look_ahead(matchers[0])
        return matchers

    def _look_ahead(self, matcher: TokenMatcher) -> None:
        """Finds out before a prompt is computed that it can have no first token.

        Raises:
            GrammarError: it can have none.
        """
        masks = np.full((1, words_of(self._vocab_size)), _ALL)
        if matcher.grammar is not None:
            matcher.grammar.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        if not matcher.narrow(masks, 0, ()):
            raise GrammarError("no first token", matcher.failure)

    def _grammar(self, text: str) -> LLMatcher:
        """A matcher at the beginning of a text.

        Copies of one compiled grammar share its lexer, which one thread may use at a time. So a
        grammar is compiled as often as there are threads, and matchers take turns.
        """
        key = hashlib.sha256(text.encode()).digest(), next(self._turns)
        compiled = self._compiled.pop(key, None)
        if compiled is None:
            compiled = LLMatcher(self._load(), text, log_level=0, limits=LIMITS)
            if compiled.is_error():
                raise GrammarError("the grammar cannot be compiled")
        self._compiled[key] = compiled
        if len(self._compiled) > KEPT_COMPILATIONS:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:
            file = self._folder / "tokenizer.json"
            if not file.is_file():
                raise GrammarError("the model has no tokenizer")
            self._tokenizer = read_tokenizer(file, self._vocab_size, self._eos_ids)
        return self._tokenizer


def _thread_with_stack() -> ThreadPoolExecutor:
    """A pool of one thread. Stacks of threads are set for the whole process, so it starts now."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="baton-grammars")
    with _THREADS_START:
        before = threading.stack_size(STACK_BYTES)
        try:
            pool.submit(int).result()
        finally:
            threading.stack_size(before)
    return pool


def read_tokenizer(file: Path, vocab_size: int, eos_ids: Iterable[int]) -> LLTokenizer:
    """Reads a `tokenizer.json`. Ids beyond its own vocabulary are never allowed."""
    return LLTokenizer(file.read_text(encoding="utf-8"), vocab_size, list(eos_ids))


class MaskFiller:
    """Fills the masks of a step, the grammars' on several threads with the interpreter released."""

    def __init__(self) -> None:
        self._pool = LLExecutor(MASK_THREADS)

    def fill(self, masks: Masks, wanted: Sequence[Wanted]) -> list[int]:
        """Fills the masks of each matcher, behind each other.

        Args:
            masks: [M, W], contiguous.
            wanted: M masks in all, of each matcher once.

        Returns:
            For each matcher how many of its masks hold; see `TokenMatcher.narrow`.
        """
        masks.fill(_ALL)
        firsts = list(itertools.accumulate((one.masks for one in wanted), initial=0))
        grammars = [
            (one.matcher.grammar, first, list(one.drafts))
            for one, first in zip(wanted, firsts, strict=False)
            if one.matcher.grammar is not None and not one.matcher.is_broken
        ]
        at = masks.ctypes.data, 4 * masks.shape[1], len(masks)
        behind = [asked for asked in grammars if asked[2]]
        alone = [(grammar, row) for grammar, row, drafts in grammars if not drafts]
        if behind:
            self._pool.unsafe_compute_mask_ptr_with_draft_token(behind, *at)
        if alone:
            self._pool.unsafe_compute_mask_ptr(alone, *at)
        return [
            one.matcher.narrow(masks[first : first + one.masks], one.place, one.drafts)
            for one, first in zip(wanted, firsts, strict=False)
        ]
