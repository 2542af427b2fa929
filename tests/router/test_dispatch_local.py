"""Prompts that a decode worker computes by itself: for each reason, and every race about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from scripted_worker import BOTH, DECODE, PREFILL, Cluster, job, tokens_of, until

from baton.worker.v1 import worker_pb2
from router.dispatch import dispatcher
from router.dispatch.merge import unpack_ids
from router.errors import RouterError
from router.events import NoEvents
from router.placement.cost import Cost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from scripted_worker import ScriptedWorker

    from router.jobs import Demand
    from router.workers.link import WorkerLink

WHOLE = worker_pb2.WORK_MODE_WHOLE
HAND_OFF = worker_pb2.WORK_MODE_DECODE
FAILURES = worker_pb2.FailureReason


class Counted(NoEvents):
    """Remembers why prompts were computed by decode workers."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def prefilled_locally(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
async def cluster(counted: Counted) -> AsyncIterator[Cluster]:
    cluster = Cluster(counted, Remembering)
    yield cluster
    cluster.check_nothing_leaked()
    await cluster.close()


@pytest.fixture
async def auto(counted: Counted) -> AsyncIterator[Cluster]:
    cluster = Cluster(counted, local_prefill="auto")
    yield cluster
    cluster.check_nothing_leaked()
    await cluster.close()


def take_over(decode: ScriptedWorker, attempt: bytes) -> None:
    decode.say(taken_over=worker_pb2.TakenOver(attempt_id=attempt, cached_prompt_tokens=16))


def finish(decode: ScriptedWorker, attempt: bytes) -> None:
    """The rest of a local attempt: tokens 10 and 11."""
    decode.first_token(attempt, 10, cached=16)
    decode.tokens(attempt, 0, 10, 11)
    decode.finished(attempt, 2)


def link_of(cluster: Cluster, worker_id: str):
    return next(link for link in cluster.registry.members if link.worker_id == worker_id)


# No prefill worker is left.


async def test_decode_workers_alone_serve(cluster: Cluster, counted: Counted) -> None:
    decode = await cluster.add("d0", DECODE)
    assert [model.name for model in cluster.dispatcher.models()] == ["tiny"]
    reader = cluster.read(job(max_tokens=2, prompt_logprobs=True))
    submit = await decode.heard("submit")
    assert (submit.mode, submit.peer_agent_name) == (WHOLE, "")
    assert submit.prompt_logprobs
    scores = worker_pb2.PromptLogprobs(attempt_id=submit.attempt_id)
    decode.say(prompt_logprobs=scores)
    finish(decode, submit.attempt_id)
    assert tokens_of(await reader.end()) == [10, 11]
    assert counted.reasons == ["no_prefill_worker"]


async def test_the_last_prefill_worker_dies(cluster: Cluster, counted: Counted) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=2))
    assert (await decode.heard("submit")).mode == HAND_OFF
    await prefill.stop()
    await decode.heard("abort")
    decode.aborted(attempt, already_ready=False)
    second = await decode.heard("submit")
    assert second.mode == WHOLE
    finish(decode, second.attempt_id)
    assert tokens_of(await reader.end()) == [10, 11]
    assert counted.reasons == ["no_prefill_worker"]


async def test_a_prefill_worker_that_failed_the_job_is_not_tried_again(cluster: Cluster) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=2))
    await decode.heard("submit")
    prefill.failed(attempt, FAILURES.FAILURE_REASON_KV_TRANSFER)
    await decode.heard("abort")
    decode.aborted(attempt, already_ready=False)
    second = await decode.heard("submit")
    assert second.mode == WHOLE
    assert prefill.count("submit") == 0
    finish(decode, second.attempt_id)
    assert tokens_of(await reader.end()) == [10, 11]


async def test_a_worker_that_does_both_is_nobody_s_substitute(cluster: Cluster) -> None:
    both = await cluster.add("b0", BOTH)
    decode = await cluster.add("d0", DECODE)
    reader = cluster.read(job(max_tokens=2))
    attempt = (await both.heard("submit")).attempt_id
    assert decode.count("submit") == 0
    both.first_token(attempt, 10)
    both.tokens(attempt, 1, 11)
    both.finished(attempt, 2)
    await reader.end()


async def test_a_draining_prefill_worker_is_none(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    prefill.report(draining=True)
    await until(lambda: link_of(cluster, "p0").draining)
    reader = cluster.read(job(max_tokens=2))
    submit = await decode.heard("submit")
    assert submit.mode == WHOLE
    finish(decode, submit.attempt_id)
    await reader.end()


async def test_a_busy_prefill_worker_is_waited_for(cluster: Cluster) -> None:
    """Being busy is no reason, unless the setting says so."""
    prefill, decode = await cluster.pair()
    prefill.report(prefill_credit_tokens=0)
    link = link_of(cluster, "p0")
    await until(lambda: link.capacity().prefill_credit_tokens == 0)
    reader = cluster.read(job())
    await until(lambda: cluster.dispatcher.queued_jobs == 1)
    assert decode.count("submit") == 0
    await reader.leave()


async def test_never() -> None:
    cluster = Cluster(local_prefill="never")
    await cluster.add("d0", DECODE)
    assert cluster.dispatcher.models() == []
    with pytest.raises(RouterError, match="NO_WORKERS"):
        await cluster.read(job()).end()
    prefill = await cluster.add("p0", PREFILL)
    reader = cluster.read(job())
    await prefill.heard("submit")
    assert (await cluster.workers[0].heard("submit")).takeover_tokens == 0
    await reader.leave()
    cluster.check_nothing_leaked()
    await cluster.close()


# The decode worker holds most of the prompt.


async def test_taken_over(cluster: Cluster, counted: Counted) -> None:
    prefill, decode = await cluster.pair()
    prefill.reports_by_itself = False  # one that came after the attempt would contain it
    await cluster.caught_up(prefill)
    link = cluster.link(prefill)
    reader = cluster.read(job(prompt_tokens=64, max_tokens=2))
    attempt = (await prefill.heard("submit")).attempt_id
    assert (await decode.heard("submit")).takeover_tokens == 64
    assert link.capacity().prefill_credit_tokens == 0
    take_over(decode, attempt)
    assert (await prefill.heard("cancel")).attempt_id == attempt
    assert link.capacity().prefill_credit_tokens == 64
    finish(decode, attempt)
    events = await reader.end()
    assert tokens_of(events) == [10, 11]
    assert events[0].cached_prompt_tokens == 16
    assert counted.reasons == ["cached"]


@pytest.mark.parametrize("late", ["first token", "prefill done", "failed", "lost"])
async def test_what_a_prefill_worker_says_too_late_is_nothing(cluster: Cluster, late: str) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=2))
    take_over(decode, attempt)
    await prefill.heard("cancel")
    match late:
        case "first token":
            prefill.first_token(attempt, 99)
        case "prefill done":
            prefill.prefill_done(attempt)
        case "failed":
            prefill.failed(attempt, FAILURES.FAILURE_REASON_INTERNAL)
        case "lost":
            await prefill.stop()
            await until(lambda: len(cluster.registry.members) == 1)
    if late != "lost":
        await cluster.caught_up(prefill)
    finish(decode, attempt)
    assert tokens_of(await reader.end()) == [10, 11]
    assert decode.count("abort") == 0


async def test_taken_over_as_the_prefill_worker_died(cluster: Cluster) -> None:
    """Abort and the decode worker's word cross: it goes on, and says so."""
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=2))
    await prefill.stop()
    await decode.heard("abort")
    take_over(decode, attempt)
    decode.first_token(attempt, 10)
    decode.aborted(attempt, already_ready=True)
    decode.tokens(attempt, 0, 10, 11)
    decode.finished(attempt, 2)
    assert tokens_of(await reader.end()) == [10, 11]


@dataclass
class Remembering(Cost):
    """Remembers what the policy is told of workers: that they have a prompt, and that they have it
    no more."""

    told: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def routed(self, demand: Demand, worker: WorkerLink) -> None:
        self.told.append(("routed", worker.worker_id))
        super().routed(demand, worker)

    def failed(self, demand: Demand, workers: Iterable[WorkerLink]) -> None:
        workers = list(workers)
        self.told += [("failed", worker.worker_id) for worker in workers]
        super().failed(demand, workers)


@pytest.mark.parametrize("when", ["computed", "not computed"])
async def test_a_prompt_that_is_left_before_it_is_computed_counts_no_more(
    cluster: Cluster, when: str
) -> None:
    prefill, _ = await cluster.pair()
    reader = cluster.read(job(max_tokens=2))
    attempt = (await prefill.heard("submit")).attempt_id
    if when == "computed":
        prefill.first_token(attempt, 10)
        await reader.until(2)
    await reader.leave()
    left = [] if when == "computed" else [("failed", "p0"), ("failed", "d0")]
    assert cluster.policy.told == [("routed", "p0"), *left]


async def test_a_take_over_by_a_worker_that_was_let_go_moves_nothing(
    cluster: Cluster, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token ended the request. The decode worker's word crosses its cancellation, while
    the prefill worker's last one is waited for."""
    monkeypatch.setattr(dispatcher, "CLOSING_GRACE_S", 60.0)
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=2))
    prefill.first_token(attempt, 10)
    prefill.finished(attempt, 1)
    await decode.heard("cancel")
    take_over(decode, attempt)
    await cluster.caught_up(decode)
    assert cluster.dispatcher.active_attempts == 1
    prefill.prefill_done(attempt)
    await reader.end()
    assert cluster.policy.told == [("routed", "p0")]
    assert counted.reasons == []


async def test_both_first_tokens_agree(cluster: Cluster) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=2))
    prefill.first_token(attempt, 10)
    await reader.until(2)
    take_over(decode, attempt)
    finish(decode, attempt)
    assert tokens_of(await reader.end()) == [10, 11]


async def test_first_tokens_that_differ_never_mix(cluster: Cluster) -> None:
    """The client has the prefill worker's: nothing that goes on from another one is passed on."""
    prefill, decode, reader, attempt = await cluster.begun(job(max_tokens=3))
    prefill.first_token(attempt, 99)
    await reader.until(2)
    take_over(decode, attempt)
    finish(decode, attempt)
    assert (await decode.heard("cancel")).attempt_id == attempt
    await decode.heard("submit")
    second = await decode.heard("submit")
    assert [unpack_ids(tokens.token_ids) for tokens in second.generated] == [(99,)]
    decode.delivered(second.attempt_id)
    decode.tokens(second.attempt_id, 1, 12, 13)
    decode.finished(second.attempt_id, 3)
    assert tokens_of(await reader.end()) == [99, 12, 13]


async def test_leaving_after_the_take_over_cancels_the_decode_worker(cluster: Cluster) -> None:
    prefill, decode, reader, attempt = await cluster.begun(job())
    take_over(decode, attempt)
    await prefill.heard("cancel")
    await reader.leave()
    assert (await decode.heard("cancel")).attempt_id == attempt
    assert prefill.count("cancel") == 0


async def test_log_probabilities_of_the_prompt_leave_nothing_to_take_over(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    reader = cluster.read(job(prompt_logprobs=True))
    assert (await decode.heard("submit")).takeover_tokens == 0
    await reader.leave()


# The queue at prefill is long.


async def busy(cluster: Cluster) -> tuple[ScriptedWorker, ScriptedWorker]:
    """A prefill worker with 4,000 tokens before it, 100 s; 20 a second at decode, so slow that none
    is computed in this test, and without steps to lose. They report no more by themselves: what the
    router counts on top stays on top."""
    prefill, decode = await cluster.pair()
    prefill.reports_by_itself = decode.reports_by_itself = False
    prefill.report(queued_prefill_tokens=4000, prefill_tokens_per_s=40, prefill_credit_tokens=-4)
    decode.report(
        running_sequences=2,
        prefill_tokens_per_s=20,
        prefill_credit_tokens=400,
    )
    await until(lambda: link_of(cluster, "p0").capacity().queued_prefill_tokens == 4000)
    await until(lambda: link_of(cluster, "d0").capacity().prefill_tokens_per_s)
    return prefill, decode


async def test_a_decode_worker_helps_out(auto: Cluster, counted: Counted) -> None:
    prefill, decode = await busy(auto)
    reader = auto.read(job(prompt_tokens=100, max_tokens=2))
    submit = await decode.heard("submit")
    assert submit.mode == WHOLE
    assert prefill.count("submit") == 0
    finish(decode, submit.attempt_id)
    assert tokens_of(await reader.end()) == [10, 11]
    assert counted.reasons == ["faster"]


async def test_it_takes_on_no_more_than_it_gets_done(auto: Cluster) -> None:
    """Each one lengthens its queue, until the prefill worker is as near."""
    _, decode = await busy(auto)
    decode.report(prefill_credit_tokens=5000, max_sequences=64, free_pages=1000, total_pages=1000)
    await until(lambda: link_of(auto, "d0").capacity().prefill_credit_tokens == 5000)
    readers = [auto.read(job(prompt_tokens=200)) for _ in range(15)]
    await until(lambda: auto.dispatcher.active_jobs == 15)
    # The k-th one finds 200 (k - 1) tokens there: level at 4,000 - 2 x that, so ten find less.
    await until(lambda: auto.dispatcher.queued_jobs == 5)
    assert auto.dispatcher.active_attempts == 10
    for reader in readers:
        await reader.leave()


async def test_an_idle_prefill_worker_keeps_its_work(auto: Cluster) -> None:
    prefill, decode = await busy(auto)
    prefill.report(queued_prefill_tokens=0, prefill_credit_tokens=4096)
    await until(lambda: not link_of(auto, "p0").capacity().queued_prefill_tokens)
    reader = auto.read(job(prompt_tokens=100))
    assert (await decode.heard("submit")).mode == HAND_OFF
    await reader.leave()


async def test_a_longer_rest_may_be_taken_over_while_prefill_is_busy(auto: Cluster) -> None:
    """What the queues say bounds what the decode worker may compute of a prompt it mostly holds."""
    prefill, decode = await busy(auto)
    prefill.report(prefill_credit_tokens=1, queued_prefill_tokens=240)
    await until(lambda: link_of(auto, "p0").capacity().queued_prefill_tokens == 240)
    reader = auto.read(job(prompt_tokens=250))
    submit = await decode.heard("submit")
    assert (submit.mode, submit.takeover_tokens) == (HAND_OFF, 245)
    await reader.leave()
