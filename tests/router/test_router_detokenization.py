from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from frontdoor_kit import CORPUS, byte_fallback_tokenizer, byte_level_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from router.answers.detokenization import Detokenizer, StopTexts
from router.answers.token_texts import ByteDetokenizer, TokenTexts
from router.requests.tokenization import Tokenizer

BYTE_LEVEL = Tokenizer(byte_level_tokenizer())
BYTE_FALLBACK = Tokenizer(byte_fallback_tokenizer())
TABLES = {one: TokenTexts.of(one._backend) for one in (BYTE_LEVEL, BYTE_FALLBACK)}
WAYS = ["decoded", "table"]
BROKEN = [token_id for token_id in range(3, 259) if BYTE_LEVEL.decode([token_id]) == "�"]
"""Single bytes that are no character by themselves."""
TEXTS = [*CORPUS, "👩‍👩‍👧‍👦" * 20, "a\u0301e\u0301 ﷽ \U0001f1e9\U0001f1ea", "  two  spaces  ", "�"]


def pieces(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), way: str = "decoded"
) -> list[str]:
    detokenizer: Detokenizer | ByteDetokenizer = Detokenizer(tokenizer, prompt)
    if way == "table":
        table = TABLES[tokenizer]
        assert table is not None
        detokenizer = table.detokenizer(tokenizer.special_ids, prompt)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("way", WAYS)
@given(st.lists(st.integers(0, 399), max_size=80))
def test_random_ids_give_the_text_of_the_whole(way: str, ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, ids, way=way)) == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("way", WAYS)
@given(st.text(max_size=60))
def test_any_text_comes_back_in_whole_characters(way: str, text: str) -> None:
    ids = BYTE_LEVEL.encode(text).tolist()
    parts = pieces(BYTE_LEVEL, ids, way=way)
    assert "".join(parts) == text
    assert "�" in text or not any("�" in part for part in parts)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_never_holds_half_a_character(tokenizer: Tokenizer, text: str, way: str) -> None:
    ids = tokenizer.encode(text).tolist()
    parts = pieces(tokenizer, ids, way=way)
    assert "".join(parts) == tokenizer.decode(ids)
    assert "�" in text or not any("�" in part for part in parts)


@pytest.mark.parametrize("way", WAYS)
def test_emoji_come_when_their_last_byte_does(way: str) -> None:
    ids = [1 + byte for byte in "🎉é".encode()]
    assert pieces(BYTE_FALLBACK, ids, way=way) == ["", "", "", "🎉", "", "é", ""]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", range(1, 40))
def test_broken_bytes_are_shown_and_what_follows_is_whole(length: int, way: str) -> None:
    broken = random.Random(length).choices(BROKEN, k=length)
    ids = [*broken, *BYTE_LEVEL.encode("then 🎉 words").tolist()]
    text = "".join(pieces(BYTE_LEVEL, ids, way=way))
    assert text == BYTE_LEVEL.decode(ids)
    assert text.endswith("then 🎉 words")


@pytest.mark.parametrize("way", WAYS)
def test_special_tokens_have_no_text(way: str) -> None:
    ids = BYTE_LEVEL.encode("one").tolist()
    assert "".join(pieces(BYTE_LEVEL, [0, *ids, 1, 2, *ids], way=way)) == "oneone"


@pytest.mark.parametrize("way", WAYS)
def test_a_leading_space_stays_where_text_goes_before(way: str) -> None:
    fox = BYTE_FALLBACK.encode("fox").tolist()
    the = BYTE_FALLBACK.encode("the").tolist()
    assert "".join(pieces(BYTE_FALLBACK, fox, way=way)) == "fox"
    assert "".join(pieces(BYTE_FALLBACK, fox, prompt=the, way=way)) == " fox"


@pytest.mark.parametrize("way", WAYS)
def test_half_a_character_at_the_prompts_end_is_not_the_outputs(way: str) -> None:
    party = [1 + byte for byte in "🎉".encode()]
    assert "".join(pieces(BYTE_FALLBACK, party, prompt=party[:2], way=way)) == "🎉"


@given(st.lists(st.integers(0, 268), max_size=12))
def test_beside_runs_of_bytes_that_are_no_text_all_is_shown(ids: list[int]) -> None:
    whole = BYTE_FALLBACK.decode([266, *ids])  # Behind a letter, so that no space is left out.
    told = "".join(pieces(BYTE_FALLBACK, [266, *ids], way="table"))
    rest = iter(told)
    assert all(one in rest for one in whole.replace("\ufffd", ""))
    assert told == whole or "\ufffd" in told


def test_a_tokenizer_whose_tokens_depend_on_each_other_has_no_table() -> None:
    backend = byte_level_tokenizer()
    backend.decoder = decoders.WordPiece()
    assert TokenTexts.of(backend) is None
    backend = byte_fallback_tokenizer()
    backend.decoder = decoders.Sequence([decoders.Replace("the", "fox"), decoders.Fuse()])
    assert TokenTexts.of(backend) is None


class Counting(Tokenizer):
    longest = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(token_ids))
        return super().decode(token_ids)


@pytest.mark.parametrize("broken", [False, True])
def test_the_cost_of_a_token_does_not_grow(broken: bool) -> None:
    counting = Counting(byte_level_tokenizer())
    ids = BROKEN * 4 if broken else counting.encode(" ".join(CORPUS * 5)).tolist()
    assert "".join(pieces(counting, ids)) == BYTE_LEVEL.decode(ids)  # Of the parent: not counted.
    assert counting.longest <= 25


def run_stops(stops: StopTexts, parts: Sequence[str]) -> tuple[str, str | None]:
    text = ""
    for part in parts:
        match = stops.push(part)
        text += match.text
        if match.met is not None:
            return text, match.met
    return text + stops.finish(), None


def naive_stop(texts: Sequence[str], whole: str) -> tuple[str, str | None]:
    for end in range(1, len(whole) + 1):
        met = [stop for stop in texts if whole[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return whole[: end - len(longest)], longest
    return whole, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_stops_do_not_depend_on_tokens(texts: list[str], parts: list[str]) -> None:
    expected = naive_stop(texts, "".join(parts))
    assert run_stops(StopTexts(texts), parts) == expected
    text, met = expected
    assert run_stops(StopTexts(texts, include_stop=True), parts) == (text + (met or ""), met)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=8),
)
def test_hidden_text_stops_and_is_never_shown(
    texts: list[str], parts: list[tuple[str, bool]]
) -> None:
    stops, shown, met = StopTexts(texts), "", None
    for part, hidden in parts:
        text, met = stops.push(part, hidden=hidden)
        shown += text
        if met is not None:
            break
    else:
        shown += stops.finish()
    before, wanted = naive_stop(texts, "".join(part for part, _ in parts))
    mask = [hidden for part, hidden in parts for _ in part]
    assert met == wanted
    assert shown == "".join(one for one, hidden in zip(before, mask, strict=False) if not hidden)


def test_of_stops_that_end_at_one_place_the_longest_counts() -> None:
    assert run_stops(StopTexts(["b", "ab"]), ["xa", "b"]) == ("x", "ab")


def test_what_may_begin_a_stop_is_held_back_and_nothing_else() -> None:
    stops = StopTexts(["\n\nUser:"])
    assert [stops.push(part).text for part in ["Hi", "\n", "\nUs", "e", "d up"]] == [
        "Hi",
        "",
        "",
        "",
        "\n\nUsed up",
    ]


def test_a_stop_may_be_inside_a_token_and_the_rest_goes() -> None:
    assert StopTexts(["stop"]).push("go stopped") == ("go ", "stop")
    assert StopTexts(["stop"], include_stop=True).push("go stopped") == ("go stop", "stop")


def test_matches_before_min_tokens_are_plain_text() -> None:
    stops = StopTexts(["ab", "abc"])
    assert stops.push("ab", may_stop=False) == ("", None)
    assert stops.push("x") == ("abx", None)
    assert stops.push("a", may_stop=False) == ("", None)
    assert stops.push("b") == ("", "ab")
