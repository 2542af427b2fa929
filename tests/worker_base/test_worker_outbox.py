"""What waits for a router, and how other threads reach the loop."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from baton.worker.v1 import worker_pb2
from engine.types import NewTokens, TokenRecord
from router.dispatch.merge import step_tokens
from router.jobs import JobTokens, TokenScore
from worker_base.messages import tokens_message, unpack_ids
from worker_base.outbox import LoopInbox, Outbox


def delivered(attempt_id: bytes) -> worker_pb2.WorkResponse:
    return worker_pb2.WorkResponse(delivered=worker_pb2.Delivered(attempt_id=attempt_id))


def row(attempt_id: bytes, index: int, *records: TokenRecord) -> worker_pb2.WorkResponse:
    token_ids = np.array([100 + index], np.int32)
    at, choice = np.array([index], np.int32), np.zeros(1, np.int32)
    tokens = NewTokens([attempt_id], choice, at, token_ids, dict(enumerate(records)), at_ns=0)
    return worker_pb2.WorkResponse(tokens=tokens_message(tokens, [0]))


async def drain(outbox: Outbox) -> list[worker_pb2.WorkResponse]:
    messages = []
    while len(outbox):
        message = await outbox.get()
        assert message is not None
        messages.append(message)
    return messages


def never() -> None:
    raise AssertionError("it overflowed")


async def test_tokens_that_wait_merge_and_keep_their_place() -> None:
    outbox = Outbox(never)
    outbox.send(row(b"a", 0))
    outbox.send(row(b"b", 3, TokenRecord(103, -0.5)))
    outbox.send(row(b"a", 1))
    outbox.send(delivered(b"c"))
    outbox.send(row(b"a", 2))
    first, between, last = await drain(outbox)
    assert list(step_tokens(first.tokens)) == [
        (b"a", JobTokens(0, 0, (100,))),
        (b"b", JobTokens(0, 3, (103,), (TokenScore(-0.5),))),
        (b"a", JobTokens(0, 1, (101,))),
    ]
    assert between == delivered(b"c")
    assert list(step_tokens(last.tokens)) == [(b"a", JobTokens(0, 2, (102,)))]


async def test_a_slow_router_gets_many_steps_in_one_message() -> None:
    outbox = Outbox(never)
    for index in range(500):
        outbox.send(row(b"a", index, *([TokenRecord(0, -1.0)] if index % 7 == 0 else [])))
    (joined,) = await drain(outbox)
    runs = [tokens.token_ids for _, tokens in step_tokens(joined.tokens)]
    assert [ids for run in runs for ids in run] == [100 + index for index in range(500)]
    scored = unpack_ids(joined.tokens.scored_rows).tolist()
    assert scored == list(range(0, 500, 7))
    assert len(joined.tokens.records) == len(scored)


async def test_only_the_newest_load_report_waits() -> None:
    outbox = Outbox(never)
    outbox.report(worker_pb2.Load(progress=1), lambda _: True)
    outbox.send(delivered(b"a"))
    outbox.report(worker_pb2.Load(progress=2), lambda _: True)
    messages = await drain(outbox)
    assert [message.load.progress for message in messages] == [2, 0]
    outbox.report(worker_pb2.Load(progress=3), lambda _: True)
    assert [message.load.progress for message in await drain(outbox)] == [3]


async def test_a_router_that_does_not_read_is_given_up() -> None:
    given_up: list[bool] = []
    outbox = Outbox(lambda: given_up.append(True), max_entries=10)
    for index in range(10):
        outbox.send(row(b"a", index))
    assert not given_up
    await drain(outbox)
    for index in range(11):
        outbox.send(row(b"a", index))
    assert given_up == [True]
    outbox.send(delivered(b"a"))
    assert len(outbox) == 0


async def test_each_token_of_a_step_counts_among_what_waits() -> None:
    step = row(b"a", 0)
    for index in range(1, 6):
        step.tokens.MergeFrom(row(b"b", index).tokens)
    given_up: list[bool] = []
    outbox = Outbox(lambda: given_up.append(True), max_entries=11)
    outbox.send(step)
    assert not given_up
    outbox.send(step)
    assert given_up == [True]


async def test_what_waits_is_still_got_after_the_finish() -> None:
    outbox = Outbox(never)
    outbox.send(delivered(b"a"))
    outbox.finish()
    outbox.send(delivered(b"b"))
    outbox.send(row(b"b", 0))
    assert (await outbox.get()) == delivered(b"a")
    assert await outbox.get() is None


async def test_a_waiting_reader_hears_of_the_finish() -> None:
    outbox = Outbox(never)
    reading = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.finish()
    assert await reading is None


async def test_actions_of_a_thread_keep_their_order_and_survive_a_failing_one() -> None:
    inbox, done = LoopInbox(asyncio.get_running_loop()), asyncio.Event()
    seen: list[int] = []

    def work() -> None:
        for index in range(1000):
            inbox.call_on_loop(lambda index=index: seen.append(index))
            if index == 500:
                inbox.call_on_loop(lambda: 1 // 0)
        inbox.call_on_loop(done.set)

    thread = threading.Thread(target=work)
    thread.start()
    async with asyncio.timeout(5):
        await done.wait()
    thread.join()
    assert seen == list(range(1000))


async def test_what_is_put_has_its_place_and_runs_with_the_next_wake_up() -> None:
    inbox, seen = LoopInbox(asyncio.get_running_loop()), list[int]()
    inbox.wake()
    inbox.put(lambda: seen.append(0))
    await asyncio.sleep(0.01)
    assert not seen, "nobody was woken"
    inbox.call_on_loop(lambda: seen.append(1))
    inbox.put(lambda: seen.append(2))
    inbox.wake()
    await asyncio.sleep(0)
    assert seen == [0, 1, 2]


async def test_an_attempt_is_told_as_known_once_by_the_report_that_contains_it() -> None:
    """Also where a newer report takes the place of that one before it is written."""
    outbox = Outbox(never)
    for attempt_id in (b"a", b"b", b"c"):
        outbox.submitted(attempt_id)
    outbox.report(worker_pb2.Load(progress=1), lambda one: one == b"a")
    outbox.report(worker_pb2.Load(progress=2), lambda one: one == b"b")
    message = await outbox.get()
    assert message is not None
    assert message.load.progress == 2
    assert sorted(message.load.known_attempts) == [b"a", b"b"]
    outbox.report(worker_pb2.Load(progress=3), lambda _: True)
    message = await outbox.get()
    assert message is not None
    assert list(message.load.known_attempts) == [b"c"]


@pytest.mark.parametrize("keeps_peers", [True, False])
async def test_a_report_names_peers_when_they_are_new(keeps_peers: bool) -> None:
    outbox = Outbox(on_overflow=lambda: None, keeps_peers=keeps_peers)

    def report(*names: str) -> None:
        peers = [worker_pb2.PeerHealth(agent_name=name) for name in names]
        outbox.report(worker_pb2.Load(peers=peers), lambda _: True)

    async def told() -> list[str] | None:
        message = await outbox.get()
        assert message is not None
        named = [peer.agent_name for peer in message.load.peers]
        assert not (message.load.same_peers and named)
        return None if message.load.same_peers else named

    report("a", "b")
    assert await told() == ["a", "b"]
    report("a", "b")
    assert await told() == (None if keeps_peers else ["a", "b"])
    report("a")
    report("a")  # The report that waited names them; this one takes its place.
    assert await told() == ["a"]
    report()
    assert await told() == []
