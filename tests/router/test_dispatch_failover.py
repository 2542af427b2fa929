"""Streams that go on where their worker was lost, and requests that lose too many."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np
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
from router.dispatch.merge import unpack_ids
from router.doors.loads import endpoint_load_of
from router.jobs import ChoiceEnded, JobFinished, JobStarted
from router.workers.link import SLEPT_S

if TYPE_CHECKING:
    from typing import Any

    from scripted_worker import Reader, ScriptedWorker

FAILURES = worker_pb2.FailureReason


async def stream_three(reader: Reader, prefill: ScriptedWorker, decode: ScriptedWorker) -> bytes:
    """An attempt that has delivered tokens 10, 11, 12 to the client."""
    attempt = (await prefill.heard("submit")).attempt_id
    await decode.heard("submit")
    prefill.first_token(attempt, 10)
    prefill.prefill_done(attempt)
    decode.delivered(attempt)
    decode.tokens(attempt, 0, 10, 11, 12)
    await until(lambda: len(tokens_of(reader.events)) == 3)
    return attempt


def generated_of(submit: Any) -> list[tuple[int, ...]]:
    return [unpack_ids(tokens.token_ids) for tokens in submit.generated]


async def test_decode_dies_mid_stream_and_the_stream_goes_on(cluster: Cluster) -> None:
    """Prompt and generated tokens go to another pair, apart; indices go on behind them."""
    prefill, decode = await cluster.pair()
    other = await cluster.add("d1", DECODE)
    wanted = job(prompt_tokens=4, max_tokens=5)
    reader = cluster.read(wanted)
    first = await stream_three(reader, prefill, decode)
    await decode.stop()

    again = await prefill.heard("submit")
    assert again.attempt_id != first
    assert (await other.heard("submit")).attempt_id == again.attempt_id
    assert unpack_ids(again.prompt_ids) == tuple(wanted.prompt_ids.tolist())
    assert generated_of(again) == [(10, 11, 12)]
    prefill.first_token(again.attempt_id, 13)
    prefill.prefill_done(again.attempt_id)
    other.delivered(again.attempt_id)
    other.tokens(again.attempt_id, 3, 13, 14)
    other.finished(again.attempt_id, 5)
    events = await reader.end()
    assert tokens_of(events) == [10, 11, 12, 13, 14]
    assert sum(isinstance(event, JobStarted) for event in events) == 1
    assert sum(isinstance(event, ChoiceEnded) for event in events) == 1


async def test_prefill_dies_after_its_first_token(cluster: Cluster) -> None:
    """The token that was sent is forced on the next attempt."""
    prefill, decode = await cluster.pair()
    other = await cluster.add("p1", PREFILL)
    reader = cluster.read(job(max_tokens=2))
    attempt = (await prefill.heard("submit")).attempt_id
    prefill.first_token(attempt, 10)
    await reader.until(2)
    await prefill.stop()
    await decode.heard("abort")
    decode.aborted(attempt, already_ready=False)
    again = await other.heard("submit")
    assert generated_of(again) == [(10,)]
    other.first_token(again.attempt_id, 11)
    other.finished(again.attempt_id, 2)
    assert tokens_of(await reader.end()) == [10, 11]


async def test_choices_resume_one_by_one_and_ended_ones_not_at_all(cluster: Cluster) -> None:
    """They differ by now: each is an attempt of its own, with its own index in the noise."""
    prefill, decode, reader, attempt = await cluster.begun(job(choices=3, max_tokens=4))
    prefill.first_token(attempt, 10, 20, 30)
    prefill.prefill_done(attempt)
    decode.delivered(attempt)
    decode.tokens(attempt, 1, 11, choice=0)
    decode.tokens(attempt, 1, 21, choice=1)
    decode.finished(attempt, 2, choice=1)
    await until(lambda: len(tokens_of(reader.events, 1)) == 2)
    await until(lambda: any(isinstance(event, ChoiceEnded) for event in reader.events))
    other = await cluster.add("d1", DECODE)
    await decode.stop()

    resumed = {}
    for _ in range(2):
        submit = await other.heard("submit")
        resumed[submit.first_choice] = submit
        assert submit.choices == 1
    assert generated_of(resumed[0]) == [(10, 11)]
    assert generated_of(resumed[2]) == [(30,)]
    zero, two = resumed[0].attempt_id, resumed[2].attempt_id
    other.delivered(two)
    other.tokens(two, 1, 31, 32, 33)
    other.finished(two, 4)
    other.delivered(zero)
    other.tokens(zero, 2, 12, 13)
    other.finished(zero, 4)
    events = await reader.end()
    assert tokens_of(events, 0) == [10, 11, 12, 13]
    assert tokens_of(events, 1) == [20, 21]
    assert tokens_of(events, 2) == [30, 31, 32, 33]
    assert sorted(e.choice for e in events if isinstance(e, ChoiceEnded)) == [0, 1, 2]
    assert isinstance(events[-1], JobFinished)


async def test_a_job_whose_choices_wait_one_by_one_counts_once(cluster: Cluster) -> None:
    """Else a router shows an endpoint picker fewer running requests than none."""
    prefill, decode = await cluster.pair()
    await cluster.add("m0", BOTH, model="other")
    reader = cluster.read(job(choices=3, max_tokens=4))
    attempt = (await prefill.heard("submit")).attempt_id
    prefill.first_token(attempt, 10, 20, 30)
    prefill.prefill_done(attempt)
    decode.delivered(attempt)
    await until(lambda: len(tokens_of(reader.events, 2)) == 1)
    assert shown(cluster) == (0, 1)
    await decode.stop()
    await until(lambda: cluster.dispatcher.queued_jobs == 3)
    assert cluster.dispatcher.queued_by_model() == {"tiny": 3}
    assert shown(cluster) == (1, 0)
    other = cluster.read(job(model="other"))
    await until(lambda: shown(cluster) == (1, 1))
    await reader.leave()
    await other.leave()


def shown(cluster: Cluster) -> tuple[int, int]:
    """Requests that wait and those that run, as an endpoint picker reads them."""
    load = endpoint_load_of(cluster.dispatcher, cluster.registry)
    return load.waiting, load.running


async def test_one_token_left_needs_no_decode_worker(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    reader = cluster.read(job(max_tokens=4))
    await stream_three(reader, prefill, decode)
    other = await cluster.add("d1", DECODE)
    await decode.stop()
    again = await prefill.heard("submit")
    assert (again.peer_agent_name, again.stopping.max_tokens) == ("", 4)
    prefill.first_token(again.attempt_id, 13)
    prefill.finished(again.attempt_id, 4)
    prefill.prefill_done(again.attempt_id)
    assert tokens_of(await reader.end()) == [10, 11, 12, 13]
    assert other.count("submit") == 0


async def test_one_failing_choice_ends_the_others(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    other = await cluster.add("d1", DECODE)
    reader = cluster.read(job(choices=2, max_tokens=4))
    attempt = (await prefill.heard("submit")).attempt_id
    await decode.heard("submit")
    prefill.first_token(attempt, 10, 20)
    decode.delivered(attempt)
    await until(lambda: len(tokens_of(reader.events, 1)) == 1)
    await decode.stop()
    one, two = await other.heard("submit"), await other.heard("submit")
    other.failed(one.attempt_id, FAILURES.FAILURE_REASON_NUMERICAL)
    assert (await error_of(reader)).reason == "NUMERICAL_ERROR"
    assert (await other.heard("cancel")).attempt_id == two.attempt_id


async def test_the_last_token_came_and_its_end_did_not(cluster: Cluster) -> None:
    """The worker died between the two: what follows the last token must not be generated."""
    prefill, decode = await cluster.pair()
    other = await cluster.add("d1", DECODE)
    reader = cluster.read(job(max_tokens=3))
    await stream_three(reader, prefill, decode)
    await decode.stop()
    events = await reader.end()
    assert tokens_of(events) == [10, 11, 12]
    (end,) = [event for event in events if isinstance(event, ChoiceEnded)]
    assert end == ChoiceEnded(0, worker_pb2.END_REASON_LENGTH, 3)
    assert other.count("submit") == 0


async def test_scores_of_the_prompt_are_not_asked_for_twice(cluster: Cluster) -> None:
    both = await cluster.add("b0", BOTH)
    reader = cluster.read(job(prompt_logprobs=True, max_tokens=4))
    submit = await both.heard("submit")
    assert submit.prompt_logprobs
    scores = [worker_pb2.TokenRecord(token_id=1, logprob=-1.0)] * 3
    both.say(
        prompt_logprobs=worker_pb2.PromptLogprobs(attempt_id=submit.attempt_id, records=scores)
    )
    both.first_token(submit.attempt_id, 10)
    await reader.until(2)
    other = await cluster.add("b1", BOTH)
    await both.stop()
    again = await other.heard("submit")
    assert not again.prompt_logprobs
    other.tokens(again.attempt_id, 1, 11, 12, 13)
    other.finished(again.attempt_id, 4)
    events = await reader.end()
    assert tokens_of(events) == [10, 11, 12, 13]
    (started,) = [event for event in events if isinstance(event, JobStarted)]
    assert len(started.prompt_logprobs) == 3


async def test_scores_lost_with_their_worker_are_computed_again(cluster: Cluster) -> None:
    """The KV may have made it, but only the prefill worker knew the prompt's log probabilities."""
    prefill, decode = await cluster.pair()
    other = await cluster.add("p1", PREFILL)
    reader = cluster.read(job(prompt_logprobs=True, max_tokens=1 + 1))
    attempt = (await prefill.heard("submit")).attempt_id
    await decode.heard("submit")
    decode.delivered(attempt)
    decode.tokens(attempt, 0, 10)
    await prefill.stop()
    assert (await decode.heard("cancel")).attempt_id == attempt
    again = await other.heard("submit")
    assert again.prompt_logprobs
    assert not reader.events
    await reader.leave()


async def test_resumes_go_before_new_work(cluster: Cluster) -> None:
    """Of two that wait, the one whose client has tokens already goes first."""
    prefill, decode = await cluster.pair()
    reader = cluster.read(job(max_tokens=8))
    await stream_three(reader, prefill, decode)
    prefill.report(prefill_credit_tokens=0)
    link = next(link for link in cluster.registry.members if link.worker_id == "p0")
    await until(lambda: link.capacity().prefill_credit_tokens <= 0)
    fresh = cluster.read(job(prompt_tokens=7))
    await until(lambda: cluster.dispatcher.queued_jobs == 1)
    await cluster.add("d1", DECODE)
    await decode.stop()
    await until(lambda: cluster.dispatcher.queued_jobs == 2)
    prefill.report(prefill_credit_tokens=64)
    assert generated_of(await prefill.heard("submit")) == [(10, 11, 12)]
    assert generated_of(await prefill.heard("submit")) == []
    await reader.leave()
    await fresh.leave()


async def test_a_stream_waits_for_a_worker_to_come_back(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    reader = cluster.read(job(max_tokens=5))
    await stream_three(reader, prefill, decode)
    await decode.stop()
    await until(lambda: cluster.dispatcher.queued_jobs == 1)
    again = await cluster.add("d0", DECODE)
    attempt = (await again.heard("submit")).attempt_id
    again.delivered(attempt)
    again.tokens(attempt, 3, 13, 14)
    again.finished(attempt, 5)
    assert tokens_of(await reader.end()) == [10, 11, 12, 13, 14]


@with_settings(resume_grace_s=1.0)
async def test_nobody_comes_back(cluster: Cluster) -> None:
    """The wait is bounded, and the client is told how many tokens it has."""
    prefill, decode = await cluster.pair()
    reader = cluster.read(job())
    await stream_three(reader, prefill, decode)
    began = asyncio.get_running_loop().time()
    await decode.stop()
    error = await error_of(reader)
    assert (error.reason, error.code.name) == ("WORKER_LOST_MID_STREAM", "ABORTED")
    assert error.metadata["tokens_sent"] == "3"
    assert (
        asyncio.get_running_loop().time() - began < cluster.settings.debug.resume_grace_s + BUSY_S
    )
    assert tokens_of(reader.events) == [10, 11, 12]


async def test_a_draining_worker_hands_its_streams_on(cluster: Cluster) -> None:
    """Its end costs nobody a stream, and is not held against the request."""
    prefill, decode = await cluster.pair()
    others = [await cluster.add(f"d{i}", DECODE) for i in (1, 2)]
    reader = cluster.read(job(max_tokens=5))
    attempt = await stream_three(reader, prefill, decode)
    decode.failed(attempt, FAILURES.FAILURE_REASON_DRAINING)
    again = await prefill.heard("submit")
    assert generated_of(again) == [(10, 11, 12)]
    await until(lambda: any(other.count("submit") for other in others))
    (taken,) = [other for other in others if other.count("submit")]
    taken.delivered(again.attempt_id)
    taken.tokens(again.attempt_id, 3, 13, 14)
    taken.finished(again.attempt_id, 5)
    assert tokens_of(await reader.end()) == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("started", [False, True])
async def test_a_poison_request_loses_two_workers_and_no_more(
    cluster: Cluster, started: bool
) -> None:
    prefill, *decoders = [
        await cluster.add("p0", PREFILL),
        *[await cluster.add(f"d{i}", DECODE) for i in range(3)],
    ]
    reader = cluster.read(job())
    for lost in range(2):
        await until(lambda: any(worker.count("submit") for worker in decoders))
        (victim,) = [worker for worker in decoders if worker.count("submit")]
        attempt = (await victim.heard("submit")).attempt_id
        victim.delivered(attempt)
        if started:
            victim.tokens(attempt, lost, 10 + lost)
            await until(lambda: len(tokens_of(reader.events)) == lost + 1)
        else:
            await cluster.caught_up(victim)
        decoders.remove(victim)
        await victim.stop()
    error = await error_of(reader)
    assert (error.reason, error.metadata["workers_lost"]) == ("POISON_REQUEST", "2")
    assert error.metadata["tokens_sent"] == ("2" if started else "0")
    assert error.code.name == ("ABORTED" if started else "INTERNAL")
    assert decoders[0].count("submit") == 0
    assert prefill.count("abort") == 0


async def test_workers_lost_while_the_router_stood_still_are_not_held_against_a_request(
    cluster: Cluster,
) -> None:
    """They may have hung up on a router that did not answer."""
    prefill = await cluster.add("p0", PREFILL)
    decoders = [await cluster.add(f"d{i}", DECODE) for i in range(3)]
    reader = cluster.read(job(max_tokens=2))
    for _ in range(2):
        await until(lambda: any(worker.count("submit") for worker in decoders))
        (victim,) = [worker for worker in decoders if worker.count("submit")]
        attempt = (await victim.heard("submit")).attempt_id
        victim.delivered(attempt)
        await cluster.caught_up(victim)
        decoders.remove(victim)
        time.sleep(SLEPT_S + 0.5)  # noqa: ASYNC251 - the loop is the router's
        await victim.stop()
    attempt = (await decoders[0].heard("submit")).attempt_id
    prefill.prefill_done(attempt)
    decoders[0].delivered(attempt)
    decoders[0].tokens(attempt, 0, 10, 11)
    decoders[0].finished(attempt, 2)
    assert tokens_of(await reader.end()) == [10, 11]


async def test_workers_that_only_kept_room_are_not_held_against_a_request(
    cluster: Cluster,
) -> None:
    """Two decode workers die before the KV is there: the request had no part in it."""
    prefill = await cluster.add("p0", PREFILL)
    decoders = [await cluster.add(f"d{i}", DECODE) for i in range(3)]
    reader = cluster.read(job(max_tokens=1 + 1))
    for _ in range(2):
        await until(lambda: any(worker.count("submit") for worker in decoders))
        (victim,) = [worker for worker in decoders if worker.count("submit")]
        decoders.remove(victim)
        await victim.stop()
    attempt = (await decoders[0].heard("submit")).attempt_id
    decoders[0].delivered(attempt)
    decoders[0].tokens(attempt, 0, 10, 11)
    decoders[0].finished(attempt, 2)
    for _ in range(3):
        prefill.prefill_done((await prefill.heard("submit")).attempt_id)
    assert tokens_of(await reader.end()) == [10, 11]


async def test_a_resume_takes_the_room_that_its_tokens_need(cluster: Cluster) -> None:
    """16-token pages: 14 of the prompt and 3 generated are two pages, and one to grow."""
    prefill, decode = await cluster.pair()
    other = await cluster.add("d1", DECODE)
    reader = cluster.read(job(prompt_tokens=14, max_tokens=40))
    await stream_three(reader, prefill, decode)
    for worker in (prefill, other):  # a report that came after the attempt would contain it
        worker.reports_by_itself = False
        await cluster.caught_up(worker)
    await decode.stop()
    await other.heard("submit")
    assert cluster.link(other).capacity().free_pages == 100 - 3
    assert cluster.link(prefill).capacity().prefill_credit_tokens == 64 - 17
    assert np.asarray(reader.job.prompt_ids).size == 14
    await reader.leave()


async def test_time_left_is_counted_on_a_steady_clock(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock jumps by a day after a request arrived: it has its minute all the same."""
    import time

    prefill, _ = await cluster.pair()
    wanted = job(deadline_s=60)
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 86_400 * 10**9)
    reader = cluster.read(wanted)
    submit = await prefill.heard("submit")
    assert 55_000 < submit.time_left_ms <= 60_000
    await reader.leave()
