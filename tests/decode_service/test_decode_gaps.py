"""What a leg tells of the time between its tokens."""

from __future__ import annotations

import numpy as np

from decode_service.leg import DecodeLeg
from engine.types import Request, SamplingParams, StopRules
from worker_base.outbox import Outbox

MS = 1_000_000


def test_tokens_of_one_step_have_no_gap_between_them() -> None:
    request = Request(b"a", np.ones(3, np.int32), SamplingParams(), StopRules(9))
    stream = Outbox(lambda: None)
    leg = DecodeLeg(
        request=request, stream=stream, peer="", traceparent="", expires_s=1.0, received_ns=0
    )
    for at_ms, tokens in ((10, 1), (30, 3), (40, 2)):
        for _ in range(tokens):
            leg.count(0, at_ms * MS)
    assert leg.gaps_ms.tolist() == [20, 10]
    assert (leg.tokens, leg.steps, leg.longest_gap_ms) == (6, 3, 20)
