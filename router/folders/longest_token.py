"""The longest text of one token of a vocabulary. It gives a lower bound of a text's tokens.

A text that is longer than the context times the longest token cannot fit, so it need not be
tokenized. This holds if every byte of a text ends up in some token. It does not hold if a tokenizer
drops text, or has one token for any unknown word. Then there is no bound.
"""

from __future__ import annotations

import json
from typing import Any, Final, cast

import tokenizers
from tokenizers import models

_UNICODE_FORMS: Final = ("NFC", "NFD", "NFKC", "NFKD")
_FORMS_SHRINK: Final = 4
"""Most bytes that a Unicode normal form turns into one. Mathematical letters have four, Hangul has
three."""
_KEEPING_SPLITTERS: Final = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
"""Pre-tokenizers that drop nothing."""
_SPLITTERS: Final = ("Split", "Punctuation")
"""Pre-tokenizers that can be set to drop the text at which they split."""


def longest_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """Most UTF-8 bytes of a text that one token stands for; None if there is no bound."""
    normalizers, splitters = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
    if not _keeps_all(backend, [*normalizers, *splitters]):
        return None
    shrinks = [_shrinks(one) for one in normalizers]
    if None in shrinks or not all(map(_keeps, splitters)):
        return None
    by_bytes = any(one["type"] == "ByteLevel" for one in (*normalizers, *splitters))
    added = {one.content for one in backend.get_added_tokens_decoder().values()}
    longest = max(
        # A vocabulary by bytes writes each as one character.
        len(token) if by_bytes and token not in added else len(token.encode())
        for token in backend.get_vocab()
    )
    return longest * max([1, *(shrink for shrink in shrinks if shrink is not None)])


def _keeps_all(backend: tokenizers.Tokenizer, parts: list[dict[str, Any]]) -> bool:
    """Whether every byte has a token, and no token takes in the text around it."""
    if any(one.lstrip or one.rstrip for one in backend.get_added_tokens_decoder().values()):
        return False
    if not isinstance(backend.model, models.BPE):
        return False
    return bool(backend.model.byte_fallback) or any(one["type"] == "ByteLevel" for one in parts)


def _parts(part: Any) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    return _flat(cast("dict[str, Any]", json.loads(part.__getstate__())))


def _flat(described: dict[str, Any]) -> list[dict[str, Any]]:
    if described["type"] != "Sequence":
        return [described]
    inner = described.get("normalizers") or described.get("pretokenizers") or []
    return [part for one in inner for part in _flat(one)]


def _shrinks(normalizer: dict[str, Any]) -> int | None:
    """The factor by which it may shorten a text; None if there is no bound."""
    match normalizer:
        case {"type": "Prepend" | "ByteLevel"}:
            return 1
        case {"type": kind} if kind in _UNICODE_FORMS:
            return _FORMS_SHRINK
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new.encode()) >= len(old.encode()) else None
        case _:
            return None


def _keeps(splitter: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer drops nothing."""
    if splitter["type"] in _SPLITTERS:
        return bool(splitter.get("behavior", "Removed") != "Removed")
    return splitter["type"] in _KEEPING_SPLITTERS
