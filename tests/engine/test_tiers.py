"""The host tier by a scheduler over a fake device: what is saved, loaded, late, and void."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engine_fakes import VOCAB
from scheduler_bench import SALT, Bench, prompt_of

from engine.loop.load import load_of
from engine.loop.rates import StepRates
from engine.schedule.sequences import RequestState
from engine.types import Mode
from prefixes.keys import page_keys


def talk(bench: Bench, turns: int, rng: random.Random, conversations: int = 12) -> list[bytes]:
    """Conversations that grow by turns, in random order; the answers are part of what follows."""
    said = [prompt_of(rng, rng.randrange(5, 30)) for _ in range(conversations)]
    ids = []
    for _ in range(turns):
        which = rng.randrange(conversations)
        prompt = said[which] = said[which][-80:]
        ids.append(bench.submit(prompt, rng.randrange(1, 12)))
        for _ in range(rng.randrange(1, 9)):
            bench.turn()
        said[which] = [*prompt, *bench.outputs.get((ids[-1], 0), []), rng.randrange(4, VOCAB)]
    return ids


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(2, 20))]
)
def test_conversations_in_a_small_pool_stay_exact(seed, eviction):
    """Copies end late, in any order, or fail."""
    rng = random.Random(seed)
    bench = Bench(
        num_pages=40,
        host_slots=rng.choice([20, 200]),
        lane_random=random.Random(seed),
        eviction=eviction,
    )
    ids = talk(bench, 100, rng)
    bench.run()
    for request_id in ids:
        bench.check_output(request_id)
    counts = bench.tiers.load()
    assert counts.loaded_tokens["host"] > 0
    assert counts.late["save"] > 0
    bench.check_baseline()


def filled(bench: Bench, prompts: int = 30) -> list[list[int]]:
    """Prompts that ran one after the other, more than the pool holds."""
    rng = random.Random(3)
    said = [prompt_of(rng, 21) for _ in range(prompts)]
    for prompt in said:
        bench.submit(prompt, 2)
        bench.run()
    return said


def test_an_evicted_prompt_is_loaded_and_its_slots_are_free_again():
    bench = Bench(num_pages=65, host_slots=200)
    said = filled(bench)
    keys = page_keys(np.array(said[0], np.int32), 4, SALT)
    assert bench.blocks.count_cached(keys) == 0
    assert all(bench.host.page_of(key) for key in keys)
    computed = bench.scheduler.admission.cached_tokens
    again = bench.submit(said[0], 2)
    bench.run()
    bench.check_output(again)
    assert bench.scheduler.admission.cached_tokens - computed == 20
    assert bench.tiers.load().loaded_tokens == {"host": 20}
    assert not any(bench.host.page_of(key) for key in keys), "a loaded page is in one tier only"
    bench.check_baseline()


def test_a_quarter_of_the_pool_is_kept_ready_and_nothing_beyond_is_saved():
    bench = Bench(num_pages=81, host_slots=200)
    filled(bench, 40)
    assert bench.blocks.ready >= 20
    assert bench.tiers.load().bytes_moved["save"] < 40 * 5
    bench.submit(prompt_of(random.Random(4), 8), 2)
    bench.run()
    assert bench.blocks.ready >= 20


def test_others_go_on_while_a_request_loads_and_one_with_the_same_pages_waits_for_them():
    bench = Bench(num_pages=65, host_slots=200)
    said = filled(bench)
    loads = bench.lanes.loads
    bench.lanes.ended = list
    first = bench.submit(said[0], 4)
    second = bench.submit([*said[0], 9, 9], 4)
    other = bench.submit([5, 6, 7], 4)
    for _ in range(12):
        bench.turn()
    states = [bench.scheduler.requests.by_id[one].state for one in (first, second)]
    assert states == [RequestState.LOADING] * 2
    assert len(loads.queued) == 1, "the same pages are loaded once"
    bench.check_output(other)
    del bench.lanes.ended
    bench.run()
    bench.check_output(first)
    bench.check_output(second)
    bench.check_baseline()


def test_a_late_load_is_a_miss_and_holds_its_pages_until_it_ends():
    bench = Bench(num_pages=65, host_slots=200)
    said = filled(bench)
    bench.lanes.ended = list
    late = bench.submit(said[0], 4)
    bench.turn()
    (load,) = bench.lanes.loads.queued
    load.due_s = 0.0
    for _ in range(12):
        bench.turn()
    bench.check_output(late)
    assert bench.tiers.load().late == {"load": 1}
    assert bench.host.page_of(page_keys(np.array(said[0], np.int32), 4, SALT)[0]) is None
    stuck = bench.submit(said[1], 4)
    for _ in range(12):
        bench.turn()
    bench.check_output(stuck)
    assert bench.tiers.load().decisions["stuck"] == 1
    assert bench.blocks.available == bench.blocks.total - 5
    del bench.lanes.ended
    bench.run()
    bench.check_baseline()


def test_a_request_that_goes_away_while_it_loads_leaves_nothing_behind():
    bench = Bench(num_pages=65, host_slots=200)
    said = filled(bench)
    gone = bench.submit(said[0], 4)
    bench.lanes.ended = list
    bench.turn()
    assert bench.scheduler.requests.by_id[gone].state is RequestState.LOADING
    bench.scheduler.requests.cancel(gone)
    assert gone not in bench.scheduler.requests.by_id
    del bench.lanes.ended
    bench.run()
    bench.check_baseline()


def test_pages_are_computed_where_that_is_sooner():
    bench = Bench(num_pages=65, host_slots=200)
    said = filled(bench)
    bench.lanes.loads.expected_s = lambda pages: 1.0
    bench.tiers.note_rate(1000.0)
    bench.submit(said[0], 2)
    bench.run()
    assert bench.tiers.load().decisions == {"computed_sooner": 1}
    bench.tiers.note_rate(10.0)
    bench.submit(said[1], 2)
    bench.run()
    assert bench.tiers.load().decisions["loaded"] == 1
    bench.check_baseline()


def test_a_preempted_sequence_comes_back_with_its_own_bytes():
    """Its pages are saved before others get them, and all but its last page is not computed."""
    bench = Bench(num_pages=17, slots=4, host_slots=100)
    ids = [bench.submit(prompt_of(bench.random, 4), 40) for _ in range(4)]
    bench.run()
    assert bench.scheduler.requests.preemptions > 0
    for request_id in ids:
        bench.check_output(request_id)
    loaded = bench.tiers.load().loaded_tokens["host"]
    again = bench.scheduler.admission.cached_tokens
    assert loaded > 0
    assert again >= loaded
    bench.check_baseline()


@pytest.mark.parametrize("mode", [Mode.PREFILL, Mode.RECEIVE])
def test_both_legs_of_a_hand_off_find_pages_in_the_host_tier(mode):
    bench = Bench(num_pages=65, host_slots=200)
    said = filled(bench)
    request_id = bench.submit(said[0], 4, mode=mode)
    for _ in range(8):
        bench.turn()
    if mode is Mode.RECEIVE:
        assert bench.reserved[request_id].held_pages == 5
    else:
        assert bench.chunks[request_id].end_token == 21
        stored = bench.device.kv[bench.chunks[request_id].pages].reshape(-1)[:21]
        assert stored.tolist() == said[0]
    assert bench.tiers.load().loaded_tokens == {"host": 20}
    bench.scheduler.requests.cancel(request_id)
    bench.scheduler.requests.release(request_id)
    bench.check_baseline()


def test_a_tenant_does_not_find_what_another_has_saved():
    bench = Bench(num_pages=65, host_slots=200)
    said = filled(bench)
    bench.submit(said[0], 2, cache_salt=b"other")
    bench.run()
    assert not bench.tiers.load().loaded_tokens


def test_pages_that_are_being_loaded_are_not_wanted_again() -> None:
    """They are neither free nor evictable. A router would think the pool fuller than it is."""
    bench = Bench(num_pages=200, host_slots=100)
    prompt = prompt_of(random.Random(1), 42)
    keys = page_keys(np.array(prompt, np.int32), 4, SALT)[:10]
    slots = bench.host.allocate(len(keys))
    bench.lanes.slots[slots] = np.array(prompt[:40]).reshape(10, 4)
    bench.host.adopt(slots.tolist(), keys)
    bench.host.release(slots)
    request_id = bench.submit(prompt, 4)
    bench.scheduler.admission.admit()
    assert bench.scheduler.requests.by_id[request_id].state is RequestState.LOADING
    load = load_of(bench.scheduler, StepRates(), (), progress=0, long_step_ms=0.0)
    assert bench.blocks.total - bench.blocks.available == len(keys) == 10
    assert load.wanted_pages == 1
    bench.run()
    bench.check_output(request_id)
    bench.check_baseline()
