"""Log probabilities with the text of their tokens, and the two forms that this API gives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from router.answers.detokenization import Detokenizer, ShowsSpecial
from router.doors.http.statuses import JSON

if TYPE_CHECKING:
    from router.jobs import TokenScore
    from router.requests.tokenization import Tokenizer

_LEAST: Final = -9999.0
"""The value that this API writes for an impossible token. JSON has no infinity."""
_HALF: Final = "\ufffd"
_A_TURN: Final = 32
"""Tokens that are scored and written in one callback: a millisecond, with 20 alternatives each."""
_CACHED_TEXTS: Final = 65_536
"""Texts of tokens: a vocabulary, nearly, at some tens of bytes each."""


class Alternative(NamedTuple):
    """A token that could have come."""

    text: str
    logprob: float
    data: bytes | None


class ScoredToken(NamedTuple):
    """A token and its likeliest alternatives, best first, as text."""

    text: str
    offset: int
    """Its start in the text of its choice, characters."""
    logprob: float | None
    """None for the first token of a prompt."""
    top: tuple[Alternative, ...]
    data: bytes | None = None
    """Its bytes, as far as they are known."""


class Scorer:
    """Writes the tokens of one choice, in order.

    Args:
        tokenizer: None for a model without one.
        as_ids: whether tokens are written as ids.
        shows_special: whether special tokens stand in the text by their names.
        prompt_ids: the end of the prompt, if it is not scored itself.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        as_ids: bool = False,
        shows_special: bool = False,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = None if as_ids else tokenizer
        self._places: _Places | None = None
        if tokenizer is not None:
            self._places = _Places(tokenizer, shows_special, prompt_ids)

    def score(
        self, token_ids: Iterable[int], records: Iterable[TokenScore | None], text: str = ""
    ) -> Iterator[ScoredToken]:
        """Scores the next tokens, as they are taken. The first token of a prompt has no record.
        `text` is what they were made of, if that is known."""
        for token_id, record in zip(token_ids, records, strict=True):
            logprob = None if record is None else _clamped(record.logprob)
            offset = 0 if self._places is None else self._places.next(token_id, text)
            name, data = _text(self._tokenizer, token_id), _bytes(self._tokenizer, token_id)
            yield ScoredToken(name, offset, logprob, self._top(record), data)

    def _top(self, record: TokenScore | None) -> tuple[Alternative, ...]:
        if record is None:
            return ()
        named = self._tokenizer
        return tuple(
            Alternative(_text(named, token_id), _clamped(logprob), _bytes(named, token_id))
            for token_id, logprob in zip(record.top_ids, record.top_logprobs, strict=True)
        )


class _Places:
    """Finds where tokens begin in the text of their choice.

    A character of several tokens begins with the first of them. A special token has no width, if
    the text does not show it.
    """

    def __init__(
        self, tokenizer: Tokenizer, shows_special: bool, prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        decoder = ShowsSpecial(tokenizer, tokenizer.special_ids) if shows_special else tokenizer
        self._detokenizer = Detokenizer(decoder, prompt_ids)
        self._width = 0
        """Characters that are complete."""

    def next(self, token_id: int, text: str) -> int:
        """The place of the next token. `text`: see `Scorer.score`."""
        name = _text(self._tokenizer, token_id)
        begins = self._width
        if token_id in self._tokenizer.special_ids and not self._shows_special:
            if text.startswith(name, begins):
                self._width += len(name)
            return begins
        new = self._detokenizer.push(token_id)
        self._width += len(new)
        # What was held back before comes with it.
        return self._width - len(name) if new.endswith(name) else begins


async def written(
    scores: Iterator[ScoredToken], form: Callable[[Sequence[ScoredToken]], JSON]
) -> JSON:
    """Scores in an API's form. A prompt has many, so they are made in several callbacks."""
    whole = form([*islice(scores, _A_TURN)])
    while some := [*islice(scores, _A_TURN)]:
        await asyncio.sleep(0)
        extend(whole, form(some))
    return whole


def extend(scores: JSON, later: JSON) -> None:
    """Appends later scores of the same form."""
    for name, more in later.items():
        if isinstance(more, list):
            scores[name] += more


def completion_logprobs(tokens: Sequence[ScoredToken]) -> JSON:
    """Columns, in the form of /v1/completions. The alternatives always include the token itself."""
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [_alternatives(token) for token in tokens],
    }


def chat_logprobs(tokens: Sequence[ScoredToken]) -> JSON:
    """Records, in the form of /v1/chat/completions."""
    content = [
        {
            **_chat_token(token.text, token.logprob or 0.0, token.data),
            "top_logprobs": [_chat_token(*one) for one in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _alternatives(token: ScoredToken) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    # Two tokens may have the same text: the likelier one gets the key.
    others = [(one.text, one.logprob) for one in reversed(token.top)]
    best_last = [(token.text, token.logprob), *others]
    return dict(sorted(dict(best_last).items(), key=lambda one: -one[1]))


def _chat_token(text: str, logprob: float, data: bytes | None) -> JSON:
    return {"token": text, "logprob": logprob, "bytes": None if data is None else list(data)}


def _clamped(logprob: float) -> float:
    return max(logprob, _LEAST)


def _bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes | None:
    """Its bytes: those of its text, or of a part of a character, which a decoded text does not
    show. None where the tokenizer does not say."""
    text = _text(tokenizer, token_id)
    if tokenizer is None or _HALF not in text:
        return text.encode()
    return None if tokenizer.texts is None else tokenizer.texts.partial.get(token_id)


@lru_cache(_CACHED_TEXTS)
def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)
