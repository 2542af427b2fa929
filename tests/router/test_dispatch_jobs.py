"""Jobs that go well, and jobs that are ended early by the client."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING

import pytest
from scripted_worker import BOTH, DECODE, PREFILL, WAIT_S, Cluster, job, tokens_of, until

from baton.worker.v1 import worker_pb2
from router.errors import RouterError
from router.jobs import ChoiceEnded, JobFinished, JobStarted, JobTokens
from serving.wire import pack_ids

if TYPE_CHECKING:
    from router.jobs import JobEvent


async def test_disaggregated(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    reader = cluster.read(job(max_tokens=4))
    wanted = await decode.heard("submit")
    submit = await prefill.heard("submit")
    attempt = submit.attempt_id

    assert len(attempt) == 16
    assert wanted.attempt_id == attempt
    assert submit.mode == worker_pb2.WORK_MODE_PREFILL
    assert wanted.mode == worker_pb2.WORK_MODE_DECODE
    assert (submit.peer_agent_name, wanted.peer_agent_name) == (
        decode.agent_name,
        prefill.agent_name,
    )
    decode.grant(attempt)
    grant = await prefill.heard("grant")
    assert (grant.decode_epoch, grant.transfer_id) == (decode.identity.epoch, b"t" * 16)
    prefill.first_token(attempt, 10, cached=2)
    assert await reader.until(2) == [JobStarted(2), reader.events[1]]  # before any delivery

    prefill.prefill_done(attempt)
    await cluster.caught_up(prefill)  # its last word is waited for only shortly
    decode.delivered(attempt)
    decode.tokens(attempt, 0, 10, 11)
    decode.tokens(attempt, 2, 12, 13)
    decode.finished(attempt, 4)
    events = await reader.end()

    assert tokens_of(events) == [10, 11, 12, 13]
    assert events[-2] == ChoiceEnded(0, worker_pb2.END_REASON_LENGTH, 4)
    finished = events[-1]
    assert isinstance(finished, JobFinished)
    timings = finished.timings
    assert timings.queue_ns >= 100
    assert (timings.prefill_ns, timings.kv_transfer_ns) == (200, 300)
    assert (timings.decode_queue_ns, timings.decode_ns) == (100, 300)
    assert prefill.count("cancel") == decode.count("cancel") == 0


async def test_cached_tokens_that_are_told_late_are_in_the_end(cluster: Cluster) -> None:
    """The decode worker's first tokens overtake the prefill worker's word."""
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=2))
    decode.grant(attempt)
    await prefill.heard("grant")
    decode.delivered(attempt)
    decode.tokens(attempt, 0, 10, 11)
    assert (await reader.until(1))[0] == JobStarted(0)
    prefill.first_token(attempt, 10, cached=16)
    await cluster.caught_up(prefill)
    decode.finished(attempt, 2)
    finished = (await reader.end())[-1]
    assert isinstance(finished, JobFinished)
    assert finished.cached_prompt_tokens == 16


async def test_a_job_that_is_over_leaves_nothing_to_the_garbage_collector(
    cluster: Cluster,
) -> None:
    both = await cluster.add("b0", BOTH)
    gc.collect()
    gc.disable()
    try:
        reader = cluster.read(job(max_tokens=1))
        submit = await both.heard("submit")
        (run,) = map(weakref.ref, cluster.dispatcher._runs.values())
        both.first_token(submit.attempt_id, 10)
        both.finished(submit.attempt_id, 1)
        await reader.end()
        del reader
        await until(lambda: run() is None)
    finally:
        gc.enable()


async def test_whole(cluster: Cluster) -> None:
    both = await cluster.add("b0", BOTH)
    reader = cluster.read(job(max_tokens=2))
    submit = await both.heard("submit")
    assert submit.mode == worker_pb2.WORK_MODE_WHOLE
    assert submit.peer_agent_name == ""
    both.first_token(submit.attempt_id, 10)
    both.tokens(submit.attempt_id, 1, 11)
    both.finished(submit.attempt_id, 2)
    assert tokens_of(await reader.end()) == [10, 11]


async def test_decode_faster_than_prefill(cluster: Cluster) -> None:
    """The decode worker repeats token 0, so its tokens need not wait for the other stream."""
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=3))
    decode.delivered(attempt)
    decode.tokens(attempt, 0, 10, 11)
    assert tokens_of(await reader.until(2)) == [10, 11]
    prefill.first_token(attempt, 10)
    prefill.prefill_done(attempt)
    decode.tokens(attempt, 2, 12)
    decode.finished(attempt, 3)
    assert tokens_of(await reader.end()) == [10, 11, 12]


async def test_decode_that_repeats_nothing_waits_for_token_zero(cluster: Cluster) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=3))
    decode.delivered(attempt)
    decode.finished(attempt, 3)
    decode.tokens(attempt, 2, 12)
    decode.tokens(attempt, 1, 11)
    await until(lambda: cluster.dispatcher.active_attempts == 1)
    assert reader.events == []
    prefill.first_token(attempt, 10)
    prefill.prefill_done(attempt)
    assert tokens_of(await reader.end()) == [10, 11, 12]


async def test_first_token_ends_the_job(cluster: Cluster) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job())
    decode.grant(attempt)
    await prefill.heard("grant")
    prefill.first_token(attempt, 2)
    prefill.finished(attempt, 1)
    assert (await decode.heard("cancel")).attempt_id == attempt
    prefill.prefill_done(attempt)
    assert tokens_of(await reader.end()) == [2]
    assert prefill.count("cancel") == 0


async def test_max_tokens_one_never_contacts_decode(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await decode.heard("meet")
    reader = cluster.read(job(max_tokens=1, choices=2))
    submit = await prefill.heard("submit")
    assert (submit.mode, submit.peer_agent_name) == (worker_pb2.WORK_MODE_PREFILL, "")
    prefill.first_token(submit.attempt_id, 10, 20)
    prefill.finished(submit.attempt_id, 1, choice=0)
    prefill.finished(submit.attempt_id, 1, choice=1)
    prefill.prefill_done(submit.attempt_id)
    events = await reader.end()
    assert (tokens_of(events, 0), tokens_of(events, 1)) == ([10], [20])
    assert {message.WhichOneof("message") for message in decode.history} == {"meet"}


async def test_choices_end_one_by_one(cluster: Cluster) -> None:
    """The first token ends choice 1; choice 0 goes on; the decode worker repeats that end."""
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=3, choices=2))
    prefill.first_token(attempt, 10, 2)
    prefill.finished(attempt, 1, choice=1)
    prefill.prefill_done(attempt)
    decode.delivered(attempt)
    decode.finished(attempt, 1, choice=1)
    decode.tokens(attempt, 0, 10, 11, 12)
    decode.finished(attempt, 3)
    events = await reader.end()
    assert (tokens_of(events, 0), tokens_of(events, 1)) == ([10, 11, 12], [2])
    assert sum(isinstance(event, ChoiceEnded) for event in events) == 2


async def test_prompt_logprobs_come_first(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    reader = cluster.read(job(max_tokens=2, prompt_logprobs=True))
    submit = await prefill.heard("submit")
    attempt = submit.attempt_id
    assert submit.prompt_logprobs
    assert not (await decode.heard("submit")).prompt_logprobs
    decode.delivered(attempt)
    decode.tokens(attempt, 0, 10)
    records = [worker_pb2.TokenRecord(token_id=5, logprob=-0.5)]
    prefill.say(prompt_logprobs=worker_pb2.PromptLogprobs(attempt_id=attempt, records=records))
    prefill.first_token(attempt, 10)
    prefill.prefill_done(attempt)
    decode.tokens(attempt, 1, 11)
    decode.finished(attempt, 2)
    events = await reader.end()
    assert isinstance(events[0], JobStarted)
    assert [scores.logprob for scores in events[0].prompt_logprobs] == [-0.5]
    assert tokens_of(events) == [10, 11]


@pytest.mark.parametrize("stage", ["prefilling", "granted", "decoding"])
async def test_leaving_cancels_both(cluster: Cluster, stage: str) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job())
    await decode.heard("submit")
    if stage != "prefilling":
        decode.grant(attempt)
        await prefill.heard("grant")
    if stage == "decoding":
        prefill.first_token(attempt, 10)
        decode.delivered(attempt)
        decode.tokens(attempt, 1, 11)
        await reader.until(3)
    await reader.leave()
    assert (await prefill.heard("cancel")).attempt_id == attempt
    assert (await decode.heard("cancel")).attempt_id == attempt


async def test_leaving_after_prefill_is_done_cancels_decode_alone(cluster: Cluster) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job())
    prefill.first_token(attempt, 10)
    prefill.prefill_done(attempt)
    await cluster.caught_up(prefill)
    await reader.leave()
    assert (await decode.heard("cancel")).attempt_id == attempt
    assert prefill.count("cancel") == 0


async def test_leaving_the_queue(cluster: Cluster) -> None:
    prefill, _ = await cluster.pair()
    prefill.load.prefill_credit_tokens = 0
    running = cluster.read(job(prompt_tokens=64))
    await prefill.heard("submit")
    waiting = cluster.read(job())
    await until(lambda: cluster.dispatcher.queued_jobs == 1)
    await waiting.leave()
    assert cluster.dispatcher.queued_jobs == 0
    await running.leave()
    assert prefill.count("submit") == 0


async def test_stop_text_ends_choices(cluster: Cluster) -> None:
    """The last choice that the front door ends finishes the job and frees both workers."""
    prefill, decode, reader, attempt = await cluster.begun(job(choices=2))
    prefill.first_token(attempt, 10, 20)
    decode.delivered(attempt)
    decode.tokens(attempt, 1, 11)
    decode.finished(attempt, 2)
    await reader.until(5)
    cluster.dispatcher.end_choice(reader.job, 1)
    events = await reader.end()
    assert isinstance(events[-1], JobFinished)
    assert (await prefill.heard("cancel")).attempt_id == attempt
    assert (await decode.heard("cancel")).attempt_id == attempt
    cluster.dispatcher.end_choice(reader.job, 0)  # over: nothing happens


async def test_a_choice_may_be_ended_from_within_what_is_told(cluster: Cluster) -> None:
    """Nothing that was known before is left out, or told behind the end."""
    prefill, decode = await cluster.pair()
    events: list[JobEvent] = []
    asked = job(choices=2, max_tokens=2, prompt_logprobs=True)

    def tell(event: JobEvent) -> None:
        events.append(event)
        if isinstance(event, JobTokens) and event.choice == 0:
            cluster.dispatcher.end_choice(asked, 0)

    running = asyncio.create_task(cluster.dispatcher.run(asked, tell))
    attempt = (await prefill.heard("submit")).attempt_id
    decode.tokens(attempt, 0, 10)
    decode.tokens(attempt, 0, 20, 21, choice=1)
    decode.finished(attempt, 2, choice=1)
    await cluster.caught_up(decode)
    assert not events
    prefill.say(prompt_logprobs=worker_pb2.PromptLogprobs(attempt_id=attempt))
    await asyncio.wait_for(running, WAIT_S)
    assert (tokens_of(events, 0), tokens_of(events, 1)) == ([10], [20, 21])
    kinds = [JobStarted, JobTokens, JobTokens, ChoiceEnded, JobFinished]
    assert [type(event) for event in events] == kinds


async def test_what_a_reader_raises_ends_its_job_alone(cluster: Cluster) -> None:
    worker = await cluster.add("b0", BOTH)

    def refuse(event: JobEvent) -> None:
        raise LookupError

    broken = asyncio.create_task(cluster.dispatcher.run(job(), refuse))
    first = (await worker.heard("submit")).attempt_id
    reader = cluster.read(job(max_tokens=2))
    second = (await worker.heard("submit")).attempt_id
    step = worker_pb2.Tokens(
        attempt_ids=[first, second],
        choice_indices=pack_ids([0, 0]),
        indices=pack_ids([0, 0]),
        token_ids=pack_ids([7, 8]),
    )
    worker.say(tokens=step)
    with pytest.raises(LookupError):
        await asyncio.wait_for(broken, WAIT_S)
    assert (await worker.heard("cancel")).attempt_id == first
    worker.tokens(second, 1, 9)
    worker.finished(second, 2)
    assert tokens_of(await reader.end()) == [8, 9]


async def test_models(cluster: Cluster) -> None:
    with pytest.raises(RouterError, match="NO_WORKERS"):
        cluster.dispatcher.model("tiny")
    await cluster.add("p0", PREFILL)
    assert cluster.dispatcher.model("") == cluster.dispatcher.model("tiny")
    assert cluster.dispatcher.models() == []
    await cluster.add("d0", DECODE)
    assert [model.name for model in cluster.dispatcher.models()] == ["tiny"]
    with pytest.raises(RouterError, match="MODEL_NOT_FOUND"):
        cluster.dispatcher.model("other")


async def test_no_workers_is_said_at_once(cluster: Cluster) -> None:
    with pytest.raises(RouterError, match="NO_WORKERS: no worker for model"):
        await cluster.read(job()).end()
    await cluster.add("p0", PREFILL)
    with pytest.raises(RouterError, match="NO_WORKERS: no decode worker for model"):
        await cluster.read(job()).end()


@pytest.mark.parametrize("who_complains", ["prefill", "decode"])
async def test_a_pair_with_a_slow_path_is_taken_only_where_there_is_no_other(
    cluster: Cluster, who_complains: str
) -> None:
    prefill, slow = await cluster.pair()
    one, other = (prefill, slow) if who_complains == "prefill" else (slow, prefill)
    one.load.peers.append(worker_pb2.PeerHealth(agent_name=other.agent_name, cause="slow_tcp_only"))
    one.report()
    links = {link.worker_id: link for link in cluster.registry.members}
    complaining, complained_of = (
        links[one.identity.worker_id],
        links[other.identity.worker_id],
    )
    await until(lambda: complaining.avoids(complained_of))
    reader = cluster.read(job())
    assert (await prefill.heard("submit")).peer_agent_name == slow.agent_name
    await reader.leave()

    good = await cluster.add("d1", DECODE)
    good.report(free_pages=20)  # the slow one has more room, and would be chosen for it
    readers = []
    for _ in range(3):
        readers.append(cluster.read(job()))
        assert (await prefill.heard("submit")).peer_agent_name == good.agent_name
    for reader in readers:
        await reader.leave()
