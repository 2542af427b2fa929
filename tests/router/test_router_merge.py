"""Tokens by index: none lost, none twice, whatever order they come in."""

from __future__ import annotations

import random
import struct

import pytest

from baton.worker.v1 import worker_pb2
from router.dispatch.merge import ChoiceMerger, first_tokens, step_tokens, unpack_ids
from router.jobs import ChoiceEnded, JobTokens, TokenScore
from serving.wire import pack_ids

END = worker_pb2.END_REASON_LENGTH


def run(first: int, *token_ids: int) -> JobTokens:
    return JobTokens(0, first, token_ids)


def test_in_order() -> None:
    merger = ChoiceMerger(0)
    assert merger.add(run(0, 10)) == [run(0, 10)]
    assert merger.add(run(1, 11, 12)) == [run(1, 11, 12)]
    assert merger.end(ChoiceEnded(0, END, 3)) == [ChoiceEnded(0, END, 3)]
    assert merger.ended


def test_repeated_tokens_are_dropped_with_their_logprobs() -> None:
    merger = ChoiceMerger(0)
    scores = tuple(TokenScore(-float(index)) for index in range(3))
    merger.add(run(0, 10))
    repeated = JobTokens(0, 0, (10, 11, 12), scores)
    assert merger.add(repeated) == [JobTokens(0, 1, (11, 12), scores[1:])]
    assert merger.add(run(0, 10, 11)) == []


def test_gaps_wait_and_the_end_waits_for_them() -> None:
    merger = ChoiceMerger(0)
    assert merger.end(ChoiceEnded(0, END, 3)) == []
    assert merger.add(run(2, 12)) == []
    assert merger.add(run(1, 11)) == []
    assert merger.add(run(0, 10)) == [
        run(0, 10),
        run(1, 11),
        run(2, 12),
        ChoiceEnded(0, END, 3),
    ]


def test_nothing_after_the_end() -> None:
    merger = ChoiceMerger(0)
    merger.close()
    assert merger.add(run(0, 10)) == []
    assert merger.end(ChoiceEnded(0, END, 1)) == []


def test_what_waited_can_be_forgotten() -> None:
    merger = ChoiceMerger(0)
    merger.add(run(0, 10))
    merger.add(run(2, 99))
    merger.end(ChoiceEnded(0, END, 3))
    merger.forget_waiting()
    assert merger.add(run(1, 11)) == [run(1, 11)]
    assert not merger.ended
    assert merger.token_ids == [10, 11]


@pytest.mark.parametrize("seed", range(20))
def test_any_cuts_in_any_order(seed: int) -> None:
    """Overlapping pieces of one output, shuffled, come out as the output."""
    chance = random.Random(seed)
    output = [chance.randrange(1_000) for _ in range(chance.randrange(1, 40))]
    pieces: list[JobTokens | ChoiceEnded] = [ChoiceEnded(0, END, len(output))]
    for start in range(0, len(output), 3):
        stop = min(len(output), start + 3 + chance.randrange(4))
        pieces.append(run(start, *output[start:stop]))
    chance.shuffle(pieces)
    merger, told = ChoiceMerger(0), []
    for piece in pieces:
        told += merger.add(piece) if isinstance(piece, JobTokens) else merger.end(piece)
    merged: list[int] = []
    for event in told[:-1]:
        assert isinstance(event, JobTokens)
        assert event.first_index == len(merged)
        merged += event.token_ids
    assert merged == output
    assert isinstance(told[-1], ChoiceEnded)
    assert merger.ended


def test_wire_forms() -> None:
    record = worker_pb2.TokenRecord(
        token_id=7, logprob=-0.5, top_ids=pack_ids([7, 8]), top_logprobs=struct.pack("<2f", -1, -2)
    )
    scores = (TokenScore(-0.5, (7, 8), (-1.0, -2.0)),)
    first = worker_pb2.FirstToken(records=[record, worker_pb2.TokenRecord(token_id=9)])
    assert first_tokens(first, (0, 1), (0, 0)) == [
        JobTokens(0, 0, (7,), scores),
        JobTokens(1, 0, (9,)),
    ]
    assert first_tokens(first, (3, 4), (5, 6))[1] == JobTokens(4, 6, (9,))
    step = worker_pb2.Tokens(
        attempt_ids=[b"a", b"b", b"b", b"b", b"b", b"c", b"c"],
        choice_indices=pack_ids([0, 1, 1, 2, 2, 2, 2]),
        indices=pack_ids([9, 4, 5, 6, 8, 9, 10]),
        token_ids=pack_ids([6, 7, 8, 1, 2, 3, 4]),
        scored_rows=pack_ids([1, 2]),
        records=[record, record],
    )
    assert list(step_tokens(step)) == [
        (b"a", JobTokens(0, 9, (6,))),
        (b"b", JobTokens(1, 4, (7, 8), scores * 2)),
        (b"b", JobTokens(2, 6, (1,))),
        (b"b", JobTokens(2, 8, (2,))),
        (b"c", JobTokens(2, 9, (3, 4))),
    ]
    assert unpack_ids(pack_ids([0, 2**32 - 1])) == (0, 2**32 - 1)
