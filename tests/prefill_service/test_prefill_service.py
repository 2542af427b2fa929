"""Prefill attempts, from any state to any end, against a real transfer thread and a real engine
with a device that hashes tokens."""

from __future__ import annotations

import asyncio
import time

import pytest
from worker_kit import PAGE_TOKENS, STEP_TOKENS, VOCAB, Attempted, Pair, a_pair, until

from baton.worker.v1 import worker_pb2
from worker_base.legs import DEADLINE_GRACE_S

INTERNAL = worker_pb2.FAILURE_REASON_INTERNAL
EXPIRED = worker_pb2.FAILURE_REASON_EXPIRED
KV_TRANSFER = worker_pb2.FAILURE_REASON_KV_TRANSFER
LONG = 3 * STEP_TOKENS
"""Tokens of a prompt of three chunks."""


async def test_hand_off_from_first_token_to_done() -> None:
    async with a_pair() as pair:
        attempt = pair.submit(Attempted(LONG + 1))
        first = await pair.from_p.heard("first_token", attempt.id)
        assert [record.token_id for record in first.records] == attempt.expected[:1]
        assert not pair.from_p.all("prefill_done"), "done before it was granted"
        await pair.forward_grant(attempt)
        done = await pair.from_p.heard("prefill_done", attempt.id)
        assert done.bytes_sent == attempt.num_pages * pair.d.executor.pool[0].nbytes
        assert (
            done.received_unix_ns
            <= done.started_unix_ns
            <= done.computed_unix_ns
            <= done.sent_unix_ns
        )
        await pair.from_d.heard("finished", attempt.id)
        await pair.quiet()
        assert pair.from_d.tokens[attempt.id, 0] == attempt.expected
        assert pair.from_p.kinds(attempt.id) == ["first_token", "prefill_done"]


async def test_chunks_leave_while_later_ones_compute() -> None:
    async with a_pair() as pair:
        pair.p.executor.holds = True
        attempt = await pair.begin(Attempted(LONG))
        for num_pages in (STEP_TOKENS // PAGE_TOKENS, 2 * STEP_TOKENS // PAGE_TOKENS):
            await until(lambda: pair.p.executor.held)
            pair.p.executor.step()
            await until(lambda wanted=num_pages: _pages_arrived(pair, attempt) == wanted)
        assert not pair.from_p.all("first_token")
        pair.p.executor.let_go()
        await pair.from_d.heard("finished", attempt.id)
        await pair.from_p.heard("prefill_done", attempt.id)
        assert pair.from_d.tokens[attempt.id, 0] == attempt.expected
        await pair.quiet()


def _pages_arrived(pair: Pair, attempt: Attempted) -> int:
    grant = pair.from_d.all("granted", attempt.id)[0]
    pages = list(memoryview(grant.page_ids).cast("I"))
    return int((pair.d.executor.pool[pages, 0] >= 0).sum())


@pytest.mark.parametrize("end", ["cancel", "end_stream"])
@pytest.mark.parametrize(
    "state",
    ["waiting", "computing", "granted", "sending", "pushing", "delivered"],
)
async def test_ends_in_every_state(state: str, end: str) -> None:
    async with a_pair(p_max_sequences=1) as pair:
        attempt = Attempted(LONG)
        blocker = Attempted(LONG)
        pair.p.executor.holds = state in ("waiting", "computing", "granted")
        pair.p.transport.holds = state == "pushing"
        if state == "waiting":
            pair.submit_prefill(blocker)
        pair.submit(attempt)
        await _reach(pair, attempt, state)

        if end == "cancel":
            pair.p.prefill.cancel(attempt.id, pair.from_p.outbox)
            pair.d.decode.cancel(attempt.id, pair.from_d.outbox)
            pair.p.prefill.cancel(blocker.id, pair.from_p.outbox)
        else:
            for node, ear in ((pair.p, pair.from_p), (pair.d, pair.from_d)):
                node.prefill.end_stream(ear.outbox)
                node.decode.end_stream(ear.outbox)
        told = len(pair.from_p.history)
        if state == "pushing":
            await until(lambda: pair.p.prefill.stats.active == 1)
            assert pair.p.free_pages < pair.p.all_pages, "pages freed under a push"
            assert pair.d.decode.stats.quarantined == 1
            pair.p.transport.holds = False
        pair.p.executor.let_go()
        await pair.quiet()
        assert len(pair.from_p.history) == told, "told of an attempt after its end"


async def _reach(pair: Pair, attempt: Attempted, state: str) -> None:
    if state in ("computing", "granted"):
        await until(lambda: pair.p.executor.held)
        pair.p.executor.step()
        await until(lambda: pair.p.executor.held)
    if state in ("granted", "pushing", "delivered"):
        await pair.forward_grant(attempt)
    if state in ("sending", "pushing"):
        await pair.from_p.heard("first_token", attempt.id)
    if state == "pushing":
        await until(lambda: pair.p.transport.held_pushes)
    if state == "delivered":
        await pair.from_p.heard("prefill_done", attempt.id)


async def test_a_first_token_that_ends_the_request_sends_nothing_final() -> None:
    async with a_pair() as pair:
        attempt = Attempted(LONG).stop_with_first()
        pair.p.executor.holds = True
        await pair.begin(attempt)
        pair.p.executor.let_go()
        finished = await pair.from_p.heard("finished", attempt.id)
        assert finished.reason == worker_pb2.END_REASON_STOP_TOKEN
        assert finished.output_tokens == 1
        assert finished.HasField("timings")
        done = await pair.from_p.heard("prefill_done", attempt.id)
        assert done.sent_unix_ns == 0
        assert pair.from_p.kinds(attempt.id) == ["first_token", "finished", "prefill_done"]
        assert not pair.from_d.all("delivered")
        pair.d.decode.cancel(attempt.id, pair.from_d.outbox)
        await pair.quiet()


async def test_one_token_needs_no_decode_worker() -> None:
    async with a_pair() as pair:
        attempt = Attempted(LONG, max_tokens=1)
        pair.p.prefill.submit(attempt.message(worker_pb2.WORK_MODE_PREFILL), pair.from_p.outbox)
        assert pair.p.prefill.stats.ungranted_tokens == 0
        finished = await pair.from_p.heard("finished", attempt.id)
        assert finished.reason == worker_pb2.END_REASON_LENGTH
        await pair.from_p.heard("prefill_done", attempt.id)
        assert pair.from_p.tokens[attempt.id, 0] == attempt.expected
        await pair.quiet()


async def test_one_choice_ends_with_its_first_token_and_the_others_go_on() -> None:
    async with a_pair() as pair:
        pair.p.executor.differs_by_choice = True
        attempt = Attempted(10, choices=3)
        attempt.stops = frozenset({(attempt.expected[0] + 1) % VOCAB})
        await pair.run(attempt)
        (finished,) = pair.from_p.all("finished", attempt.id)
        assert (finished.choice_index, finished.output_tokens) == (1, 1)
        assert not finished.HasField("timings")
        ends = {end.choice_index: end for end in pair.from_d.all("finished", attempt.id)}
        assert ends[1].output_tokens == 1
        assert ends[1].reason == worker_pb2.END_REASON_STOP_TOKEN
        assert pair.from_d.tokens[attempt.id, 0] == attempt.expected
        assert [len(pair.from_d.tokens[attempt.id, c]) > 1 for c in range(3)] == [True, False, True]
        await pair.quiet()


async def test_counts_what_was_sent_and_what_failed() -> None:
    async with a_pair() as pair:
        await pair.run(Attempted(LONG))
        read = pair.p.metrics.registry.get_sample_value
        sent = {"transport": "loopback"}
        assert read("baton_kv_transfer_seconds_count", sent) == 1
        assert read("baton_kv_transfer_exposed_seconds_count", sent) == 1
        assert read("baton_engine_step_seconds_count") == 3
        assert read("baton_decode_batch_size_count") == 0
        await pair.quiet()


async def test_expires_without_a_grant() -> None:
    async with a_pair(p_grant_wait_s=0.0) as pair:
        attempt = Attempted(LONG)
        pair.submit_prefill(attempt)
        await pair.from_p.heard("first_token", attempt.id)
        pair.p.prefill.expire()
        failed = await pair.from_p.heard("failed", attempt.id)
        assert failed.reason == EXPIRED
        await pair.quiet()


async def test_a_grant_ends_the_wait_for_it() -> None:
    async with a_pair(p_grant_wait_s=0.0) as pair:
        attempt = Attempted(LONG)
        pair.p.transport.holds = True
        pair.submit(attempt)
        await pair.from_p.heard("first_token", attempt.id)
        await pair.forward_grant(attempt)
        pair.p.prefill.expire()
        pair.p.transport.holds = False
        await pair.from_d.heard("finished", attempt.id)
        await pair.quiet()


async def test_ends_at_its_deadline_wherever_it_stands() -> None:
    async with a_pair() as pair:
        pair.p.executor.holds = True
        attempt = Attempted(LONG, time_left_ms=0)
        pair.submit_prefill(attempt)
        await asyncio.sleep(DEADLINE_GRACE_S)
        pair.p.prefill.expire()
        assert (await pair.from_p.heard("failed", attempt.id)).reason == EXPIRED
        pair.p.executor.let_go()
        await pair.quiet()


@pytest.mark.parametrize("clock_ns", [1, 2**63])
async def test_a_clock_that_jumped_ends_nothing_and_keeps_nothing(clock_ns: int) -> None:
    """The router's clock or ours is years off: only the time left counts, from the receipt on."""
    async with a_pair() as pair:
        attempt = Attempted(20, time_left_ms=60_000, deadline_unix_ns=clock_ns)
        began_s = time.monotonic()
        pair.submit(attempt)
        for service in (pair.p.prefill, pair.d.decode):
            under_way = service._legs.get(attempt.id)
            assert under_way is not None
            left_s = under_way.expires_s - began_s - 60 - DEADLINE_GRACE_S
            assert 0 <= left_s < 5
            service.expire()
        await pair.forward_grant(attempt)
        await pair.from_d.heard("finished", attempt.id)
        await pair.quiet()


@pytest.mark.parametrize(
    "change",
    [
        {"page_ids": b"\1\0\0\0"},
        {"page_ids": b"\1"},
        {"held_pages": 99},
        {"decode_agent_name": "somebody"},
        {"transfer_id": b"short"},
    ],
    ids=lambda change: "-".join(change),
)
async def test_a_grant_that_cannot_be_meant_fails_the_attempt(change: dict[str, object]) -> None:
    async with a_pair() as pair:
        attempt = pair.submit(Attempted(LONG))
        grant = await pair.from_d.heard("granted", attempt.id)
        bad = worker_pb2.Grant()
        bad.CopyFrom(grant)
        for field, value in change.items():
            setattr(bad, field, value)
        pair.p.prefill.grant(bad, pair.from_p.outbox)
        assert (await pair.from_p.heard("failed", attempt.id)).reason == KV_TRANSFER
        pair.d.decode.cancel(attempt.id, pair.from_d.outbox)
        await pair.quiet()


async def test_only_the_first_grant_and_the_first_submit_count() -> None:
    async with a_pair() as pair:
        attempt = pair.submit(Attempted(LONG))
        pair.submit(attempt)
        grant = await pair.forward_grant(attempt)
        pair.p.prefill.grant(grant, pair.from_p.outbox)
        await pair.from_d.heard("finished", attempt.id)
        await pair.from_p.heard("prefill_done", attempt.id)
        pair.p.prefill.grant(grant, pair.from_p.outbox)
        pair.submit(attempt)
        await pair.quiet()
        assert pair.from_p.kinds(attempt.id) == ["first_token", "prefill_done"]
        assert pair.from_d.tokens[attempt.id, 0] == attempt.expected


async def test_a_cancel_that_overtook_its_submit_still_ends_it() -> None:
    async with a_pair() as pair:
        attempt = Attempted(LONG)
        pair.p.prefill.cancel(attempt.id, pair.from_p.outbox)
        pair.submit_prefill(attempt)
        await pair.quiet()
        assert not pair.from_p.history


@pytest.mark.parametrize("landed", [False, True])
async def test_pages_stay_pinned_after_a_push_error_until_the_peer_is_gone(landed: bool) -> None:
    """The error says nothing about what landed: the decode side knows, and goes on if all did."""
    async with a_pair() as pair:
        attempt = Attempted(LONG)
        pair.p.transport.holds = True
        pair.submit(attempt)
        await pair.from_p.heard("first_token", attempt.id)
        await pair.forward_grant(attempt)
        await until(lambda: pair.p.held_pages == attempt.num_pages)
        *others, last = pair.p.transport.held_pushes
        for push in others:
            pair.p.transport.land(push)
        pair.p.transport.fail(last, lands=landed)
        assert (await pair.from_p.heard("failed", attempt.id)).reason == KV_TRANSFER
        if landed:
            await pair.from_d.heard("delivered", attempt.id)
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        assert (await pair.from_d.heard("aborted", attempt.id)).already_ready == landed
        if landed:
            await pair.from_d.heard("finished", attempt.id)
            assert pair.from_d.tokens[attempt.id, 0] == attempt.expected
        assert pair.d.decode.stats.quarantined == (not landed)
        assert pair.p.free_pages < pair.p.all_pages
        pair.p.peers.part(pair.d.name, True, pair.from_p.outbox)
        await until(lambda: pair.p.is_quiet)
        pair.d.peers.part(pair.p.name, True, pair.from_d.outbox)
        await pair.quiet()


async def test_a_failed_step_fails_the_attempt() -> None:
    async with a_pair() as pair:
        attempt = Attempted(LONG)
        pair.p.executor.fail_next = RuntimeError("device")
        pair.submit(attempt)
        assert (await pair.from_p.heard("failed", attempt.id)).reason == INTERNAL
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        assert not (await pair.from_d.heard("aborted", attempt.id)).already_ready
        await pair.quiet()


async def test_a_failed_step_frees_no_page_that_is_on_its_way() -> None:
    """A chunk of the prompt is being pushed as the next one fails: nobody else may have its pages,
    or the push would carry what they write there."""
    async with a_pair() as pair:
        pair.p.executor.holds = pair.p.transport.holds = True
        attempt = await pair.begin(Attempted(LONG))
        await until(lambda: pair.p.executor.held)
        pair.p.executor.step()
        await until(lambda: pair.p.held_pages)
        pair.p.executor.fail_next = RuntimeError("device")
        pair.p.executor.let_go()
        assert (await pair.from_p.heard("failed", attempt.id)).reason == INTERNAL
        assert pair.p.all_pages - pair.p.free_pages == attempt.num_pages
        pair.p.transport.holds = False
        await until(lambda: pair.p.is_quiet)
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        await pair.quiet()


async def test_what_can_never_fit_is_refused() -> None:
    async with a_pair(num_pages=5) as pair:
        attempt = Attempted(LONG)
        pair.submit_prefill(attempt)
        failed = await pair.from_p.heard("failed", attempt.id)
        assert failed.reason == worker_pb2.FAILURE_REASON_TOO_LARGE
        await pair.quiet()


async def test_stops_computing_when_the_decode_side_gives_up() -> None:
    async with a_pair() as pair:
        pair.p.executor.holds = True
        attempt = await pair.begin(Attempted(LONG))
        await until(lambda: pair.p.executor.held)
        pair.p.executor.step()
        await until(lambda: pair.p.executor.held and pair.p.transfer.counters.descriptors_posted)
        pair.d.decode.cancel(attempt.id, pair.from_d.outbox)
        assert (await pair.from_p.heard("failed", attempt.id)).reason == KV_TRANSFER
        pair.p.executor.let_go()
        await pair.quiet()
        assert not pair.from_p.all("first_token")


async def test_done_without_sending_where_the_decode_side_wants_no_more() -> None:
    async with a_pair() as pair:
        pair.p.transport.holds = True
        attempt = await pair.begin(Attempted(LONG))
        await pair.from_p.heard("first_token", attempt.id)
        pair.d.decode.cancel(attempt.id, pair.from_d.outbox)
        pair.p.transport.holds = False
        await pair.from_p.heard("prefill_done", attempt.id)
        await pair.quiet()


async def test_says_how_much_is_queued_and_not_granted() -> None:
    async with a_pair() as pair:
        pair.p.executor.holds = True
        attempt = pair.submit(Attempted(LONG))
        await until(lambda: pair.p.engine.load().queued_prefill_tokens == LONG)
        assert pair.p.prefill.stats.ungranted_tokens == LONG
        await pair.forward_grant(attempt)
        assert pair.p.prefill.stats.ungranted_tokens == 0
        await until(lambda: pair.p.executor.held)
        pair.p.executor.step()
        await until(lambda: pair.p.engine.load().queued_prefill_tokens == LONG - STEP_TOKENS)
        pair.p.executor.let_go()
        await pair.from_p.heard("first_token", attempt.id)
        await until(lambda: pair.p.engine.load().queued_prefill_tokens == 0)
        await pair.from_d.heard("finished", attempt.id)
        await pair.quiet()


async def test_everything_fails_when_the_process_ends() -> None:
    async with a_pair() as pair:
        pair.p.executor.holds = True
        attempt = Attempted(LONG)
        pair.submit_prefill(attempt)
        pair.p.prefill.fail_all(worker_pb2.FAILURE_REASON_DRAINING)
        failed = await pair.from_p.heard("failed", attempt.id)
        assert failed.reason == worker_pb2.FAILURE_REASON_DRAINING
        pair.p.executor.let_go()
        await pair.quiet()
