"""Why and when a sequence ends."""

from __future__ import annotations

import pytest

from engine.stopping import end_ids, end_reason
from engine.types import EndReason, StopRules

EOS = frozenset({2, 3})
END, STOP, LENGTH = EndReason.END_OF_SEQUENCE, EndReason.STOP_TOKEN, EndReason.LENGTH


@pytest.mark.parametrize(
    ("token", "index", "stop", "room", "reason"),
    [
        (7, 0, StopRules(10), 5, None),
        (2, 0, StopRules(10), 5, END),
        (3, 4, StopRules(10), 5, END),
        (7, 0, StopRules(10, token_ids=frozenset({7})), 5, STOP),
        # Length: the last token allowed, or no room for another.
        (7, 8, StopRules(10), 5, None),
        (7, 9, StopRules(10), 5, LENGTH),
        (7, 0, StopRules(1), 5, LENGTH),
        (7, 0, StopRules(10), 1, None),
        (7, 0, StopRules(10), 0, LENGTH),
        # A token that ends wins over length, and end of sequence over a stop id.
        (2, 9, StopRules(10), 0, END),
        (7, 9, StopRules(10, token_ids=frozenset({7})), 5, STOP),
        (2, 0, StopRules(10, token_ids=frozenset({2})), 5, END),
        # ignore_eos means the model's ids, not those that the client named.
        (2, 0, StopRules(10, ignore_eos=True), 5, None),
        (2, 0, StopRules(10, token_ids=frozenset({2}), ignore_eos=True), 5, STOP),
        (2, 9, StopRules(10, ignore_eos=True), 5, LENGTH),
        # min_tokens stand before one that ends; length holds all the same.
        (2, 2, StopRules(10, min_tokens=3), 5, None),
        (2, 3, StopRules(10, min_tokens=3), 5, END),
        (7, 2, StopRules(10, min_tokens=3, token_ids=frozenset({7})), 5, None),
        (7, 3, StopRules(10, min_tokens=3, token_ids=frozenset({7})), 5, STOP),
        (2, 2, StopRules(3, min_tokens=3), 5, LENGTH),
        (2, 2, StopRules(10, min_tokens=3), 0, LENGTH),
    ],
)
def test_reason(
    token: int, index: int, stop: StopRules, room: int, reason: EndReason | None
) -> None:
    assert end_reason(token, index, stop, EOS, room) is reason


@pytest.mark.parametrize(
    ("stop", "ids"),
    [
        (StopRules(9), {2, 3}),
        (StopRules(9, token_ids=frozenset({3, 7})), {2, 3, 7}),
        (StopRules(9, token_ids=frozenset({3, 7}), ignore_eos=True), {3, 7}),
        (StopRules(9, ignore_eos=True), set()),
    ],
)
def test_end_ids_are_those_that_end(stop: StopRules, ids: set[int]) -> None:
    assert end_ids(stop, EOS) == ids
    ending = {token for token in range(20) if end_reason(token, 0, stop, EOS, 5) is not None}
    assert ending == ids
