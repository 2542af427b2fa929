"""Token ids to text, as they come, one choice at a time.

A token may be half a character, and a decoder may treat the first token of a text unlike the rest
(a leading space), so tokens cannot be decoded one by one. `Detokenizer` decodes a short window of
the latest tokens again with each new one. Invariants, where `text` is the window's text:

- `text[:released]` is what earlier calls returned of it; it does not change as the window grows;
- U+FFFD at its end may still become a character, and is returned when something else follows it
  or at the end. A byte of a character can turn all bytes before it into U+FFFD until the character
  is complete (byte fallback does so), but only as long as it can be completed: `_BROKEN_AFTER`;
- the window starts where a character starts.

`StopTexts` then holds back what may be the beginning of a stop text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

_REPLACEMENT: Final = "\ufffd"
_BROKEN_AFTER: Final = 3
"""A character lacks at least its last byte for this many tokens; after more, bytes are broken."""
_WINDOW_TOKENS: Final = 12
"""A longer window is shortened, one of broken bytes at twice the length: this bounds the cost."""
CONTEXT_TOKENS: Final = 4
"""Kept of the prompt, and of a run of broken bytes: more tokens than a character has bytes
before its last."""


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    special_ids: frozenset[int]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, U+FFFD for what is no character."""
        ...


class Detokenizer:
    """Text of one choice's tokens, at character boundaries.

    All that is returned, joined, is the text that the tokens add to the prompt's: the decoded whole
    without the decoded prompt.
    """

    def __init__(self, decoder: Decoder, prompt_ids: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._window = self._context(prompt_ids)
        self._released = len(decoder.decode(self._window)) if self._window else 0
        self._boundary = 0
        """Window index of the latest but one place where a character started."""
        self._latest_boundary = len(self._window)

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that became complete with it."""
        if token_id in self._decoder.special_ids:
            return ""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        stable = self._stable_length(text)
        new = text[self._released : stable]
        self._released = max(self._released, stable)
        if stable == len(text):
            self._boundary, self._latest_boundary = self._latest_boundary, len(self._window)
        if len(self._window) > _WINDOW_TOKENS:
            self._shorten(whole=stable == len(text))
        return new

    def finish(self) -> str:
        """The rest: bytes at the very end that never became a character."""
        text = self._decoder.decode(self._window)
        new = text[self._released :]
        self._released = len(text)
        return new

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, which decide about a leading space; none if half a character.

        Half a character at the end of a prompt of ids cannot be told from broken bytes: the output
        then stands for itself.
        """
        special = self._decoder.special_ids
        tail = [one for one in prompt_ids[-CONTEXT_TOKENS:] if one not in special]
        return [] if self._decoder.decode(tail).endswith(_REPLACEMENT) else tail

    def _stable_length(self, text: str) -> int:
        """Length of `text` without the U+FFFD at its end that may yet become a character."""
        held = len(text) - len(text.rstrip(_REPLACEMENT))
        if len(self._window) - self._latest_boundary > _BROKEN_AFTER:
            held = min(held, _BROKEN_AFTER)
        return len(text) - held

    def _shorten(self, whole: bool) -> None:
        """Drops tokens before the latest but one boundary, where text was whole.

        In a long run of broken bytes there is none; then any cut will do that leaves more tokens
        than an incomplete character has bytes, since a character's first byte is no other's second.
        """
        if whole:
            start = self._boundary
        elif len(self._window) > 2 * _WINDOW_TOKENS:
            start = len(self._window) - CONTEXT_TOKENS
        else:
            return
        self._window = self._window[start:]
        self._boundary = 0
        self._latest_boundary = max(0, self._latest_boundary - start)
        self._released = self._stable_length(self._decoder.decode(self._window))


class StopMatch(NamedTuple):
    """Text to release, and the stop text that was met, if one was."""

    text: str
    met: str | None = None


class StopTexts:
    """Finds the stop text that ends first; holds back what may be the beginning of one.

    Invariant: `_held` is the longest end of the text so far that begins a stop text, so every later
    match starts inside it. Of several that end at one place the longest counts. The result does not
    depend on how the text is cut into tokens.
    """

    def __init__(self, texts: Sequence[str], include_stop: bool = False) -> None:
        self._texts = sorted(set(texts), key=len, reverse=True)
        self._longest = len(self._texts[0]) if self._texts else 0
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> StopMatch:
        """Adds text. With `may_stop` False (too few tokens yet) a match is plain text."""
        pending = self._held + text
        if may_stop and (found := self._first_match(pending, len(self._held))) is not None:
            met, end = found
            self._held = ""
            return StopMatch(pending[: end if self._include_stop else end - len(met)], met)
        held = self._held_length(pending)
        self._held = pending[len(pending) - held :]
        return StopMatch(pending[: len(pending) - held])

    def finish(self) -> str:
        """The text that was held back and began no stop text after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, held: int) -> tuple[str, int] | None:
        """The stop text that ends first behind `text[:held]`, and the index behind it."""
        best: tuple[str, int] | None = None
        for stop in self._texts:
            start = text.find(stop, max(0, held + 1 - len(stop)))
            if start >= 0 and (best is None or start + len(stop) < best[1]):
                best = stop, start + len(stop)
        return best

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop text."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._texts):
                return length
        return 0
