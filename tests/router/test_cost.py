"""The policy `cost`: who holds what of a prompt, and how the first token is soonest."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from baton.worker.v1 import worker_pb2
from prefixes.index import Held
from router.jobs import Demand, ServedModel
from router.placement.cost import Cost
from router.placement.forecasts import computed_again, computed_by_takeover
from router.placement.just_routed import JUST_ROUTED_S, JustRouted
from router.placement.placing import LocalReason, MixedChunk, delay_s, rest_s, usual_chunk
from router.placement.routing import Route
from router.placement.ways import Way
from router.workers.load_estimate import Capacity

PAGE = 16
MODEL = ServedModel("m", "r", "", 1 << 17, 1, (), PAGE)
PAGE_BYTES = 2_000_000
"""128 KB a token, as an 8B model has."""


@dataclass(eq=False)
class Worker:
    """The parts that the policy uses. A thousand tokens take 25 ms."""

    agent_name: str
    queued: int = 0
    rows: int = 0
    delay_ms: float = 0.0
    path: Mapping[str, float] = field(default_factory=dict)
    complains_of: str = ""
    load_gb: float = 0.0
    used: float = 0.0
    context_s: float = 0.0
    token_s: float = 25e-6
    """0: not measured yet."""

    resume_bytes: int = 0
    """Beside the pages of group 0; 0: the model has one group."""

    page_bytes = PAGE_BYTES

    @property
    def worker_id(self) -> str:
        return self.agent_name

    @property
    def identity(self) -> worker_pb2.WorkerIdentity:
        model = worker_pb2.ModelInfo(fingerprint="f", resume_pages=[64] * bool(self.resume_bytes))
        roles = {"d": worker_pb2.WORKER_ROLE_DECODE, "b": worker_pb2.WORKER_ROLE_BOTH}
        return worker_pb2.WorkerIdentity(
            role=roles.get(self.agent_name[0], worker_pb2.WORKER_ROLE_PREFILL),
            model=model,
            endpoint=worker_pb2.KvEndpoint(transport="nixl"),
        )

    def capacity(self) -> Capacity:
        return Capacity(
            queued_prefill_tokens=self.queued,
            prefill_credit_tokens=4096,
            prefill_tokens_per_s=1 / self.token_s if self.token_s else 0.0,
            prefill_rate_age_s=0.0,
            running_sequences=self.rows,
            max_sequences=256,
            free_pages=round(8000 * (1 - self.used)),
            total_pages=8000,
            prefill_token_s=self.token_s,
            prefill_context_s=self.context_s,
            piece_delay_s=self.delay_ms / 1e3,
            piece_tokens=192,
            load_bytes_per_s=1e9 * self.load_gb,
        )

    def avoids(self, other: Worker) -> bool:
        return self.complains_of == other.agent_name

    @property
    def measured(self) -> Set[str]:
        return self.path.keys()

    def path_bytes_per_s(self, other: Worker) -> float:
        return 1e9 * self.path.get(other.agent_name, 0.0)


@dataclass
class Reported:
    """What workers have reported: pages by agent, in the pool or as `Held`."""

    by_agent: dict[str, int | Held] = field(default_factory=dict)

    def held(self, demand: Demand) -> Mapping[str, Held]:
        return {
            agent: held if isinstance(held, Held) else Held.all(held, held)
            for agent, held in self.by_agent.items()
        }


def demand(tokens: int, seed: int = 1, **others: Any) -> Demand:
    keys = np.random.default_rng(seed).integers(1, 1 << 63, (tokens - 1) // PAGE, dtype=np.uint64)
    return Demand(MODEL, tokens, 64, 1, keys=keys, **others)


def policy(**by_agent: int | Held) -> Cost:
    return Cost(Reported(dict(by_agent)))


def fast(*peers: str) -> dict[str, float]:
    return dict.fromkeys(peers, 50.0)


def test_without_pages_the_queues_decide() -> None:
    far, near = Worker("p0", queued=4000), Worker("p1", queued=1000)
    assert policy().prefill(demand(1000), [far, near], [far, near]) == 1
    assert policy().prefill(demand(1000), [near, near], [near]) == 0  # the first of equals


def test_a_longer_queue_is_worth_it_for_pages() -> None:
    """500 pages are 8,000 tokens, 200 ms."""
    holder, idle = Worker("p0", queued=4000), Worker("p1")
    assert policy(p0=500).prefill(demand(8020), [holder, idle], [holder, idle]) == 0
    holder.queued = 12_000
    assert policy(p0=500).prefill(demand(8020), [holder, idle], [holder, idle]) == 1


def test_pages_are_fetched_where_that_is_sooner() -> None:
    """1 GB at 50 GB/s takes 20 ms and at 2 GB/s 500, more than the 200 to compute them."""
    holder, idle = Worker("p0", queued=12_000), Worker("p1", path=fast("p0"))
    way = policy(p0=500).way(demand(8020), idle, [holder, idle])
    assert (way.holder, way.fetched_pages, way.cached_tokens) == (holder, 500, 8000)
    assert way.seconds == pytest.approx(0.02 + 20 * 25e-6)
    idle.path = {"p0": 2.0}
    way = policy(p0=500).way(demand(8020), idle, [holder, idle])
    assert way.holder is None
    assert way.again == {"sooner": 500}
    assert way.seconds == pytest.approx(8020 * 25e-6)


def test_only_what_is_missing_is_fetched() -> None:
    one, other = Worker("p0", path=fast("p1")), Worker("p1")
    way = policy(p0=300, p1=500).way(demand(8020), one, [one, other])
    assert way.seconds == pytest.approx(200 * PAGE_BYTES / 50e9 + 20 * 25e-6)


def test_of_many_holders_too_the_one_with_most_pages_that_can_be_reached() -> None:
    """Whoever measured the path, and however few are reachable."""
    rng = np.random.default_rng(8)
    for _ in range(200):
        pages = rng.permutation(np.arange(100, 130)).tolist()
        holders = [Worker(f"p{i}") for i in range(30)]
        idle = Worker("p30", path=fast(*(f"p{i}" for i in rng.permutation(30)[: rng.integers(4)])))
        for one in rng.permutation(30)[: rng.integers(4)]:
            holders[one].path = fast("p30", "p1")
        if rng.random() < 0.5:
            idle.complains_of = f"p{rng.integers(30)}"
        held = {one.agent_name: count for one, count in zip(holders, pages, strict=True)}
        own = int(rng.integers(90, 125))
        found = policy(**held, p30=own).way(demand(2100), idle, [*holders, idle]).holder
        reachable = [
            (held[one.agent_name], one.agent_name)
            for one in holders
            if (one.agent_name in idle.path or "p30" in one.path)
            and one.agent_name != idle.complains_of
            and held[one.agent_name] > own
        ]
        assert (found.agent_name if found else None) == max(reachable, default=(0, None))[1]


def test_pairs_without_a_measured_path_are_not_tried_one_by_one() -> None:
    tried = 0

    class Counted(Worker):
        def path_bytes_per_s(self, other: Worker) -> float:
            nonlocal tried
            tried += 1
            return super().path_bytes_per_s(other)

    workers = [Counted(f"p{i}", path=fast(f"q{i}")) for i in range(200)]
    held = {f"p{i}": 100 for i in range(100)}
    policy(**held).prefill(demand(2100), workers, workers)
    assert tried <= 200 * 2 * 4


def test_a_fetch_takes_an_eighth_of_the_pool() -> None:
    holder, idle = Worker("p0", queued=90_000), Worker("p1", path=fast("p0"))
    way = policy(p0=1250).way(demand(20_020), idle, [holder, idle])
    assert way.fetched_pages == 1000
    assert way.again == {"bound": 250}


@pytest.mark.parametrize("broken", ["complaint", "no rate"])
def test_no_fetch_without_a_path(broken: str) -> None:
    path = {} if broken == "no rate" else fast("p0")
    complains_of = "p0" if broken == "complaint" else ""
    holder = Worker("p0", queued=90_000)
    idle = Worker("p1", path=path, complains_of=complains_of)
    way = policy(p0=500).way(demand(8020), idle, [holder, idle])
    assert way.holder is None
    assert way.again == {"unreachable": 500}


def test_host_memory_counts_by_its_rate() -> None:
    worker = Worker("p0", load_gb=45)
    way = policy(p0=Held.all(0, 500)).way(demand(8020), worker, [worker])
    assert way.seconds == pytest.approx(1 / 45 + 20 * 25e-6)
    worker.load_gb = 1
    way = policy(p0=Held.all(0, 500)).way(demand(8020), worker, [worker])
    assert way.cached_tokens == 0


def test_pages_in_host_memory_whose_rate_nobody_measured_are_not_free() -> None:
    """They count as what a fetch brings."""
    worker, peer = Worker("p0", path=fast("p1"), load_gb=0), Worker("p1", queued=12_000)
    way = policy(p0=Held.all(0, 300), p1=500).way(demand(8020), worker, [worker, peer])
    assert way.seconds == pytest.approx(500 * PAGE_BYTES / 50e9 + 20 * 25e-6)


def test_what_a_worker_cannot_go_on_behind_counts_for_nothing() -> None:
    """It has all pages of group 0, and lost those of a window behind page 100."""
    more, less = Worker("p0", resume_bytes=1 << 20), Worker("p1", resume_bytes=1 << 20)
    held = policy(p0=Held(500, 500, 100, 100), p1=Held(200, 200, 200, 200))
    assert held.prefill(demand(8020), [more, less], [more, less]) == 1
    way = held.way(demand(8020), more, [more])
    assert (way.cached_tokens, way.holder) == (1600, None)


@pytest.mark.parametrize(("load_gb", "loaded"), [(0.0, 0), (45.0, 300)])
def test_a_fetch_moves_what_the_worker_has_not_and_the_windows(load_gb: float, loaded: int) -> None:
    """Of group 0 it has 400 pages, of which it can use none, or 300 with host memory."""
    size = 500_000_000
    worker = Worker("p0", path=fast("p1"), load_gb=load_gb, resume_bytes=size, token_s=250e-6)
    peer = Worker("p1", queued=90_000, resume_bytes=size)
    held = policy(p0=Held(400, 400, 0, 300), p1=500)
    way = held.way(demand(8020), worker, [worker, peer])
    assert (way.holder, way.fetched_pages) == (peer, 500)
    load_s = size / 45e9 if loaded else 0.0
    moved_s = load_s + (100 * PAGE_BYTES + size) / 50e9
    assert way.seconds == pytest.approx(moved_s + 20 * 250e-6)


def test_a_resume_point_that_a_fetch_may_not_bring_whole_is_not_fetched() -> None:
    """An eighth of the pool is 1,000 pages. What is short of the point is of no use."""
    idle = Worker("p1", path=fast("p0"), resume_bytes=1 << 20)
    holder = Worker("p0", queued=90_000, resume_bytes=1 << 20)
    way = policy(p0=1250).way(demand(20_020), idle, [holder, idle])
    assert (way.holder, way.cached_tokens) == (None, 0)
    assert way.again == {"bound": 1250}
    assert policy(p0=1000).way(demand(20_020), idle, [holder, idle]).fetched_pages == 1000


def test_host_memory_of_unknown_rate_makes_no_fetch_of_a_resume_point_that_is_too_large() -> None:
    """Its pages there are none of those that a fetch would bring, and it brings no part."""
    idle = Worker("p1", path=fast("p0"), resume_bytes=1 << 20)
    holder = Worker("p0", queued=90_000, resume_bytes=1 << 20)
    chooser = policy(p0=1250, p1=Held(0, 400, 0, 400))
    way = chooser.way(demand(20_020), idle, [holder, idle])
    assert (way.holder, way.fetched_pages, way.cached_tokens) == (None, 0, 0)
    one = Worker("p1", path=fast("p0"))
    way = chooser.way(demand(20_020), one, [holder, one])
    assert (way.holder, way.fetched_pages) == (holder, 1000), "an eighth of the pool"


def test_a_token_takes_longer_behind_others() -> None:
    """1 ns a token before it: 1,000 tokens behind 8,000 take 8.5 ms longer than none before."""
    capacity = Worker("p0", context_s=1e-9).capacity()
    assert rest_s(capacity, 8000, 9000, 1.0) == pytest.approx(1000 * (25e-6 + 8500e-9))


def test_a_worker_that_was_not_measured_yet_counts_as_the_fastest_prefill_worker() -> None:
    """Else a decode worker with half of a prompt would be first with any rest."""
    new, old, decode = Worker("p0", token_s=0.0), Worker("p1"), Worker("d0", token_s=50e-6)
    prompt, chooser = demand(8020), policy(d0=251)
    way = chooser.way(prompt, new, [new, old, decode])
    assert way.seconds == pytest.approx(8020 * 25e-6)
    most = chooser.takeover_tokens(prompt, way, new, decode, [new, old, decode])
    assert most == pytest.approx(4010, abs=1)
    decode.token_s = 0.0
    most = chooser.takeover_tokens(prompt, way, new, decode, [new, old, decode])
    assert most == pytest.approx(8020, abs=1)


def test_streams_that_wait_for_a_piece_count_each() -> None:
    """40 rows, 3 ms a step, 2.5 steps at least one."""
    capacity, piece = Worker("d0", rows=40).capacity(), MixedChunk(192, 0.003)
    assert delay_s(capacity, piece, 480) == pytest.approx(40 * 0.003 * 2.5)
    assert delay_s(capacity, piece, 10) == pytest.approx(40 * 0.003)
    assert delay_s(capacity, piece, 0) == delay_s(capacity, MixedChunk(), 480) == 0


def test_a_piece_is_the_mean_of_those_who_have_measured_one() -> None:
    new, *others = [Worker(f"b{i}", delay_ms=delay).capacity() for i, delay in enumerate((0, 2, 4))]
    assert usual_chunk([new, *others]) == MixedChunk(192, pytest.approx(0.003))
    assert usual_chunk([new]) == MixedChunk()


def test_what_one_worker_has_measured_does_not_send_prompts_to_a_longer_queue() -> None:
    """20 rows x 8 pieces: a millisecond more or less would be as much as six prompts ahead. Without
    a prompt it would stay so."""
    idle, busy = Worker("b0", rows=20, delay_ms=4), Worker("b1", queued=3072, rows=20, delay_ms=3)
    assert policy().prefill(demand(1536), [idle, busy], [idle, busy]) == 0
    assert policy().prefill(demand(1536), [busy, idle], [busy, idle]) == 1
    way = policy().way(demand(1536), idle, [idle, busy])
    assert way.seconds == pytest.approx(1536 * 25e-6 + 20 * 8 * 0.0035)


def test_of_workers_alike_the_one_with_fewer_streams_computes() -> None:
    few, many = Worker("b1", rows=10, delay_ms=4), Worker("b0", rows=12, delay_ms=3)
    assert policy().prefill(demand(1536), [many, few], [many, few]) == 1


def test_workers_of_another_role_say_nothing_of_a_piece() -> None:
    """A decode worker computes short pieces, and a worker that does both long ones."""
    both, decode = Worker("b0", rows=20, delay_ms=24), Worker("d0", rows=20, delay_ms=3)
    way = policy().way(demand(192), decode, [both, decode])
    assert way.seconds == pytest.approx(192 * 25e-6 + 20 * 0.003)


def test_the_next_turn_goes_to_the_decode_worker_that_holds_it() -> None:
    prefill, decode = Worker("p0"), Worker("d0", rows=40, delay_ms=3)
    chosen = policy(d0=500).local(demand(8100), [decode], [prefill], [prefill, decode], "cached")
    assert chosen == (0, LocalReason.CACHED)


def test_a_long_rest_goes_to_a_prefill_worker() -> None:
    """2,000 tokens take D 50 ms and 40 streams 1.25 s; P fetches in 20 ms and takes 50."""
    prefill, decode = Worker("p0", path=fast("d0")), Worker("d0", rows=40, delay_ms=3)
    args = demand(10_020), [decode], [prefill], [prefill, decode], "cached"
    assert policy(d0=500).local(*args) is None
    way = policy(d0=500).way(args[0], prefill, args[3])
    assert way.holder is decode
    decode.rows = 0
    assert policy(d0=500).local(*args) == (0, LocalReason.CACHED)


def test_the_most_that_a_decode_worker_may_take_over() -> None:
    """Of 22.5 ms: 900 tokens at 25 us each without streams; with 40 streams no piece fits."""
    prefill, decode = Worker("p0"), Worker("d0")
    way = Way(0.0225)
    args = demand(8100), way, prefill, decode, [prefill, decode]
    assert policy().takeover_tokens(*args) == pytest.approx(900, abs=1)
    decode.rows, decode.delay_ms = 3, 3
    most = policy().takeover_tokens(*args)
    assert most == int(0.0225 / (25e-6 + 0.009 / 192))
    decode.rows = 40
    assert policy().takeover_tokens(*args) == 0


def test_the_example_of_the_documentation() -> None:
    decode = Worker("decode-0", rows=40, delay_ms=3)
    first, second = Worker("prefill-0"), Worker("prefill-1", queued=4000)
    first.path = second.path = fast("decode-0")
    those = [first, second, decode]
    rule = Cost(Reported({"decode-0": 500, "prefill-1": 475}))
    ways = [rule.way(demand(8100), worker, those) for worker in those]
    assert [way.seconds for way in ways] == pytest.approx([0.0225, 0.1035, 0.1225])
    assert [way.holder for way in ways] == [decode, decode, None]
    assert rule.prefill(demand(8100), [first, second], those) == 0
    assert rule.local(demand(8100), [decode], [first, second], those, "cached") is None
    decode.rows = 3
    chosen = rule.local(demand(8100), [decode], [first, second], those, "cached")
    assert chosen == (0, LocalReason.CACHED)


def test_a_decode_worker_that_holds_less_than_half_needs_auto() -> None:
    prefill, decode = Worker("p0", queued=90_000), Worker("d0")
    args = demand(8020), [decode], [prefill], [prefill, decode]
    assert policy(d0=100).local(*args, "cached") is None
    assert policy(d0=100).local(*args, "auto") == (0, LocalReason.FASTER)


def test_log_probabilities_of_a_prompt_use_no_pages() -> None:
    prefill, decode = Worker("p0"), Worker("d0")
    scored = Demand(MODEL, 8020, 64, 1, prompt_logprobs=True)
    args = scored, [decode], [prefill], [prefill, decode]
    assert policy(d0=500).local(*args, "cached") is None
    assert policy(p0=500).way(scored, prefill, [prefill]).cached_tokens == 0


def test_conversations_stay_where_their_pages_are_within_bounds() -> None:
    holder, other = Worker("d0", used=0.05), Worker("d1")
    assert policy(d0=500).decode(demand(8020), [other, holder]) == 1
    assert policy(d0=100).decode(demand(8020), [other, holder]) == 0
    holder.used = 0.1
    assert policy(d0=500).decode(demand(8020), [other, holder]) == 0
    assert policy().decode(demand(8020), [holder, other]) == 1


def test_what_was_just_routed_counts_as_held_for_two_seconds() -> None:
    now = [0.0]
    policy = Cost(Reported(), JustRouted(lambda: now[0]))
    one, other, prompt = Worker("p0"), Worker("p1"), demand(8020)
    policy.routed(prompt, other)
    sibling = Demand(MODEL, 8020, 64, 1, keys=prompt.keys.copy())
    assert policy.prefill(sibling, [one, other], [one, other]) == 1
    way = policy.way(sibling, other, [one, other])
    assert (way.cached_tokens, way.just_routed) == (8016, True)
    assert policy.way(sibling, one, [one, other]).again == {"in_flight": 501}
    now[0] = JUST_ROUTED_S
    policy.look(sibling)
    assert policy.prefill(sibling, [one, other], [one, other]) == 0


def test_siblings_of_a_prompt_that_a_prefill_worker_computes_stay_there() -> None:
    """The decode worker gets the pages by the hand-off. Until then it would compute all of them."""
    policy = Cost(Reported(), JustRouted(lambda: 0.0))
    prefill, decode, prompt = Worker("p0", queued=8020), Worker("d0"), demand(8020)
    policy.routed(prompt, prefill)
    those = [decode], [prefill], [prefill, decode]
    assert policy.local(prompt, *those, "cached") is None
    assert policy.way(prompt, prefill, those[2]).cached_tokens == 8016
    assert policy.way(prompt, decode, those[2]).cached_tokens == 0
    policy.routed(prompt, decode)
    assert policy.local(prompt, *those, "cached") == (0, LocalReason.CACHED)


def test_what_a_failed_attempt_was_to_bring_counts_no_more():
    now = [0.0]
    policy = Cost(Reported(), JustRouted(lambda: now[0]))
    one, other, prompt = Worker("p0"), Worker("p1"), demand(8020)
    policy.routed(prompt, other)
    assert policy.way(prompt, other, [one, other]).just_routed
    policy.failed(prompt, [other])
    assert not policy.way(prompt, other, [one, other]).just_routed
    assert policy.prefill(prompt, [one, other], [one, other]) == 0
    policy.routed(prompt, one)
    now[0] = 2 * JUST_ROUTED_S
    assert not policy.way(prompt, one, [one, other]).just_routed


def test_what_a_sibling_computes_counts_on_where_another_is_forgotten() -> None:
    """They share the first 30 pages, such as a system prompt. Whichever came first, nothing of the
    other one is forgotten, and nothing twice."""
    keys = np.arange(1, 101, dtype=np.uint64)
    short, long = (
        Demand(MODEL, 490, 64, 1, keys=keys[:30]),
        Demand(MODEL, 970, 64, 1, keys=keys[:60]),
    )
    equal = Demand(MODEL, 970, 64, 1, keys=keys[:60])
    now = [0.0]
    for first, second in ((short, long), (long, short)):
        routed = JustRouted(lambda: now[0])
        routed.add("p0", first)
        routed.add("p0", second)
        routed.forget("p0", long)
        routed.forget("p0", long)
        assert routed.pages("p0", keys) == 30
        routed.forget("p0", short)
        assert routed.pages("p0", keys) == 0
        routed.add("p0", long)
        routed.forget("p0", equal)
        assert routed.pages("p0", keys) == 60
        now[0] += 1.0
        routed.add("p0", long)  # another attempt at it
        now[0] += 1.0
        assert routed.pages("p0", keys) == 60


def test_just_routed_prompts_share_their_beginnings_and_leave_nothing() -> None:
    now = [0.0]
    routed = JustRouted(lambda: now[0])
    keys = np.arange(1, 101, dtype=np.uint64)
    routed.add("p0", Demand(MODEL, 970, 64, 1, keys=keys[:60]))
    now[0] = 1.0
    routed.add("p0", Demand(MODEL, 490, 64, 1, keys=keys[:30]))
    forked = np.concatenate([keys[:20], keys[50:] + np.uint64(1000)])
    pages = [routed.pages("p0", one) for one in (keys, keys[:10], forked, keys[70:])]
    assert pages == [60, 10, 20, 0]
    now[0] = JUST_ROUTED_S
    assert routed.pages("p0", keys) == 30
    now[0] = JUST_ROUTED_S + 1
    assert routed.pages("p0", keys) == 0
    assert not any((routed._claims, routed._counts, routed._order))


def route(way: Way) -> Route:
    return Route(None, None, way=way)  # type: ignore[arg-type]


def test_pages_computed_again_have_their_reason() -> None:
    prompt = demand(161)
    held_here = Way(1.0, cached_tokens=160)
    assert computed_again(prompt, route(held_here), 160, 10) == {}
    assert computed_again(prompt, route(held_here), 0, 0) == {"event": 10}
    coming = held_here._replace(just_routed=True)
    assert computed_again(prompt, route(coming), 32, 0) == {"in_flight": 8}
    fetched = held_here._replace(holder=Worker("p9"), fetched_pages=10)
    assert computed_again(prompt, route(fetched), 80, 10) == {"fetch": 5}
    nothing_known = Way(1.0)
    assert computed_again(prompt, route(nothing_known), 0, 10) == {"event": 10}
    sooner = Way(1.0, again={"sooner": 10})
    assert computed_again(prompt, route(sooner), 0, 10) == {"sooner": 10}
    assert computed_again(prompt, route(sooner), 96, 10) == {"sooner": 4}


def test_pages_computed_by_a_takeover_have_their_reason() -> None:
    prompt = demand(161)
    assert computed_by_takeover(prompt, cached_tokens=96, held_pages=10) == {"sooner": 4}
    assert computed_by_takeover(prompt, cached_tokens=160, held_pages=10) == {}
    assert computed_by_takeover(prompt, cached_tokens=96, held_pages=0) == {}
    assert computed_by_takeover(prompt, cached_tokens=96, held_pages=99) == {"sooner": 4}
