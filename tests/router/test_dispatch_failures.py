"""Workers that die, freeze, fail or come back; full queues; and that nothing leaks from any."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from scripted_worker import (
    BOTH,
    BUSY_S,
    DECODE,
    PREFILL,
    Cluster,
    error_of,
    job,
    tokens_of,
    until,
    with_settings,
)

from baton.worker.v1 import worker_pb2
from router.dispatch import waiting
from router.workers import registry

if TYPE_CHECKING:
    from scripted_worker import Reader, ScriptedWorker

FAILURES = worker_pb2.FailureReason


async def finish(
    reader: Reader, prefill: ScriptedWorker, decode: ScriptedWorker, attempt: bytes
) -> None:
    """The rest of an attempt that goes well: tokens 10 and 11."""
    prefill.first_token(attempt, 10)
    prefill.prefill_done(attempt)
    decode.delivered(attempt)
    decode.tokens(attempt, 0, 10, 11)
    decode.finished(attempt, 2)
    assert tokens_of(await reader.end()) == [10, 11]


async def test_prefill_dies_and_another_takes_over(cluster: Cluster) -> None:
    """No second attempt before the decode worker has answered; the client sees latency only."""
    prefill, decode = await cluster.pair()
    other = await cluster.add("p1", PREFILL)
    reader = cluster.read(job(max_tokens=2))
    attempt = (await prefill.heard("submit")).attempt_id
    await decode.heard("submit")
    decode.grant(attempt)
    await prefill.heard("grant")

    await prefill.stop()
    assert (await decode.heard("abort")).attempt_id == attempt
    decode.report()
    await asyncio.sleep(0.05)
    assert other.count("submit") == 0
    assert decode.count("submit") == 0

    decode.aborted(attempt, already_ready=False)
    second = (await other.heard("submit")).attempt_id
    assert second != attempt
    assert (await decode.heard("submit")).peer_agent_name == other.agent_name
    await finish(reader, other, decode, second)
    assert decode.count("cancel") == 0


async def test_prefill_dies_after_delivery(cluster: Cluster) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=2))
    decode.delivered(attempt)
    decode.tokens(attempt, 0, 10)
    await reader.until(2)
    await prefill.stop()
    await until(lambda: len(cluster.registry.members) == 1)
    decode.tokens(attempt, 1, 11)
    decode.finished(attempt, 2)
    assert tokens_of(await reader.end()) == [10, 11]
    assert decode.count("abort") == 0


async def test_who_is_done_with_an_attempt_is_heard_no_more(cluster: Cluster) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=2))
    prefill.first_token(attempt, 10)
    prefill.prefill_done(attempt)
    prefill.failed(attempt, worker_pb2.FAILURE_REASON_INTERNAL)
    await cluster.caught_up(prefill)
    decode.delivered(attempt)
    decode.tokens(attempt, 0, 10, 11)
    decode.finished(attempt, 2)
    assert tokens_of(await reader.end()) == [10, 11]
    assert decode.count("abort") == 0


async def test_prefill_dies_and_its_last_word_made_it(cluster: Cluster) -> None:
    """Its notification reached the decode worker, its first token did not reach the router."""
    prefill, decode = await cluster.pair()
    other = await cluster.add("p1", PREFILL)
    reader = cluster.read(job(max_tokens=2))
    attempt = (await prefill.heard("submit")).attempt_id
    await prefill.stop()
    await decode.heard("abort")
    decode.aborted(attempt, already_ready=True)
    decode.tokens(attempt, 0, 10, 11)
    decode.finished(attempt, 2)
    assert tokens_of(await reader.end()) == [10, 11]
    assert other.count("submit") == 0


@with_settings(local_prefill="never")
async def test_only_prefill_worker_dies(cluster: Cluster) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job())
    await prefill.stop()
    await decode.heard("abort")
    decode.aborted(attempt, already_ready=False)
    error = await error_of(reader)
    assert (error.reason, error.code.name) == ("WORKER_LOST", "UNAVAILABLE")
    assert error.retry_after_s


async def test_prefill_dies_when_its_first_token_was_the_last(cluster: Cluster) -> None:
    """All that was wanted has come: there is nothing left to lose."""
    prefill, decode, reader, attempt = await cluster.begun(job())
    prefill.first_token(attempt, 2)
    prefill.finished(attempt, 1)
    await decode.heard("cancel")
    prefill.failed(attempt, FAILURES.FAILURE_REASON_INTERNAL)
    assert tokens_of(await reader.end()) == [2]


async def test_both_die(cluster: Cluster) -> None:
    """The decode worker's death is an answer to Abort, too."""
    prefill, decode = await cluster.pair()
    reader = cluster.read(job())
    await prefill.heard("submit")
    await prefill.stop()
    await decode.heard("abort")
    await decode.stop()
    assert (await error_of(reader)).reason == "WORKER_LOST"


async def test_decode_dies_before_the_first_token(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    other = await cluster.add("d1", DECODE)
    reader = cluster.read(job(max_tokens=2))
    attempt = (await prefill.heard("submit")).attempt_id
    await decode.heard("submit")
    await decode.stop()
    assert (await prefill.heard("cancel")).attempt_id == attempt
    second = (await other.heard("submit")).attempt_id
    assert (await prefill.heard("submit")).attempt_id == second
    await finish(reader, prefill, other, second)


async def test_frozen_decode_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load reports still come, but the progress counter stands still: the stream is let go."""
    monkeypatch.setattr(waiting, "WAKES_S", 0.5)
    cluster = Cluster(stale_after_s=2)  # the other worker outlives a machine that stood still
    prefill, decode, reader, attempt = await cluster.begun(job())
    decode.frozen = True
    loop = asyncio.get_running_loop()
    frozen_s = loop.time()
    error = await error_of(reader)
    assert error.reason == "WORKER_LOST"
    assert loop.time() - frozen_s < cluster.settings.debug.stale_after_s + 0.5 + BUSY_S
    assert (await prefill.heard("cancel")).attempt_id == attempt
    cluster.check_nothing_leaked()
    await cluster.close()


@with_settings(stale_after_s=1, max_retries=0, max_workers_lost=2)
async def test_a_worker_that_stood_still_and_comes_back_costs_no_retry(cluster: Cluster) -> None:
    """The only one, before any token was sent and after, though no retry is allowed."""
    worker = await cluster.add("b0", BOTH)
    readers = [cluster.read(job(max_tokens=3)) for _ in range(2)]
    first, second = [(await worker.heard("submit")).attempt_id for _ in range(2)]
    worker.first_token(second, 10)
    worker.tokens(second, 0, 10)
    await until(lambda: len(tokens_of(readers[1].events)) == 1)
    worker.frozen = True
    await until(lambda: not cluster.registry.members)
    worker.frozen = False
    await until(lambda: cluster.registry.announce(worker.identity))
    assert all(run.lost == set() for run in cluster.dispatcher._runs.values())
    for _ in range(2):
        again = await worker.heard("submit")
        sent = sum(len(one.token_ids) for one in again.generated) // 4
        worker.first_token(again.attempt_id, 10 + sent)
        worker.tokens(again.attempt_id, sent, *range(10 + sent, 13))
        worker.finished(again.attempt_id, 3)
    for reader in readers:
        assert tokens_of(await reader.end()) == [10, 11, 12]
    assert first != second


async def test_what_ends_with_a_lost_worker_gets_nothing_new(cluster: Cluster) -> None:
    first, other = [await cluster.add(f"b{at}", BOTH, failure_unit="group") for at in range(2)]
    cluster.link(other).doubt(60)  # The job goes to the first.
    reader = cluster.read(job(max_tokens=2))
    first.first_token((await first.heard("submit")).attempt_id, 10)
    await until(lambda: len(tokens_of(reader.events)) == 1)
    cluster.link(other).doubt(0)
    await first.stop()
    await until(lambda: len(cluster.registry.members) == 1)
    alone = await cluster.add("alone", BOTH)
    again = await alone.heard("submit")
    alone.first_token(again.attempt_id, 11)
    alone.finished(again.attempt_id, 2)
    assert tokens_of(await reader.end()) == [10, 11]
    assert not [one for one in other.history if one.HasField("submit")]


async def test_who_comes_while_a_lost_group_ends_hears_that_no_worker_is_there(
    cluster: Cluster,
) -> None:
    """And not that workers shut down: nobody has asked them to."""
    first, other = [await cluster.add(f"b{at}", BOTH, failure_unit="group") for at in range(2)]
    await first.stop()
    await until(lambda: len(cluster.registry.members) == 1)
    assert (await error_of(cluster.read(job()))).reason == "NO_WORKERS"
    cluster.link(other).doubt(0)
    reader = cluster.read(job(max_tokens=1))
    again = await other.heard("submit")
    other.first_token(again.attempt_id, 10)
    other.finished(again.attempt_id, 1)
    assert tokens_of(await reader.end()) == [10]


@pytest.mark.parametrize("unit", ["", "group"])
async def test_workers_that_end_together_are_one_loss(
    unit: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "UNIT_ENDS_S", 0.0)
    worker = await cluster.add("b0", BOTH, failure_unit=unit)
    reader = cluster.read(job(max_tokens=3))
    for at in range(2):
        worker.first_token((await worker.heard("submit")).attempt_id, 10 + at)
        await until(lambda at=at: len(tokens_of(reader.events)) == 1 + at)
        lost, worker = worker, await cluster.add(f"b{at + 1}", BOTH, failure_unit=unit)
        await lost.stop()
    if not unit:
        assert (await error_of(reader)).reason == "POISON_REQUEST"
        return
    again = await worker.heard("submit")
    worker.first_token(again.attempt_id, 12)
    worker.finished(again.attempt_id, 3)
    assert tokens_of(await reader.end()) == [10, 11, 12]


async def test_restarted_worker_serves_again(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await decode.stop()
    await until(lambda: len(cluster.registry.members) == 1)
    again = await cluster.add("d0", DECODE)
    assert again.identity.epoch != decode.identity.epoch
    reader = cluster.read(job(max_tokens=2))
    attempt = (await prefill.heard("submit")).attempt_id
    await finish(reader, prefill, again, attempt)


@with_settings(local_prefill="never")
async def test_retries_are_bounded(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    reader = cluster.read(job())
    for _ in range(cluster.settings.debug.max_retries + 1):
        attempt = (await prefill.heard("submit")).attempt_id
        decode.failed(attempt, FAILURES.FAILURE_REASON_EXPIRED)
        assert (await prefill.heard("cancel")).attempt_id == attempt
    error = await error_of(reader)
    assert (error.reason, error.metadata["attempts"]) == ("KV_TRANSFER_FAILED", "3")


@pytest.mark.parametrize(
    "reason",
    [
        FAILURES.FAILURE_REASON_BAD_PEER,
        FAILURES.FAILURE_REASON_KV_TRANSFER,
        FAILURES.FAILURE_REASON_EXPIRED,
    ],
)
async def test_a_pair_that_failed_a_job_does_not_get_it_again(
    cluster: Cluster, reason: int
) -> None:
    """Whichever of the two said so, and before any load report complains of the path."""
    _, decode = await cluster.pair()
    await cluster.add("p1", PREFILL)
    reader = cluster.read(job(max_tokens=2))
    peers = set()
    for _ in range(2):
        submit = await decode.heard("submit")
        peers.add(submit.peer_agent_name)
        decode.failed(submit.attempt_id, reason)
    assert len(peers) == 2
    last = await decode.heard("submit")
    assert last.mode == worker_pb2.WORK_MODE_WHOLE
    decode.first_token(last.attempt_id, 10)
    decode.tokens(last.attempt_id, 1, 11)
    decode.finished(last.attempt_id, 2)
    assert tokens_of(await reader.end()) == [10, 11]


@pytest.mark.parametrize("reason", [FAILURES.FAILURE_REASON_INTERNAL, 99])
async def test_retry_avoids_the_worker_that_failed(cluster: Cluster, reason: int) -> None:
    """Also if it is of a newer release, whose reason this one does not know."""
    both = await cluster.add("b0", BOTH)
    other = await cluster.add("b1", BOTH)
    reader = cluster.read(job(max_tokens=1))
    attempt = (await both.heard("submit")).attempt_id
    both.failed(attempt, reason)
    second = (await other.heard("submit")).attempt_id
    other.first_token(second, 10)
    other.finished(second, 1)
    assert tokens_of(await reader.end()) == [10]
    assert len(cluster.registry.members) == 2


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (FAILURES.FAILURE_REASON_NUMERICAL, "NUMERICAL_ERROR"),
        (FAILURES.FAILURE_REASON_TOO_LARGE, "CONTEXT_LENGTH_EXCEEDED"),
        (FAILURES.FAILURE_REASON_NO_TOKEN, "NO_TOKEN_LEFT"),
        (FAILURES.FAILURE_REASON_HOOK, "HOOK_FAILED"),
        (FAILURES.FAILURE_REASON_EXTENSION, "INVALID_FIELD"),
    ],
)
async def test_some_failures_are_final(cluster: Cluster, reason: int, expected: str) -> None:
    both = await cluster.add("b0", BOTH)
    reader = cluster.read(job())
    both.failed((await both.heard("submit")).attempt_id, reason)
    assert (await error_of(reader)).reason == expected
    assert both.count("submit") == 0


async def test_what_a_failed_attempt_left_behind_is_void(cluster: Cluster) -> None:
    """Tokens out of order from a first attempt must not mix with those of the second."""
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=2))
    decode.delivered(attempt)
    decode.tokens(attempt, 1, 99)
    decode.failed(attempt, FAILURES.FAILURE_REASON_INTERNAL)
    second = (await prefill.heard("submit")).attempt_id
    decode.tokens(attempt, 0, 98)  # late: its attempt is over
    await finish(reader, prefill, decode, second)


async def test_queued_jobs_fail_with_the_last_worker(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    prefill.load.prefill_credit_tokens = 0
    await cluster.caught_up(prefill)
    reader = cluster.read(job())
    await until(lambda: cluster.dispatcher.queued_jobs == 1)
    await decode.stop()
    assert (await error_of(reader)).reason == "NO_WORKERS"


async def test_draining_worker_gets_no_new_work(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    decode.report(draining=True)
    await until(lambda: any(link.draining for link in cluster.registry.members))
    assert (await error_of(cluster.read(job()))).reason == "DRAINING"


@with_settings(max_queued_requests=1, queue_timeout_s=1)
async def test_queue_is_bounded_and_waits_end(cluster: Cluster) -> None:
    prefill, _ = await cluster.pair()
    prefill.report(prefill_credit_tokens=0)
    await until(lambda: not cluster.registry.members[0].capacity().prefill_credit_tokens)
    waiting = cluster.read(job())
    await until(lambda: cluster.dispatcher.queued_jobs == 1)
    refused = await error_of(cluster.read(job()))
    assert (refused.reason, refused.code.name) == ("QUEUE_FULL", "RESOURCE_EXHAUSTED")
    assert refused.retry_after_s
    late = await error_of(waiting)
    assert (late.reason, late.code.name) == ("QUEUE_TIMEOUT", "RESOURCE_EXHAUSTED")


@pytest.mark.parametrize("way_out", ["leave", "first token", "decode failed", "prefill failed"])
async def test_credit_comes_back_on_every_way_out(cluster: Cluster, way_out: str) -> None:
    """Before any report could say so: a job takes all credit, and its end frees it."""
    await takes_and_frees_credit(cluster, way_out)


async def takes_and_frees_credit(cluster: Cluster, way_out: str) -> None:
    prefill, decode = await cluster.pair()
    prefill.reports_by_itself = decode.reports_by_itself = False
    await cluster.caught_up(prefill)
    link = cluster.link(prefill)
    reader = cluster.read(job(prompt_tokens=64, max_tokens=2))
    attempt = (await prefill.heard("submit")).attempt_id
    assert link.capacity().prefill_credit_tokens == 0
    match way_out:
        case "leave":
            await reader.leave()
        case "first token":
            prefill.first_token(attempt, 10)
            await reader.until(2)
            assert link.estimate.open_reservations == 1
        case "decode failed":
            decode.failed(attempt, FAILURES.FAILURE_REASON_NUMERICAL)
            await error_of(reader)
        case "prefill failed":
            prefill.failed(attempt, FAILURES.FAILURE_REASON_NUMERICAL)
            await decode.heard("abort")
            decode.aborted(attempt, already_ready=False)
            await error_of(reader)
    assert link.capacity().prefill_credit_tokens == 64
    await reader.leave()


async def test_deadline_that_the_backlog_leaves_no_time_for(cluster: Cluster) -> None:
    prefill, _decode = await cluster.pair()
    runs = cluster.read(job())
    await prefill.heard("submit")
    prefill.report(prefill_credit_tokens=0)
    link = next(link for link in cluster.registry.members if link.worker_id == "p0")
    await until(lambda: not link.capacity().prefill_credit_tokens)
    waiting = [cluster.read(job(prompt_tokens=50)) for _ in range(3)]
    await until(lambda: cluster.dispatcher.queued_jobs == 3)
    await asyncio.sleep(1.2)
    prefill.report(prefill_credit_tokens=1)  # one leaves: 50 tokens in more than a second
    prefill.load.prefill_credit_tokens = 0  # the next report says so, and no other leaves
    attempt = (await prefill.heard("submit")).attempt_id
    prefill.report()
    await until(lambda: not link.estimate.load.prefill_credit_tokens)
    prefill.first_token(attempt, 10)
    await until(cluster.dispatcher.queue_drain_s)
    left = cluster.dispatcher.queued_jobs
    assert left >= 1
    error = await error_of(cluster.read(job(deadline_s=0.01)))
    assert (error.reason, error.code.name) == ("DEADLINE_UNREACHABLE", "RESOURCE_EXHAUSTED")
    for reader in (runs, *waiting):
        await reader.leave()


async def test_draining_router_refuses_new_jobs_and_ends_the_last_ones(cluster: Cluster) -> None:
    prefill, _ = await cluster.pair()
    reader = cluster.read(job())
    attempt = (await prefill.heard("submit")).attempt_id
    cluster.dispatcher.drain()
    assert (await error_of(cluster.read(job()))).reason == "DRAINING"
    cluster.dispatcher.fail_all()
    assert (await error_of(reader)).reason == "DRAINING"
    await cluster.dispatcher.idle()
    assert (await prefill.heard("cancel")).attempt_id == attempt


async def complain(cluster: Cluster, of: ScriptedWorker, by: ScriptedWorker, cause: str) -> None:
    by.load.peers.append(worker_pb2.PeerHealth(agent_name=of.agent_name, cause=cause))
    by.report()
    links = {link.agent_name: link for link in cluster.registry.members}
    await until(lambda: links[by.agent_name].avoids(links[of.agent_name]))


async def test_a_busy_worker_is_waited_for_rather_than_a_cut_path_taken(cluster: Cluster) -> None:
    """An attempt over it would fail at once, and the few that a job has would soon be spent."""
    prefill, decode = await cluster.pair()
    busy = await cluster.add("p1", PREFILL)
    busy.load.prefill_credit_tokens = 0
    await cluster.caught_up(busy)
    await complain(cluster, prefill, decode, "disconnected")
    reader = cluster.read(job())
    await until(lambda: cluster.dispatcher.queued_jobs == 1)
    await asyncio.sleep(0.3)
    assert prefill.count("submit") == decode.count("submit") == 0
    busy.report(prefill_credit_tokens=64)
    assert (await busy.heard("submit")).peer_agent_name == decode.agent_name
    await reader.leave()


@pytest.mark.parametrize("local_prefill", ["cached", "never"])
async def test_the_only_pair_with_a_cut_path(local_prefill: str) -> None:
    """The decode worker does it all, where it may; else the path is tried for want of another."""
    cluster = Cluster(local_prefill=local_prefill)
    try:
        prefill, decode = await cluster.pair()
        await complain(cluster, decode, prefill, "quarantine_overdue")
        reader = cluster.read(job())
        if local_prefill == "never":
            assert (await prefill.heard("submit")).peer_agent_name == decode.agent_name
        else:
            assert (await decode.heard("submit")).mode == worker_pb2.WORK_MODE_WHOLE
            assert not prefill.count("submit")
        await reader.leave()
    finally:
        await cluster.close()


async def test_a_retry_waits_for_a_busy_worker_rather_than_fail_again(cluster: Cluster) -> None:
    both = await cluster.add("b0", BOTH)
    other = await cluster.add("b1", BOTH)
    other.report(prefill_credit_tokens=0)
    links = {link.worker_id: link for link in cluster.registry.members}
    await until(lambda: links["b1"].capacity().prefill_credit_tokens == 0)
    reader = cluster.read(job(max_tokens=1))
    attempt = (await both.heard("submit")).attempt_id
    both.failed(attempt, FAILURES.FAILURE_REASON_INTERNAL)
    await until(lambda: cluster.dispatcher.queued_jobs == 1)
    await asyncio.sleep(0.3)
    assert both.count("submit") == 0
    other.report(prefill_credit_tokens=64)
    second = (await other.heard("submit")).attempt_id
    other.first_token(second, 10)
    other.finished(second, 1)
    assert tokens_of(await reader.end()) == [10]
