"""Prompts that are taken over: the router is told instead of a grant, and nobody else is needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from worker_kit import PAGE_BYTES, STEP_TOKENS, Attempted, Pair, a_pair, until

from baton.worker.v1 import worker_pb2

LONG = 3 * STEP_TOKENS
REST = 2 * STEP_TOKENS - 3
"""More than one step computes."""


@asynccontextmanager
async def a_second_turn(
    choices: int = 1, max_tokens: int = 12, **options: Any
) -> AsyncIterator[tuple[Pair, Attempted]]:
    """A pair, and an attempt whose prompt begins with all that its decode worker holds."""
    async with a_pair(**options) as pair:
        first = Attempted(LONG, max_tokens=4)
        await pair.run(first)
        turn = Attempted(REST, choices=choices, max_tokens=max_tokens, takeover_tokens=192)
        turn.prompt = [*first.prompt, *turn.prompt]
        yield pair, turn


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_taken_over_attempt_runs_whole(choices: int) -> None:
    async with a_second_turn(choices) as (pair, turn):
        received = pair.d.transfer.counters.transfers_received
        pair.submit_decode(turn)
        told = await pair.from_d.heard("taken_over", turn.id)
        assert told.cached_prompt_tokens == LONG
        first = await pair.from_d.heard("first_token", turn.id)
        assert [record.token_id for record in first.records] == turn.expected[:1] * choices
        assert first.cached_prompt_tokens == LONG
        await until(lambda: len(pair.from_d.all("finished", turn.id)) == choices)
        for choice in range(choices):
            assert pair.from_d.tokens[turn.id, choice] == turn.expected
        ends = ["finished"] * choices
        assert pair.from_d.kinds(turn.id) == ["taken_over", "first_token", *ends]
        times = pair.from_d.all("finished", turn.id)[-1].timings
        assert times.cached_prompt_tokens == LONG
        assert times.received_unix_ns <= times.prefill_started_unix_ns <= times.ready_unix_ns
        assert pair.d.transfer.counters.transfers_received == received
        await pair.quiet()


async def test_one_token_too_many_is_received() -> None:
    async with a_second_turn() as (pair, turn):
        turn.takeover_tokens = REST - 1
        await pair.run(turn)
        assert pair.from_d.kinds(turn.id) == ["granted", "delivered", "finished"]
        assert pair.from_d.tokens[turn.id, 0] == turn.expected
        await pair.quiet()


async def test_abort_after_a_take_over_changes_nothing() -> None:
    """Another attempt elsewhere must not start: this one needs nobody, and tells tokens already."""
    async with a_second_turn() as (pair, turn):
        pair.d.executor.holds = True
        pair.submit_decode(turn)
        await pair.from_d.heard("taken_over", turn.id)
        pair.d.decode.abort(turn.id, pair.from_d.outbox)
        assert (await pair.from_d.heard("aborted", turn.id)).already_ready
        pair.d.executor.let_go()
        await pair.from_d.heard("finished", turn.id)
        assert pair.from_d.tokens[turn.id, 0] == turn.expected
        await pair.quiet()


async def test_its_peers_share_goes_to_the_next_at_once() -> None:
    """The peer writes none of its pages, so it must hold up nothing that the peer is to write."""
    async with a_second_turn(d_max_bytes_per_peer=((LONG + REST) // 4 + 1) * PAGE_BYTES) as (
        pair,
        turn,
    ):
        pair.d.executor.holds = True
        pair.submit_decode(turn)
        await pair.from_d.heard("taken_over", turn.id)
        other = Attempted(LONG)
        pair.submit_decode(other)
        await until(lambda: pair.from_d.all("granted", other.id) or _step(pair))
        pair.d.decode.cancel(other.id, pair.from_d.outbox)
        pair.d.executor.let_go()
        await pair.from_d.heard("finished", turn.id)
        await pair.quiet()


@pytest.mark.parametrize("end", ["cancel", "end_stream", "expire", "fail_all"])
@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_ends_while_it_is_computed_and_while_it_runs(steps: int, end: str) -> None:
    """Its pages are free at once: there is no transfer, and so no quarantine."""
    async with a_second_turn(max_tokens=40) as (pair, turn):
        pair.d.executor.holds = True
        pair.submit_decode(turn)
        await pair.from_d.heard("taken_over", turn.id)
        for _ in range(steps):
            await until(lambda: pair.d.executor.held)
            pair.d.executor.step()
        decode, outbox = pair.d.decode, pair.from_d.outbox
        match end:
            case "cancel":
                decode.cancel(turn.id, outbox)
            case "end_stream":
                decode.end_stream(outbox)
            case "expire":
                under_way = decode._legs.get(turn.id)
                assert under_way is not None
                under_way.expires_s = 0.0
                decode.expire()
            case "fail_all":
                decode.fail_all(worker_pb2.FAILURE_REASON_DRAINING)
        assert not decode.stats.active
        assert not decode.stats.quarantined
        pair.d.executor.let_go()
        await pair.quiet()


def _step(pair: Pair) -> None:
    """The step loop waits for the step that is held, and hears nothing until then."""
    if pair.d.executor.held:
        pair.d.executor.step()
