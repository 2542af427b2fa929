"""Transfers that do not end: what is told of them, and who is avoided for them."""

from __future__ import annotations

import time

import pytest
from worker_kit import Attempted, Pair, a_pair, until

from worker_base.overdue import OVERDUE_S, Unended, overdue, peers_to_avoid


def later(pair: Pair, seconds: float) -> None:
    """Both workers' clocks of attempts stand so much ahead."""
    for service in (pair.p.prefill, pair.d.decode):
        service._legs.clock = lambda: time.monotonic() + seconds


def causes(node) -> set[str]:
    return {peer.cause for peer in node.peers.health()}


async def test_a_push_that_does_not_end_is_stuck_here_and_overdue_there() -> None:
    async with a_pair() as pair:
        for node in (pair.p, pair.d):
            node.peers.held_against = node.services.peers_to_avoid
        pair.p.transport.holds = True
        attempt = pair.submit(Attempted(32))
        await pair.from_p.heard("first_token", attempt.id)
        assert not pair.p.prefill.stats.unended_sends(), "it waits for its grant"
        await pair.forward_grant(attempt)
        await until(lambda: pair.p.prefill.stats.unended_sends() and pair.p.transport.held_pushes)
        pair.d.decode.abort(attempt.id, pair.from_d.outbox)
        await until(lambda: pair.d.decode.stats.quarantined)
        for node in (pair.p, pair.d):
            figures = node.services.overdue()
            assert figures.quarantines == figures.sends == 0
            assert causes(node) == {""}

        later(pair, OVERDUE_S)
        there, here = pair.d.services.overdue(), pair.p.services.overdue()
        assert (there.quarantines, there.sends) == (1, 0)
        assert OVERDUE_S < there.oldest_quarantine_s < OVERDUE_S + 10
        assert (here.quarantines, here.sends) == (0, 1)
        assert OVERDUE_S < here.oldest_send_s < OVERDUE_S + 10
        assert causes(pair.d) == {"quarantine_overdue"}
        assert causes(pair.p) == {"sends_stuck"}
        assert [path.cause for path in pair.d.peers.paths()] == ["quarantine_overdue"]

        pair.p.transport.holds = False
        await pair.quiet()
        for node in (pair.p, pair.d):
            assert node.services.overdue() == (0, 0.0, 0, 0.0)
            assert causes(node) == {""}


async def test_a_send_that_was_given_up_counts_from_then() -> None:
    async with a_pair() as pair:
        pair.p.transport.holds = pair.p.executor.holds = True
        attempt = await pair.begin(Attempted(40))
        await until(lambda: pair.p.executor.held)
        pair.p.executor.step()
        await until(lambda: pair.p.transport.held_pushes)
        assert not pair.p.prefill.stats.unended_sends(), "more is to be computed"
        pair.p.prefill.cancel(attempt.id, pair.from_p.outbox)
        (send,) = pair.p.prefill.stats.unended_sends()
        assert send.peer == pair.d.name
        pair.d.decode.cancel(attempt.id, pair.from_d.outbox)
        pair.p.transport.holds = False
        pair.p.executor.let_go()
        await pair.quiet()


@pytest.mark.parametrize(
    ("quarantine_s", "send_s", "crowds", "cause"),
    [
        (1.0, 1.0, False, ""),
        (1.0, 9.0, False, "sends_stuck"),
        (9.0, 9.0, False, "quarantine_overdue"),
        (9.0, 9.0, True, "share_full"),
    ],
)
def test_the_worst_is_said(quarantine_s: float, send_s: float, crowds: bool, cause: str) -> None:
    quarantines, sends = [Unended("p", quarantine_s)], [Unended("p", send_s)]
    assert peers_to_avoid(quarantines, sends, ["p"] * crowds).get("p", "") == cause
    assert overdue(quarantines, sends).oldest_send_s == send_s
