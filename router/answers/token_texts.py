"""The text of each token by itself, and the detokenizer that needs no more than that.

Most decoders write a token as the same bytes wherever it stands, so that a text is the bytes of its
tokens, read as UTF-8. `TokenTexts.of` reads them off a tokenizer of the two usual kinds: byte
level; or tokens with U+2581 for a space, and bytes where none fits. It compares them with what
the tokenizer itself decodes: each id behind another one, and random pairs. One difference, and `of`
gives None: such a tokenizer needs `router.answers.detokenization.Detokenizer`.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from router.answers.detokenization import CONTEXT_TOKENS

if TYPE_CHECKING:
    import tokenizers

_BROKEN: Final = "\ufffd"
_SPACE: Final = "\u2581"
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHORS: Final = "aeiotn"
"""Letters of which one is a token: what stands before the tokens that are compared."""
_PAIRS: Final = 10_000
_PIECES: Final = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""Decoders of vocabularies with U+2581."""
_BATCH: Final = 512
"""Tokens of a run whose text is compared with the tokenizer's own."""


class TokenTexts:
    """What each id of a tokenizer writes inside a text, special tokens by their names.

    `whole[id]` is its text. It is None if the bytes are no characters by themselves, or the token
    stands for one byte where no other fits; then `partial` has the bytes. Ids that the tokenizer
    does not know write nothing.
    """

    def __init__(self, names: dict[int, str], *, is_byte_level: bool) -> None:
        self.whole: list[str | None] = [""] * (max(names, default=-1) + 1)
        self.partial: dict[int, bytes] = {}
        self.is_byte_level = is_byte_level
        self.strips_first = False
        """Whether a text's first space is left out."""
        for token_id, name in names.items():
            if is_byte_level:
                data = _level_bytes(name)
            elif found := _BYTE.fullmatch(name):
                data = bytes.fromhex(found[1])
            else:
                self.whole[token_id] = name.replace(_SPACE, " ")
                continue
            try:
                self.whole[token_id] = data.decode() if is_byte_level else None
            except UnicodeDecodeError:
                self.whole[token_id] = None
            if self.whole[token_id] is None:
                self.partial[token_id] = data

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenTexts | None:
        """Reads a tokenizer's texts; None if its tokens have no text by themselves. Takes a second
        for 256,000 tokens."""
        if backend.decoder is None:
            return None
        decoder = json.loads(backend.decoder.__getstate__())
        kinds = {one["type"] for one in decoder.get("decoders", [decoder])}
        if not (kinds == {"ByteLevel"} or kinds <= _PIECES):
            return None
        names = {one: name for name, one in backend.get_vocab(with_added_tokens=True).items()}
        found = cls(names, is_byte_level=kinds == {"ByteLevel"})
        return found if found._agrees_with(backend) else None

    def detokenizer(
        self, special_ids: frozenset[int], prompt_ids: Sequence[int] = ()
    ) -> ByteDetokenizer:
        """A detokenizer of one choice.

        Args:
            special_ids: tokens that are not shown.
            prompt_ids: what stands before the text.
        """
        kind = ByteDetokenizer if self.is_byte_level else _FallbackDetokenizer
        return kind(self, special_ids, prompt_ids)

    def _agrees_with(self, backend: tokenizers.Tokenizer) -> bool:
        """Whether the tokenizer decodes each id, and many pairs, to the same text."""
        anchor = next((one for one in map(backend.token_to_id, _ANCHORS) if one is not None), None)
        if anchor is None:
            return False
        self.strips_first = self._strips(backend)
        ids, draw = range(len(self.whole)), random.Random(0)
        behind = [*ids, *draw.choices(ids, k=2 * _PAIRS)]
        runs = [anchor] * (2 * len(behind))
        runs[1::2] = behind
        runs += draw.choices(ids, k=2 * _PAIRS)
        written = [self._bytes(one) for one in ids]
        parts = (runs[first : first + _BATCH] for first in range(0, len(runs), _BATCH))
        return all(
            backend.decode(run, skip_special_tokens=False) == self._text(run, written)
            for run in parts
        )

    def _strips(self, backend: tokenizers.Tokenizer) -> bool:
        spaced = next((one for one, text in enumerate(self.whole) if text and text[0] == " "), None)
        return spaced is not None and not backend.decode([spaced, spaced]).startswith(" ")

    def _text(self, token_ids: Sequence[int], written: list[bytes]) -> str:
        """The text of a whole run, of the bytes that each id writes."""
        if self.is_byte_level:
            return self._as_text(b"".join([written[one] for one in token_ids]))
        texts = []
        for is_partial, run in itertools.groupby(token_ids, self.partial.__contains__):
            data = b"".join([written[one] for one in run])
            if not is_partial:
                texts.append(data)
                continue
            is_text = data.decode(errors="ignore").encode() == data
            texts.append(data if is_text else _BROKEN.encode() * len(data))
        return self._as_text(b"".join(texts))

    def _as_text(self, data: bytes) -> str:
        text = data.decode(errors="replace")
        return text.removeprefix(" ") if self.strips_first else text

    def _bytes(self, token_id: int) -> bytes:
        text = self.whole[token_id]
        return self.partial[token_id] if text is None else text.encode()


class ByteDetokenizer:
    """Text of one choice's tokens, at character boundaries: as `Detokenizer`, without decoding."""

    def __init__(
        self, texts: TokenTexts, special_ids: frozenset[int], prompt_ids: Sequence[int]
    ) -> None:
        self._whole, self._partial = texts.whole, texts.partial
        self._known = len(texts.whole)
        self._special_ids = special_ids
        self._pending = b""
        """The beginning of a character: at most three bytes."""
        self._is_plain = not texts.strips_first
        """Whether the next token writes its own text, if that is whole."""
        self._is_first = False
        """Whether a space that comes now is left out."""
        before = [one for one in prompt_ids[-CONTEXT_TOKENS:] if one not in special_ids]
        if texts.strips_first and before:
            ends_whole = not ("".join(map(self.push, before)) + self.finish()).endswith(_BROKEN)
            self._is_plain = ends_whole
        self._is_first = not self._is_plain

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that became complete with it."""
        if token_id in self._special_ids or token_id >= self._known:
            return ""
        text = self._whole[token_id]
        if self._is_plain and text is not None:
            return text
        text = self._add(text) if text is not None else self._add_bytes(self._partial[token_id])
        if self._is_first and text:
            self._is_first = False
            text = text.removeprefix(" ")
        self._is_plain = not (self._pending or self._is_first or self._in_broken_run)
        return text

    def finish(self) -> str:
        """Returns the rest: bytes at the very end that never became a character."""
        rest, self._pending = self._pending.decode(errors="replace"), b""
        return rest

    @property
    def _in_broken_run(self) -> bool:
        return False

    def _add(self, text: str) -> str:
        return self.finish() + text if text else ""

    def _add_bytes(self, data: bytes) -> str:
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text


class _FallbackDetokenizer(ByteDetokenizer):
    """Bytes stand where no other token fits. A run of them that is not all characters is U+FFFD
    for each byte. Characters that were given before that was known stay."""

    _run_is_broken = False

    @property
    def _in_broken_run(self) -> bool:
        return self._run_is_broken

    def finish(self) -> str:
        rest, self._pending = _BROKEN * len(self._pending), b""
        return rest

    def _add(self, text: str) -> str:
        self._run_is_broken = False
        return self.finish() + text

    def _add_bytes(self, data: bytes) -> str:
        self._pending += data
        if not self._run_is_broken:
            try:
                text, used = codecs.utf_8_decode(self._pending, "strict", False)
            except UnicodeDecodeError:
                self._run_is_broken = True
            else:
                self._pending = self._pending[used:]
                return text
        return self.finish()


@functools.cache
def _byte_of() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: printable ones of Latin-1 for
    themselves, the others in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


def _level_bytes(name: str) -> bytes:
    """Bytes of a token's name; a name with another character stands for itself."""
    byte_of = _byte_of()
    try:
        return bytes([byte_of[char] for char in name])
    except KeyError:
        return name.encode()
