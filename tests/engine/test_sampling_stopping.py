"""Why and when a sequence ends."""

from __future__ import annotations

import pytest

from engine.stopping import end_ids, end_reason
from engine.types import EndReason, StopRules

EOS = frozenset({2, 3})
END, STOP, LENGTH = EndReason.END_OF_SEQUENCE, EndReason.STOP_TOKEN, EndReason.LENGTH


@pytest.mark.parametrize(
    ("token", "index", "stop", "reason"),
    [
        (7, 0, StopRules(10), None),
        (2, 0, StopRules(10), END),
        (3, 4, StopRules(10), END),
        (7, 0, StopRules(10, token_ids=frozenset({7})), STOP),
        # Length: the last token allowed.
        (7, 8, StopRules(10), None),
        (7, 9, StopRules(10), LENGTH),
        (7, 0, StopRules(1), LENGTH),
        # A token that ends wins over length, and end of sequence over a stop id.
        (2, 9, StopRules(10), END),
        (7, 9, StopRules(10, token_ids=frozenset({7})), STOP),
        (2, 0, StopRules(10, token_ids=frozenset({2})), END),
        # ignore_eos means the model's ids, not those that the client named.
        (2, 0, StopRules(10, ignore_eos=True), None),
        (2, 0, StopRules(10, token_ids=frozenset({2}), ignore_eos=True), STOP),
        (2, 9, StopRules(10, ignore_eos=True), LENGTH),
        # min_tokens stand before one that ends; length holds all the same.
        (2, 2, StopRules(10, min_tokens=3), None),
        (2, 3, StopRules(10, min_tokens=3), END),
        (7, 2, StopRules(10, min_tokens=3, token_ids=frozenset({7})), None),
        (7, 3, StopRules(10, min_tokens=3, token_ids=frozenset({7})), STOP),
        (2, 2, StopRules(3, min_tokens=3), LENGTH),
    ],
)
def test_reason(token: int, index: int, stop: StopRules, reason: EndReason | None) -> None:
    assert end_reason(token, index, stop, EOS) is reason


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
    ending = {token for token in range(20) if end_reason(token, 0, stop, EOS) is not None}
    assert ending == ids
