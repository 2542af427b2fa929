"""What a leg tells of the time between its tokens."""

from __future__ import annotations

import numpy as np

from decode_service.leg import DecodeLeg
from engine.types import Request, SamplingParams, StopRules
from kv_transfer.events import Delivered
from worker_base.outbox import Outbox

MS = 1_000_000


def leg_of_three() -> DecodeLeg:
    request = Request(b"a", np.ones(3, np.int32), SamplingParams(), StopRules(9))
    stream = Outbox(lambda: None)
    return DecodeLeg(
        request=request, stream=stream, peer="", traceparent="", expires_s=1.0, received_ns=0
    )


def test_the_parts_of_a_late_row_add_up_to_its_gap() -> None:
    """Its step was launched before the loop had taken it."""
    leg = leg_of_three()
    leg.delivered = Delivered(b"", b"", b"", 0, 0, 12 * MS, 1)
    leg.first_token_ns, leg.joined_ns = 10 * MS, 14 * MS
    leg.count(0, 22 * MS, (13 * MS, 15 * MS))
    assert list(leg.gap_parts_ms.values()) == [2, 2, 0, 1, 7]


def test_tokens_of_one_step_have_no_gap_between_them() -> None:
    leg = leg_of_three()
    for at_ms, tokens in ((10, 1), (30, 3), (40, 2)):
        for _ in range(tokens):
            leg.count(0, at_ms * MS)
    assert leg.gaps_ms.tolist() == [20, 10]
    assert (leg.tokens, leg.steps, leg.longest_gap_ms) == (6, 3, 20)
