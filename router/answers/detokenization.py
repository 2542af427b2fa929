"""Turns token ids into text as they come, one choice at a time.

A token may be half a character, and a decoder may treat the first token of a text unlike the rest
(a leading space), so tokens cannot be decoded one by one. `Detokenizer` decodes a short window of
the latest tokens again with each new one. Invariants, where `text` is the window's text:

- earlier calls returned `text[:released]`, and this part does not change as the window grows;
- U+FFFD at its end may still become a character. It is returned when something else follows it, or
  at the end. A byte of a character can turn all bytes before it into U+FFFD until the character is
  complete (byte fallback does so), but only while it can be completed: `_BROKEN_AFTER`;
- the window starts at the start of a character.

`StopTexts` then holds back text that may be the beginning of a stop text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

_REPLACEMENT: Final = "\ufffd"
_BROKEN_AFTER: Final = 3
"""A character may be incomplete for this many tokens. After more, its bytes are broken."""
_WINDOW_TOKENS: Final = 12
"""Longest window, to bound the cost. A window of broken bytes may have twice this length."""
CONTEXT_TOKENS: Final = 4
"""Tokens kept from the prompt, and from a run of broken bytes. They are more than the bytes of a
character before its last."""


class Decoder(Protocol):
    """The part of a tokenizer that is used here."""

    special_ids: frozenset[int]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, with U+FFFD for bytes that are no character."""
        ...


class NamingDecoder(Protocol):
    """The part of a tokenizer that can also write special tokens by their names."""

    special_ids: frozenset[int]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        ...


class ShowsSpecial:
    """A decoder that writes some special tokens by their names."""

    def __init__(self, decoder: NamingDecoder, shown_ids: frozenset[int]) -> None:
        self._decoder = decoder
        self.special_ids = decoder.special_ids - shown_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids. `Detokenizer` drops the special ones that are not shown."""
        return self._decoder.decode(token_ids, skip_special_tokens=False)


class Detokenizer:
    """Text of one choice's tokens, at character boundaries.

    The returned texts, joined, are the text that the tokens add to the prompt: the decoded whole
    without the decoded prompt.
    """

    def __init__(self, decoder: Decoder, prompt_ids: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._window = self._context(prompt_ids)
        self._released = len(decoder.decode(self._window)) if self._window else 0
        self._boundary = 0
        """Window index of the start of a character: the last start but one."""
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
        """Returns the rest: bytes at the very end that never became a character."""
        text = self._decoder.decode(self._window)
        new = text[self._released :]
        self._released = len(text)
        return new

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, which decide about a leading space.

        There are none if the prompt ends in half a character. This cannot be distinguished from
        broken bytes, so the output is then decoded by itself.
        """
        special = self._decoder.special_ids
        tail = [one for one in prompt_ids[-CONTEXT_TOKENS:] if one not in special]
        return [] if self._decoder.decode(tail).endswith(_REPLACEMENT) else tail

    def _stable_length(self, text: str) -> int:
        """Length of `text` without the U+FFFD at its end that may still become a character."""
        held = len(text) - len(text.rstrip(_REPLACEMENT))
        if len(self._window) - self._latest_boundary > _BROKEN_AFTER:
            held = min(held, _BROKEN_AFTER)
        return len(text) - held

    def _shorten(self, whole: bool) -> None:
        """Drops the tokens before the last boundary but one, where the text was complete.

        A long run of broken bytes has no boundary. Then the cut only has to leave more tokens than
        an incomplete character has bytes, since no character starts with another one's later byte.
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
    """Text to release, and the stop text that was found, if any."""

    text: str
    met: str | None = None


class StopTexts:
    """Finds the stop text that ends first. Holds back text that may be the beginning of one.

    Invariant: `_held` is the longest end of the text so far that begins a stop text, so every later
    match starts inside it. If several stop texts end at one place, the longest counts. The result
    does not depend on the tokens into which the text is cut.

    Hidden text, the name of a special token that is not shown, can be a part of a stop text. It is
    never released.
    """

    def __init__(self, texts: Sequence[str], include_stop: bool = False) -> None:
        self._texts = sorted(set(texts), key=len, reverse=True)
        self._longest = len(self._texts[0]) if self._texts else 0
        self._include_stop = include_stop
        self._held = ""
        self._hidden: list[range] = []
        """Parts of `_held` that are hidden, in order."""

    def push(self, text: str, may_stop: bool = True, *, hidden: bool = False) -> StopMatch:
        """Adds text. With `may_stop` False (too few tokens yet) a match is plain text."""
        pending = self._held + text
        if hidden:
            self._hidden.append(range(len(self._held), len(pending)))
        if may_stop and (found := self._first_match(pending, len(self._held))) is not None:
            met, end = found
            before, self._held = self._release(pending, end - len(met)), ""
            return StopMatch(before + met if self._include_stop else before, met)
        released = len(pending) - self._held_length(pending)
        self._held = pending[released:]
        return StopMatch(self._release(pending, released))

    def finish(self) -> str:
        """Returns the text that was held back, since it begins no stop text."""
        held, self._held = self._held, ""
        return self._release(held, len(held))

    def _release(self, text: str, end: int) -> str:
        """What is shown of `text[:end]`. The rest stays hidden as it is."""
        if not self._hidden:
            return text[:end]
        hidden = {at for part in self._hidden for at in part}
        moved = (range(max(part.start - end, 0), part.stop - end) for part in self._hidden)
        self._hidden = [part for part in moved if part]
        return "".join(one for at, one in enumerate(text[:end]) if at not in hidden)

    def _first_match(self, text: str, held: int) -> tuple[str, int] | None:
        """The stop text that ends first after `text[:held]`, and the index after it."""
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
