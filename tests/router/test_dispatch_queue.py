"""Whose turn it is in the queue, and how long a wait is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest

from router.call import Call, Peer
from router.dispatch.pace import Pace
from router.dispatch.queue import AGEING, MOST_REMEMBERED, AdmissionQueue
from router.doors.grpc_edge import _peer
from router.errors import RouterError
from router.jobs import Demand, Quota, ServedModel
from router.quotas import Quotas

MODEL = ServedModel("m", "r", "/m", 4096, 100, (), 16)


@dataclass(eq=False)
class Job:
    model: str = "m"
    tokens: int = 9
    tenant: str = ""
    call: str = ""
    priority: int = 0
    is_resumed: bool = False

    def __post_init__(self) -> None:
        self.call = self.call or str(id(self))

    @property
    def demand(self) -> Demand:
        return Demand(MODEL, self.tokens, 1, 1)


def a_queue(entries: int = 1000, tokens: int = 100_000) -> AdmissionQueue[Job]:
    return AdmissionQueue(entries, tokens)


def push(queue: AdmissionQueue[Job], *jobs: Job) -> None:
    for job in jobs:
        queue.push(job, 0.0)


def take(queue: AdmissionQueue[Job], model: str = "m") -> Job:
    job = queue.of(model).first()
    assert job is not None
    queue.of(model).take(job, 0.0)
    return job


def drained(queue: AdmissionQueue[Job]) -> list[Job]:
    return [take(queue) for _ in range(len(queue))]


def test_order_in_a_line() -> None:
    """Resumed work first, then the higher priority, then the earlier arrival."""
    queue = a_queue()
    first, second, urgent, resumed = Job(), Job(), Job(priority=5), Job(is_resumed=True)
    push(queue, first, second, urgent, resumed)
    assert drained(queue) == [resumed, urgent, first, second]
    assert queue.tokens == 0


def test_nobody_waits_for_ever_for_the_urgent() -> None:
    queue = a_queue()
    usual = Job()
    push(queue, usual)
    served = 0
    while True:
        push(queue, Job(priority=2))
        served += 1
        if take(queue) is usual:
            break
    assert served == 2 * AGEING


def test_calls_take_turns() -> None:
    """256 prompts of one call hold up another call by one prompt."""
    queue = a_queue()
    push(queue, *[Job(call="many", tokens=n) for n in range(1, 257)])
    single = Job(call="single")
    push(queue, single)
    order = drained(queue)
    assert order.index(single) == 1
    order.remove(single)
    assert [job.tokens for job in order] == list(range(1, 257)), "a call's own stay in order"


def test_a_job_that_leaves_makes_room_for_the_next_of_its_call() -> None:
    queue = a_queue()
    jobs = [Job(call="many") for _ in range(4)]
    other = Job(call="other")
    push(queue, *jobs, other)
    queue.of("m").remove(jobs[0], 0.0)
    queue.of("m").remove(jobs[2], 0.0)
    queue.of("m").remove(jobs[2], 0.0)
    assert drained(queue) == [other, jobs[1], jobs[3]]


def test_tenants_get_equal_shares_of_tokens() -> None:
    """Whatever the number and the length of their requests."""
    queue = a_queue()
    push(queue, *[Job(tenant="a", tokens=99) for _ in range(300)])
    push(queue, *[Job(tenant="b", tokens=9) for _ in range(300)])
    given: Counter[str] = Counter()
    for _ in range(220):
        job = take(queue)
        given[job.tenant] += job.tokens + 1
    assert given["a"] == pytest.approx(given["b"], rel=0.02)


def test_a_tenant_saves_nothing_up_while_it_is_away() -> None:
    queue = a_queue()
    push(queue, *[Job(tenant="a") for _ in range(100)])
    for _ in range(50):
        take(queue)
    push(queue, *[Job(tenant="b") for _ in range(50)])
    turns = [take(queue).tenant for _ in range(40)]
    assert Counter(turns)["b"] == pytest.approx(20, abs=1)


def test_whoever_passes_a_test_is_next() -> None:
    queue = a_queue()
    first, second = Job(tenant="a"), Job(tenant="b")
    push(queue, first, second)
    assert queue.of("m").first(lambda job: job is not first) is second
    assert queue.of("m").first(lambda job: False) is None


def test_models_do_not_hold_each_other_up() -> None:
    queue = a_queue()
    a, b, _ = entries = [Job("a"), Job("b"), Job("a")]
    push(queue, *entries)
    assert [one.first() for one in queue.queues()] == [a, b]


def test_a_swamped_model_is_full_for_its_own_requests_only() -> None:
    queue = a_queue(2, 100)
    push(queue, Job("a", tokens=50), Job("a", tokens=50))
    with pytest.raises(RouterError, match="QUEUE_FULL") as refused:
        push(queue, Job("a"))
    assert refused.value.metadata["queued_requests"] == "2"
    push(queue, Job("b", tokens=90))
    take(queue, "a")
    assert (len(queue.of("a")), len(queue), queue.tokens) == (1, 2, 140)


def test_queue_is_bounded_by_entries_and_by_tokens() -> None:
    queue = a_queue(2, 100)
    push(queue, Job(tokens=90))
    with pytest.raises(RouterError, match="QUEUE_FULL"):
        push(queue, Job(tokens=11))
    push(queue, Job(tokens=10))
    with pytest.raises(RouterError, match="QUEUE_FULL"):
        push(queue, Job(tokens=0))
    queue.push(Job(), 0.0, bounded=False)
    assert len(queue) == 3


def test_the_empty_queue_takes_the_largest_prompt() -> None:
    queue = a_queue(2, 100)
    push(queue, Job(tokens=1_000))
    assert queue.tokens == 1_000


def test_the_wait_is_the_backlog_over_the_pace_beside_it() -> None:
    queue = a_queue()
    queue.of("m").pace.running = 1
    jobs = [Job() for _ in range(60)]
    push(queue, *jobs)
    assert queue.retry_after_s("m", 0.0) == 1.0, "nothing is measured yet"
    for second, job in enumerate(jobs[:40], start=1):
        queue.of("m").take(job, float(second))
        queue.of("m").pace.done(10)
    assert queue.of("m").wait_s(40.0) == pytest.approx(20, rel=0.1)
    assert queue.waits_s(40.0) == {"m": pytest.approx(20, rel=0.1)}


def test_a_wait_counts_what_goes_before() -> None:
    """Not all that another tenant, or another call, has waiting."""
    queue = a_queue()
    queue.of("m").pace.running = 1
    push(queue, *[Job(tenant="a") for _ in range(50)])
    for second in range(1, 21):
        queue.of("m").wait_s(float(second))
        queue.of("m").pace.done(10)

    def wait_s(job: Job) -> float:
        return queue.of("m").wait_of_s(job, 20.0) or 0.0

    assert wait_s(Job(tenant="a")) == pytest.approx(50, rel=0.1)
    assert wait_s(Job(tenant="a", priority=100)) == 0
    assert wait_s(Job(tenant="b")) == pytest.approx(1, rel=0.1)
    push(queue, *[Job(tenant="b", call="many") for _ in range(10)])
    assert wait_s(Job(tenant="b")) == pytest.approx(1 + 2, rel=0.1)
    assert wait_s(Job(tenant="b", call="many")) == pytest.approx(10 + 11, rel=0.1)


def test_a_moment_says_nothing_about_how_fast_long_prompts_drain() -> None:
    """From nine tokens that waited for a moment a crowd was told that it had to wait a minute."""
    queue = a_queue()
    queue.of("m").pace.running = 1
    short, *crowd = [Job(tokens=9), *(Job(tokens=999) for _ in range(24))]
    push(queue, short, crowd[0])
    queue.of("m").take(short, 0.005)
    queue.of("m").pace.done(10)
    for job in crowd[1:]:
        queue.push(job, 0.1)
    assert queue.of("m").wait_s(0.1) is None
    for second, job in enumerate(crowd[:4], start=1):
        queue.of("m").take(job, float(second))
        queue.of("m").pace.done(1000)
    assert queue.of("m").wait_s(4.0) == pytest.approx(20, rel=0.2)


def test_a_wait_for_a_worker_to_come_back_says_nothing() -> None:
    """A minute without a worker made every later backlog look hopeless."""
    queue = a_queue()
    queue.of("m").pace.running = 1
    push(queue, *[Job() for _ in range(50)])
    for second in range(1, 21):
        queue.of("m").wait_s(float(second))
        queue.of("m").pace.done(10)
    queue.of("m").pace.running = 0
    assert queue.of("m").wait_s(80.0) == pytest.approx(50, rel=0.1)


def test_work_beside_an_empty_queue_says_nothing_about_draining() -> None:
    """A quiet minute must not make the next backlog look hopeless."""
    queue = a_queue()
    for second in range(60):
        queue.push(Job(), float(second))
        take(queue)
        queue.of("m").pace.done(10)
    queue.push(Job(), 100.0)
    assert queue.of("m").wait_s(100.0) is None


def test_what_a_request_needs_to_be_done() -> None:
    pace = Pace()
    demand = Demand(MODEL, 100, 50, 2)
    assert pace.work(demand) == 100 + 2 * 50, "nothing is known of outputs yet"
    assert pace.needed_s(demand, 1.0) == 2.0
    for _ in range(10):
        pace.served(0.5, 1.9, [10, 20])
    assert pace.work(demand) == 100 + 2 * 15
    assert pace.service_s(demand, 1) == pytest.approx(0.5 + 15 * 0.1)
    assert pace.service_s(Demand(MODEL, 100, 5, 1), 1) == pytest.approx(0.5 + 5 * 0.1)
    assert pace.needed_s(demand, 1.0) == pytest.approx(4.0)


def test_a_short_answer_that_stood_still_says_little_of_a_token() -> None:
    """Workers that begin stand still for seconds: two tokens of it must refuse no long answer."""
    pace = Pace()
    pace.served(0.1, 4.0, [2], whole=False)
    assert pace.service_s(Demand(MODEL, 16, 120, 1), 1) < 10
    for tokens, decode_s in ((60, 1.8), (2, 5.0), (120, 6.0)):
        pace.served(0.1, decode_s, [tokens])
    assert pace.service_s(Demand(MODEL, 16, 60, 1), 1) == pytest.approx(0.1 + 60 * 16.8 / 180)


def test_nobody_is_remembered_for_ever() -> None:
    queue = a_queue()
    for number in range(3 * MOST_REMEMBERED):
        push(queue, Job(tenant=f"10.0.{number}"))
        take(queue)
    assert len(queue.of("m")._tenants._given) <= MOST_REMEMBERED


@pytest.mark.parametrize(
    ("host", "sharer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("127.0.0.1", "127.0.0.1:7"),
        ("::1", "::1:7"),
        ("", ":7"),
    ],
)
def test_who_shares_with_whom(host: str, sharer: str) -> None:
    """Without a token a machine; of this one a connection."""
    call = Call(peer=Peer.of(host, 7))
    assert call.sharer == sharer
    assert replace(call, tenant="t").sharer == "t"
    assert _peer(f"ipv4:{host}:7" if "." in host else f"ipv6:%5B{host}%5D:7").connection == (
        call.peer.connection
    )


def test_a_call_that_is_no_job_is_counted() -> None:
    quotas, quota = Quotas(), Quota(requests=1)
    with quotas.counted("t", quota):
        with pytest.raises(RouterError, match="QUOTA_EXCEEDED"), quotas.counted("t", quota):
            pass
        with quotas.counted("other", quota):
            pass
    with quotas.counted("t", quota):
        pass
    assert quotas._usage == {}
