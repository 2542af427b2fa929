"""Decode attempts, from any state to any end. Races are the point: between the router's wishes, the
prefill side's writes and the engine's steps, each order has a test."""

from __future__ import annotations

import pytest
from worker_kit import STEP_TOKENS, WHOLE, Attempted, Pair, a_pair, until

from baton.worker.v1 import worker_pb2
from faults import failpoints
from worker_base.messages import unpack_ids

EXPIRED = worker_pb2.FAILURE_REASON_EXPIRED
KV_TRANSFER = worker_pb2.FAILURE_REASON_KV_TRANSFER
LONG = 3 * STEP_TOKENS


async def test_joins_what_was_delivered() -> None:
    async with a_pair() as pair:
        attempt = Attempted(LONG + 1, max_tokens=20)
        await pair.run(attempt)
        assert pair.from_d.kinds(attempt.id) == ["granted", "delivered", "finished"]
        assert pair.from_d.tokens[attempt.id, 0] == attempt.expected
        finished = pair.from_d.all("finished")[0]
        assert finished.reason == worker_pb2.END_REASON_LENGTH
        assert finished.output_tokens == 20
        times = finished.timings
        assert times.received_unix_ns <= times.ready_unix_ns <= times.joined_unix_ns
        assert times.joined_unix_ns <= times.last_token_unix_ns
        await pair.quiet()


async def test_tokens_of_one_step_travel_in_one_message() -> None:
    async with a_pair() as pair:
        attempts = [Attempted(8, max_tokens=40) for _ in range(3)]
        for attempt in attempts:
            pair.submit(attempt)
            await pair.from_d.heard("granted", attempt.id)
        pair.d.executor.holds = True
        for attempt in attempts:
            await pair.forward_grant(attempt)
            await pair.from_d.heard("delivered", attempt.id)
        pair.d.executor.let_go()
        for attempt in attempts:
            await pair.from_d.heard("finished", attempt.id)
            assert pair.from_d.tokens[attempt.id, 0] == attempt.expected
        messages = [message for kind, message in pair.from_d.history if kind == "tokens"]
        assert max(len(set(message.attempt_ids)) for message in messages) >= 3
        assert len(messages) < 2 * 40
        await pair.quiet()


async def test_repeats_token_zero_first() -> None:
    async with a_pair() as pair:
        attempt = Attempted(8, choices=2)
        await pair.run(attempt)
        first = next(message for kind, message in pair.from_d.history if kind == "tokens")
        assert unpack_ids(first.choice_indices).tolist()[:2] == [0, 1]
        assert unpack_ids(first.indices).tolist()[:2] == [0, 0]
        for choice in range(2):
            assert pair.from_d.tokens[attempt.id, choice] == attempt.expected
        await pair.quiet()


async def test_a_prefix_that_is_held_already_is_not_sent() -> None:
    async with a_pair() as pair:
        first, second = Attempted(LONG, seed=5), Attempted(LONG, seed=5)
        await pair.run(first)
        sent = pair.p.transfer.counters.bytes_sent
        await pair.run(second)
        assert pair.from_d.all("granted", second.id)[0].held_pages > 0
        assert pair.p.transfer.counters.bytes_sent - sent < sent
        assert pair.from_d.tokens[second.id, 0] == second.expected
        await pair.quiet()


@pytest.mark.parametrize("end", ["cancel", "end_stream", "expire", "fail_all"])
@pytest.mark.parametrize(
    "state", ["waiting", "reserved", "granted", "filling", "pushing", "ready", "running", "ended"]
)
async def test_ends_in_every_state(state: str, end: str) -> None:
    async with a_pair(d_max_sequences=1) as pair:
        attempt = Attempted(LONG, max_tokens=30)
        blocker = Attempted(8)
        if state == "waiting":
            pair.submit_decode(blocker)
            await pair.from_d.heard("granted", blocker.id)
        await _reach(pair, attempt, state)
        under_way = pair.d.decode._legs.get(attempt.id)
        if end == "expire" and under_way is not None:
            under_way.expires_s = 0.0

        _end(pair, attempt, end)
        told = pair.from_d.kinds(attempt.id)
        if state == "pushing":
            assert pair.d.decode.stats.quarantined == 1
            await until(lambda: pair.d.engine.load().quarantined_pages == attempt.num_pages)
        pair.d.inbox.resume()
        _release_everything(pair)
        pair.d.decode.cancel(blocker.id, pair.from_d.outbox)
        pair.p.prefill.cancel(attempt.id, pair.from_p.outbox)
        await pair.quiet()
        added = pair.from_d.kinds(attempt.id)[len(told) :]
        assert added in ([], ["failed"])


async def _reach(pair: Pair, attempt: Attempted, state: str) -> None:
    if state == "reserved":
        pair.d.inbox.pause()
    pair.p.executor.holds = state == "filling"
    pair.p.transport.holds = state == "pushing"
    pair.d.executor.holds = state in ("ready", "running")
    pair.submit(attempt)
    if state == "waiting":
        await until(lambda: pair.d.engine.load().waiting_requests)
        return
    if state == "reserved":
        await until(lambda: pair.d.inbox.kept)
        return
    await pair.from_d.heard("granted", attempt.id)
    if state == "granted":
        return
    await pair.forward_grant(attempt)
    if state == "filling":
        await until(lambda: pair.p.executor.held)
        pair.p.executor.step()
        await until(lambda: pair.p.transfer.counters.descriptors_posted)
    elif state == "pushing":
        await until(lambda: pair.p.transport.held_pushes)
    elif state == "ready":
        await pair.from_d.heard("delivered", attempt.id)
    elif state == "running":
        await until(lambda: pair.d.executor.held)
        pair.d.executor.step()
        await until(lambda: len(pair.from_d.tokens[attempt.id, 0]) > 1)
    elif state == "ended":
        await pair.from_d.heard("finished", attempt.id)


def _end(pair: Pair, attempt: Attempted, end: str) -> None:
    decode, outbox = pair.d.decode, pair.from_d.outbox
    match end:
        case "cancel":
            decode.cancel(attempt.id, outbox)
        case "end_stream":
            decode.end_stream(outbox)
        case "expire":
            decode.expire()
        case "fail_all":
            decode.fail_all(worker_pb2.FAILURE_REASON_DRAINING)


def _release_everything(pair: Pair) -> None:
    pair.p.executor.let_go()
    pair.d.executor.let_go()
    pair.p.transport.holds = False


# Abort: a compare-and-set against delivery.


async def test_abort_before_delivery_wins() -> None:
    async with a_pair() as pair:
        pair.p.transport.holds = True
        attempt = await pair.begin(Attempted(LONG))
        await until(lambda: pair.p.transport.held_pushes)
        await until(lambda: pair.d.engine.load().granted_pages)
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        assert not (await pair.from_d.heard("aborted", attempt.id)).already_ready
        assert pair.d.decode.stats.quarantined == 1
        assert pair.d.free_pages < pair.d.all_pages, "pages freed under a push"
        pair.p.transport.holds = False
        pair.p.prefill.cancel(attempt.id, pair.from_p.outbox)
        await pair.quiet()
        assert not pair.from_d.all("delivered")


async def test_abort_after_delivery_changes_nothing() -> None:
    async with a_pair() as pair:
        pair.d.executor.holds = True
        attempt = await pair.begin(Attempted(LONG))
        await pair.from_d.heard("delivered", attempt.id)
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        assert (await pair.from_d.heard("aborted", attempt.id)).already_ready
        pair.d.executor.let_go()
        await pair.from_d.heard("finished", attempt.id)
        assert pair.from_d.tokens[attempt.id, 0] == attempt.expected
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        await until(lambda: len(pair.from_d.all("aborted", attempt.id)) == 2)
        assert pair.from_d.all("aborted", attempt.id)[1].already_ready
        await pair.quiet()


async def _delivered_unheard(pair: Pair) -> Attempted:
    """An attempt whose delivery has happened, which the event loop does not know yet."""
    attempt = Attempted(LONG)
    pair.p.transport.holds = True
    await pair.begin(attempt)
    await until(lambda: pair.p.transport.held_pushes)
    pair.d.inbox.pause()
    pair.p.transport.holds = False
    await until(lambda: pair.d.transfer.counters.transfers_received)
    await until(lambda: pair.d.inbox.kept)
    return attempt


async def test_the_engine_hears_of_a_delivery_while_the_loop_is_busy() -> None:
    async with a_pair() as pair:
        attempt = await _delivered_unheard(pair)
        await until(lambda: pair.d.inbox.kept > attempt.max_tokens)  # The steps' events.
        assert not pair.from_d.all("delivered")
        pair.d.inbox.resume()
        await pair.from_d.heard("finished", attempt.id)
        assert pair.from_d.kinds(attempt.id) == ["granted", "delivered", "finished"]
        assert pair.from_d.tokens[attempt.id, 0] == attempt.expected
        await pair.quiet()


async def test_the_loop_tells_the_engine_if_the_transfer_thread_could_not() -> None:
    async with a_pair() as pair:
        failpoints.arm("decode.ready=raise")
        attempt = Attempted(LONG)
        try:
            await pair.run(attempt)
        finally:
            failpoints.arm("")
        assert pair.from_d.tokens[attempt.id, 0] == attempt.expected
        await pair.quiet()


async def test_abort_that_crosses_delivery_says_so_and_the_attempt_goes_on() -> None:
    async with a_pair() as pair:
        attempt = await _delivered_unheard(pair)
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        pair.d.inbox.resume()
        assert (await pair.from_d.heard("aborted", attempt.id)).already_ready
        await pair.from_d.heard("finished", attempt.id)
        assert pair.from_d.kinds(attempt.id) == ["granted", "delivered", "aborted", "finished"]
        assert pair.from_d.tokens[attempt.id, 0] == attempt.expected
        await pair.quiet()


@pytest.mark.parametrize("aborted_first", [False, True])
async def test_cancel_that_crosses_delivery_frees_what_was_delivered(aborted_first: bool) -> None:
    async with a_pair() as pair:
        attempt = await _delivered_unheard(pair)
        if aborted_first:
            pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        pair.d.decode.cancel(attempt.id, pair.from_d.outbox)
        pair.d.inbox.resume()
        await pair.quiet()
        assert not pair.from_d.all("delivered")


async def test_abort_before_a_grant_ends_it_at_once() -> None:
    async with a_pair(d_max_sequences=1) as pair:
        blocker, attempt = Attempted(8), Attempted(LONG)
        pair.submit_decode(blocker)
        await pair.from_d.heard("granted", blocker.id)
        pair.submit_decode(attempt)
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        assert not (await pair.from_d.heard("aborted", attempt.id)).already_ready
        pair.d.decode.cancel(blocker.id, pair.from_d.outbox)
        await pair.quiet()
        assert pair.from_d.kinds(attempt.id) == ["aborted"]


async def test_a_grant_that_was_never_told_is_freed() -> None:
    async with a_pair() as pair:
        pair.d.inbox.pause()
        attempt = Attempted(LONG)
        pair.submit_decode(attempt)
        await until(lambda: pair.d.engine.load().granted_pages)
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        pair.d.inbox.resume()
        await pair.quiet()
        assert pair.from_d.kinds(attempt.id) == ["aborted"]
        assert pair.d.transfer.counters.transfers_aborted == 0


async def test_abort_of_what_is_unknown_is_answered_and_refuses_a_later_submit() -> None:
    async with a_pair() as pair:
        attempt = Attempted(LONG)
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        assert not (await pair.from_d.heard("aborted", attempt.id)).already_ready
        pair.submit_decode(attempt)
        await pair.quiet()
        assert pair.from_d.kinds(attempt.id) == ["aborted"]


async def test_a_cancel_that_overtook_its_submit_still_ends_it() -> None:
    async with a_pair() as pair:
        attempt = Attempted(LONG)
        pair.d.decode.cancel(attempt.id, pair.from_d.outbox)
        pair.submit_decode(attempt)
        await pair.quiet()
        assert not pair.from_d.history


async def test_duplicates_are_ignored() -> None:
    async with a_pair() as pair:
        attempt = Attempted(LONG)
        pair.submit_decode(attempt)
        await pair.run(attempt)
        pair.submit_decode(attempt)
        await pair.quiet()
        assert pair.from_d.kinds(attempt.id) == ["granted", "delivered", "finished"]


async def test_another_stream_cannot_touch_an_attempt() -> None:
    async with a_pair() as pair:
        pair.d.executor.holds = True
        attempt = await pair.begin(Attempted(LONG))
        await pair.from_d.heard("delivered", attempt.id)
        pair.d.decode.cancel(attempt.id, pair.from_p.outbox)
        pair.d.decode.abort(attempt.id, pair.from_p.outbox)
        assert not (await pair.from_p.heard("aborted", attempt.id)).already_ready
        pair.d.executor.let_go()
        await pair.from_d.heard("finished", attempt.id)
        await pair.quiet()


# Expiry.


async def test_a_grant_that_nobody_uses_expires() -> None:
    async with a_pair(d_grant_timeout_s=0.02) as pair:
        attempt = Attempted(LONG)
        pair.submit_decode(attempt)
        assert (await pair.from_d.heard("failed", attempt.id)).reason == EXPIRED
        await pair.quiet()


async def test_a_write_after_the_expiry_lands_in_quarantine() -> None:
    async with a_pair(d_grant_timeout_s=1.0) as pair:
        pair.p.transport.holds = True
        attempt = Attempted(LONG)
        pair.submit_prefill(attempt)
        await pair.from_p.heard("first_token", attempt.id)
        pair.submit_decode(attempt)
        await pair.forward_grant(attempt)
        await until(lambda: pair.p.transport.held_pushes)
        assert (await pair.from_d.heard("failed", attempt.id)).reason == EXPIRED
        assert pair.d.decode.stats.quarantined == 1
        assert pair.d.free_pages < pair.d.all_pages
        pair.p.transport.holds = False
        await pair.quiet()
        assert pair.from_d.kinds(attempt.id) == ["granted", "failed"]


async def test_abort_that_crosses_the_expiry_is_answered() -> None:
    async with a_pair(d_grant_timeout_s=0.02) as pair:
        attempt = Attempted(LONG)
        pair.submit_decode(attempt)
        await pair.from_d.heard("granted", attempt.id)
        pair.d.inbox.pause()
        await until(lambda: pair.d.transfer.counters.expired_grants)
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        pair.d.inbox.resume()
        assert not (await pair.from_d.heard("aborted", attempt.id)).already_ready
        await pair.from_d.heard("failed", attempt.id)
        await pair.quiet()


# Others.


async def test_token_zero_that_ends_a_choice_ends_it_here_as_well() -> None:
    async with a_pair() as pair:
        attempt = Attempted(8)
        pair.submit_prefill(attempt)
        ending = Attempted(8).stop_with_first()
        ending.id, ending.prompt = attempt.id, attempt.prompt
        ending.stop_with_first()
        pair.submit_decode(ending)
        await pair.forward_grant(attempt)
        finished = await pair.from_d.heard("finished", attempt.id)
        assert finished.output_tokens == 1
        assert finished.HasField("timings")
        await pair.from_p.heard("prefill_done", attempt.id)
        await pair.quiet()


async def test_a_payload_that_is_none_fails_the_attempt() -> None:
    async with a_pair() as pair:
        attempt = Attempted(8, choices=2)
        pair.submit_decode(attempt)
        attempt.choices = 1
        pair.submit_prefill(attempt)
        await pair.forward_grant(attempt)
        assert (await pair.from_d.heard("failed", attempt.id)).reason == KV_TRANSFER
        await pair.from_p.heard("prefill_done", attempt.id)
        await pair.quiet()


async def test_a_failed_step_fails_the_attempt() -> None:
    async with a_pair() as pair:
        pair.d.executor.holds = True
        attempt = await pair.begin(Attempted(8, max_tokens=30))
        await pair.from_d.heard("delivered", attempt.id)
        pair.d.executor.fail_next = RuntimeError("device")
        pair.d.executor.let_go()
        failed = await pair.from_d.heard("failed", attempt.id)
        assert failed.reason == worker_pb2.FAILURE_REASON_INTERNAL
        await pair.quiet()


# Whole attempts.


@pytest.mark.parametrize("end", ["cancel", "end_stream", "fail_all"])
@pytest.mark.parametrize("state", ["computing", "running"])
async def test_whole_attempts_end_in_every_state(state: str, end: str) -> None:
    async with a_pair() as pair:
        pair.d.executor.holds = True
        attempt = Attempted(LONG, max_tokens=50)
        pair.d.decode.submit(attempt.message(WHOLE), pair.from_d.outbox)
        steps = {"computing": 1, "running": 5}[state]
        for _ in range(steps):
            await until(lambda: pair.d.executor.held)
            pair.d.executor.step()
        if state == "running":
            await pair.from_d.heard("first_token", attempt.id)
        _end(pair, attempt, end)
        pair.d.executor.let_go()
        await pair.quiet()


async def test_abort_of_a_whole_attempt_ends_it_unless_its_prompt_is_computed() -> None:
    async with a_pair() as pair:
        pair.d.executor.holds = True
        early, late = Attempted(LONG), Attempted(LONG, max_tokens=30)
        pair.d.decode.submit(early.message(WHOLE), pair.from_d.outbox)
        pair.d.decode.abort(early.id, pair.from_d.outbox)
        assert not (await pair.from_d.heard("aborted", early.id)).already_ready
        pair.d.executor.let_go()
        pair.d.decode.submit(late.message(WHOLE), pair.from_d.outbox)
        await pair.from_d.heard("first_token", late.id)
        pair.d.decode.abort(late.id, pair.from_d.outbox)
        assert (await pair.from_d.heard("aborted", late.id)).already_ready
        await pair.from_d.heard("finished", late.id)
        await pair.quiet()
