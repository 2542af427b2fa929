"""Many attempts at once, and a router that cancels, aborts, breaks off and dawdles at random.

Whatever happens when: in the end no page is held, no transfer is open, no attempt is known, nothing
was said after an end, and every token said is the one that the prompt gives alone.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from worker_kit import DECODE, PREFILL, Attempted, Ear, Pair, a_pair, until

from baton.worker.v1 import worker_pb2

ATTEMPTS = 30
EXPECTED_FAILURES = {
    worker_pb2.FAILURE_REASON_EXPIRED,
    worker_pb2.FAILURE_REASON_KV_TRANSFER,
}
"""A step that read KV which nobody wrote for it would be INTERNAL."""


@pytest.mark.parametrize("seed", range(8))
async def test_random_interleavings_leave_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    options = {
        "num_pages": rng.choice([25, 41]),
        "d_grant_timeout_s": rng.choice([0.02, 5.0]),
        "p_grant_wait_s": rng.choice([0.01, 5.0]),
    }
    async with a_pair(**options) as pair:
        routers = [(pair.from_p, pair.from_d), (Ear(), Ear())]
        pair.p.transport.delay_s = rng.choice([0.0, 0.002, 0.01])
        ticking = asyncio.create_task(_tick(pair))
        attempts = [_attempted(rng) for _ in range(ATTEMPTS)]
        async with asyncio.timeout(60):
            await asyncio.gather(
                *(
                    _play(pair, attempt, *rng.choice(routers), random.Random(rng.random()))
                    for attempt in attempts
                )
            )
        for from_p, from_d in routers:
            pair.p.prefill.end_stream(from_p.outbox)
            pair.d.decode.end_stream(from_d.outbox)
        await pair.quiet()
        ticking.cancel()
        await until(lambda: not _unanswered(attempts))  # The ears may be a turn behind.
        for from_p, from_d in routers:
            for attempt in attempts:
                _check(attempt, from_p, from_d)
            from_p.close()
            from_d.close()


async def _tick(pair: Pair) -> None:
    while True:
        pair.p.prefill.expire()
        pair.d.decode.expire()
        await asyncio.sleep(0.005)


def _attempted(rng: random.Random) -> Attempted:
    attempt = Attempted(
        rng.randint(1, 60),
        max_tokens=rng.randint(1, 12),
        choices=rng.choice([1, 1, 1, 2, 3]),
        seed=rng.randrange(10),  # some prompts repeat, and hit the prefix caches
    )
    return attempt.stop_with_first() if rng.random() < 0.15 else attempt


async def _play(
    pair: Pair, attempt: Attempted, from_p: Ear, from_d: Ear, rng: random.Random
) -> None:
    """A router's part: both submits, the grant, and a random wish at a random time."""
    await asyncio.sleep(rng.random() * 0.1)
    submits = [
        lambda: pair.p.prefill.submit(attempt.message(PREFILL, pair.d.name), from_p.outbox),
        lambda: pair.d.decode.submit(attempt.message(DECODE, pair.p.name), from_d.outbox),
    ]
    rng.shuffle(submits)
    for submit in submits:
        submit()
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.01)
    granting = asyncio.create_task(_grant(pair, attempt, from_p, from_d, rng))
    await asyncio.sleep(rng.choice([0, 0.001, 0.005, 0.02, 0.05, 0.2]))
    for wish in rng.sample(["nothing", "cancel_p", "cancel_d", "abort", "break"], k=2):
        match wish:
            case "cancel_p":
                pair.p.prefill.cancel(attempt.id, from_p.outbox)
            case "cancel_d":
                pair.d.decode.cancel(attempt.id, from_d.outbox)
            case "abort":
                attempt.abort_asked = from_d
                pair.d.decode.abort(attempt.id, from_d.outbox)
            case "break" if rng.random() < 0.1:
                pair.p.prefill.end_stream(from_p.outbox)
                pair.d.decode.end_stream(from_d.outbox)
        await asyncio.sleep(rng.random() * 0.01)
    granting.cancel()
    if rng.random() < 0.5:
        await asyncio.sleep(0.05)
    pair.p.prefill.cancel(attempt.id, from_p.outbox)
    if rng.random() < 0.5:
        pair.d.decode.cancel(attempt.id, from_d.outbox)


async def _grant(
    pair: Pair, attempt: Attempted, from_p: Ear, from_d: Ear, rng: random.Random
) -> None:
    grant = await from_d.heard("granted", attempt.id)
    if rng.random() < 0.3:
        await asyncio.sleep(rng.random() * 0.02)
    pair.p.prefill.grant(grant, from_p.outbox)
    if rng.random() < 0.1:
        pair.p.prefill.grant(grant, from_p.outbox)


def _unanswered(attempts: list[Attempted]) -> list[Attempted]:
    """Those whose abort was asked for and not answered: every one is."""
    return [
        attempt
        for attempt in attempts
        if (ear := attempt.abort_asked) and not ear.all("aborted", attempt.id)
    ]


def _check(attempt: Attempted, from_p: Ear, from_d: Ear) -> None:
    for ear in (from_p, from_d):
        for choice in range(attempt.choices):
            tokens = ear.tokens.get((attempt.id, choice), [])
            assert tokens == attempt.expected[: len(tokens)]
        kinds = ear.kinds(attempt.id)
        for end in ("failed", "prefill_done"):
            assert kinds.count(end) <= 1
        assert "failed" not in kinds or "prefill_done" not in kinds
        after_end = kinds[kinds.index("failed") + 1 :] if "failed" in kinds else []
        assert set(after_end) <= {"aborted"}
        assert {failed.reason for failed in ear.all("failed", attempt.id)} <= EXPECTED_FAILURES
    kinds = from_d.kinds(attempt.id)
    aborted = [not message.already_ready for message in from_d.all("aborted", attempt.id)]
    assert not any(aborted) or "delivered" not in kinds, "aborted, and delivered all the same"
    if kinds.count("finished") == attempt.choices:
        for choice in range(attempt.choices):
            assert from_d.tokens[attempt.id, choice] == attempt.expected
