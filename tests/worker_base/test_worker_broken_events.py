"""An event that breaks its handler: a bug ends the attempt that it struck at once, and no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from worker_kit import Attempted, Node, Pair, a_pair, until

from baton.worker.v1 import worker_pb2
from faults import failpoints

SHORT, LONGER = 9, 10
"""Prompt tokens of two attempts: a failpoint can tell them apart, and one step computes both."""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


@contextmanager
def in_one_turn(node: Node) -> Iterator[None]:
    """What the engine is told in here it hears in one turn, and answers in one batch of events."""
    told = threading.Event()
    node.engine._loop.post(lambda _: told.wait(10) and None)
    try:
        yield
    finally:
        told.set()


def failed_reasons(pair: Pair) -> dict[bytes, int]:
    """By attempt, of all that a router was told has failed at either worker."""
    heard = pair.from_p.all("failed") + pair.from_d.all("failed")
    return {failed.attempt_id: failed.reason for failed in heard}


@pytest.mark.parametrize(
    "failpoint",
    [
        "decode.before_grant=raise@1",
        "decode.after_grant=raise@1",
        "decode.delivered=raise@1",
        f"decode.tokens=raise~{SHORT}@3",
        "decode.ended=raise@1",
        f"prefill.chunk=raise~{SHORT}",
        f"prefill.first_token=raise~{SHORT}",
        "prefill.sent=raise@1",
    ],
)
async def test_it_ends_its_own_attempt_at_once_and_leaves_the_others_alone(failpoint: str) -> None:
    async with a_pair() as pair:
        attempts = {a.id: a for a in (Attempted(SHORT, max_tokens=20), Attempted(LONGER))}
        failpoints.arm(failpoint)
        with in_one_turn(pair.p), in_one_turn(pair.d):
            for attempt in attempts.values():
                pair.submit(attempt)
        forwarded: set[bytes] = set()

        def struck() -> dict[bytes, int]:
            for grant in pair.from_d.all("granted"):
                if grant.attempt_id not in forwarded:
                    forwarded.add(grant.attempt_id)
                    pair.p.prefill.grant(grant, pair.from_p.outbox)
            return failed_reasons(pair)

        await until(struck)
        ((struck_id, reason),) = struck().items()
        assert reason == worker_pb2.FAILURE_REASON_INTERNAL
        # As a router lets go of what has failed.
        pair.p.prefill.cancel(struck_id, pair.from_p.outbox)
        pair.d.decode.cancel(struck_id, pair.from_d.outbox)
        (other,) = (one for one in attempts.values() if one.id != struck_id)
        await until(lambda: struck() and pair.from_d.all("finished", other.id))
        assert pair.from_d.tokens[other.id, 0] == other.expected
        await pair.quiet()
        assert failed_reasons(pair) == {struck_id: reason}


async def test_one_that_lost_tokens_of_several_choices_in_a_step_is_ended_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[object] = []
    monkeypatch.setattr("decode_service.spans.write_spans", lambda leg, *_: ended.append(leg))
    async with a_pair() as pair:
        attempt = pair.submit(Attempted(SHORT, choices=2))
        failpoints.arm("decode.tokens=raise")
        await pair.forward_grant(attempt)
        failed = await pair.from_d.heard("failed", attempt.id)
        assert failed.reason == worker_pb2.FAILURE_REASON_INTERNAL
        pair.p.prefill.cancel(attempt.id, pair.from_p.outbox)
        await pair.quiet()
    assert len(ended) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_spans_that_cannot_be_written_change_nothing(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError

    async with a_pair() as pair:
        monkeypatch.setattr(f"{role}_service.spans.write_spans", breaks)
        served, cut = Attempted(SHORT), Attempted(LONGER)
        await pair.run(served)
        pair.submit(cut)
        await pair.from_p.heard("first_token", cut.id)
        await pair.from_d.heard("granted", cut.id)
        node, ear = (pair.p, pair.from_p) if role == "prefill" else (pair.d, pair.from_d)
        getattr(node, role).end_stream(ear.outbox)
        pair.p.prefill.cancel(cut.id, pair.from_p.outbox)
        pair.d.decode.cancel(cut.id, pair.from_d.outbox)
        await pair.quiet()
        assert pair.from_d.tokens[served.id, 0] == served.expected
        assert not failed_reasons(pair)


async def test_an_attempt_that_cannot_even_be_ended_keeps_no_other_from_its_events() -> None:
    async with a_pair() as pair:
        failpoints.arm("decode.after_grant=raise,decode.quarantined=raise")
        broken, sound = Attempted(SHORT), Attempted(LONGER)
        with in_one_turn(pair.d):
            pair.submit_decode(broken)
            pair.submit_decode(sound)
        for attempt in (broken, sound):
            failed = await pair.from_d.heard("failed", attempt.id)
            assert failed.reason == worker_pb2.FAILURE_REASON_INTERNAL
        failpoints.arm("")
        for attempt in (broken, sound):
            pair.d.decode.cancel(attempt.id, pair.from_d.outbox)
        await pair.quiet()


@pytest.mark.parametrize("end", ["stream", "deadline", "process"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_nor_from_its_end(monkeypatch: pytest.MonkeyPatch, role: str, end: str) -> None:
    """A stream that ends, a deadline, a process that stops: the attempts behind it end as well."""
    async with a_pair() as pair:
        attempts = broken, sound = Attempted(SHORT), Attempted(LONGER)
        for attempt in attempts:
            pair.submit(attempt)
        for attempt in attempts:
            await pair.from_p.heard("first_token", attempt.id)
            await pair.from_d.heard("granted", attempt.id)
        node, ear = (pair.p, pair.from_p) if role == "prefill" else (pair.d, pair.from_d)
        service, cancel = getattr(node, role), node.engine.cancel

        def breaks(attempt_id: bytes) -> None:
            assert attempt_id != broken.id, "a bug"
            cancel(attempt_id)

        monkeypatch.setattr(node.engine, "cancel", breaks)
        match end:
            case "stream":
                service.end_stream(ear.outbox)
            case "deadline":
                for attempt in service._legs:
                    attempt.expires_s = 0.0
                service.expire()
            case "process":
                service.fail_all(worker_pb2.FAILURE_REASON_DRAINING)
        goes_on = {one.id for one in service._legs if one.state}  # 0 is given up
        assert sound.id not in goes_on
        monkeypatch.undo()
        node.engine.cancel(broken.id)
