"""The events with which a search ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.beams.chooser import Hypothesis
from engine.types import NewTokens, SequenceEnded

ROWS = 4096
"""Most tokens of an event, so that a long output fits the messages that carry it."""


def events_of(
    request_id: bytes, found: Sequence[Hypothesis], restarts: int, now_ns: int
) -> Iterator[NewTokens | SequenceEnded]:
    """All tokens of all hypotheses, each a choice, and then their ends.

    Args:
        request_id: the request.
        found: what its search found, best first.
        restarts: how often it was preempted.
        now_ns: Unix nanoseconds.
    """
    rows = [
        (choice, index, record)
        for choice, one in enumerate(found)
        for index, record in enumerate(one.records)
    ]
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        yield NewTokens(
            request_ids=[request_id] * len(part),
            choices=np.array([choice for choice, _, _ in part], np.int32),
            indices=np.array([index for _, index, _ in part], np.int32),
            token_ids=np.array([record.token_id for _, _, record in part], np.int32),
            scored={i: row[2] for i, row in enumerate(part) if row[2].logprob is not None},
            at_ns=now_ns,
        )
    for choice, one in enumerate(found):
        yield SequenceEnded(
            request_id,
            choice,
            one.reason,
            len(one.records),
            choice == len(found) - 1,
            restarts,
            now_ns,
            score=one.score,
        )
