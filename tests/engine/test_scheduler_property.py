"""The scheduler, block manager and settling against a naive model, under random operations."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from engine_fakes import VOCAB, expected_output, next_token
from scheduler_bench import SALT, Bench, deliver, prompt_of
from speculation_kit import Switching
from suite_plugins import drawn

from engine.bounds import PromptLimits
from engine.groups import state
from engine.groups.spec import Window
from engine.pages.eviction import EVICTION_POLICIES
from engine.schedule.policies import POLICIES
from engine.schedule.recovery import MAX_FAILED_STEPS
from engine.step.budget import MAX_SHRINKS
from engine.types import (
    FailureReason,
    Mode,
    TokenRecord,
)
from prefixes.keys import page_keys


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 40])
def test_one_request_at_page_and_chunk_boundaries(length):
    bench = Bench()
    request_id = bench.submit(prompt_of(bench.random, length), 11)
    bench.run()
    bench.check_output(request_id)
    bench.check_baseline()


def test_a_shared_prefix_is_computed_once():
    bench = Bench(num_pages=80)
    rng = random.Random(1)
    first = bench.submit(prompt_of(rng, 24, shared=20))
    bench.run()
    computed = bench.scheduler.admission.cached_tokens
    assert computed == 0
    second = bench.submit(prompt_of(rng, 26, shared=20))
    bench.run()
    assert bench.scheduler.admission.cached_tokens == 20
    bench.check_output(first)
    bench.check_output(second)
    bench.check_baseline()


def test_tenants_share_nothing():
    bench = Bench(num_pages=80)
    for salt in (b"a", b"b"):
        bench.submit([7] * 24, cache_salt=salt)
        bench.run()
    assert bench.scheduler.admission.cached_tokens == 0


def test_conversation_reuses_the_pages_of_the_answer():
    bench = Bench(num_pages=80)
    prompt = prompt_of(bench.random, 10)
    first = bench.submit(prompt, 14)
    bench.run()
    answer = bench.outputs[first, 0]
    bench.submit([*prompt, *answer, 5, 6], 4)
    bench.run()
    assert bench.scheduler.admission.cached_tokens >= (len(prompt) + len(answer) - 1) // 4 * 4
    bench.check_baseline()


@pytest.mark.parametrize("length", [4, 5, 7, 8, 30])
def test_choices_share_the_prompt(length):
    bench = Bench(num_pages=80)
    request_id = bench.submit(prompt_of(bench.random, length), 9, choices=4)
    bench.run()
    bench.check_output(request_id)
    assert len({bench.ends[request_id, i] for i in range(4)}) == 1
    bench.check_baseline()


def test_giants_are_not_starved_by_dwarfs():
    bench = Bench(num_pages=34, slots=8)
    rng = random.Random(6)
    for _ in range(6):
        bench.submit(prompt_of(rng, 6), 20)
    giant = bench.submit(prompt_of(rng, 100), 20)
    submitted = 0
    while (giant, 0) not in bench.ends and submitted < 400:
        bench.submit(prompt_of(rng, 4), 6)
        submitted += 1
        for _ in range(3):
            bench.turn()
    assert (giant, 0) in bench.ends, "the giant starved"
    bench.run(20_000)
    bench.check_output(giant)
    bench.check_baseline()


def test_too_large_is_refused_at_once():
    bench = Bench(num_pages=10)
    for prompt, max_tokens, choices in (
        ([5] * 30, 20, 1),
        ([5] * 250, 10, 1),
        ([5], 2, 7),
        ([], 2, 1),
    ):
        request_id = bench.submit(prompt, max_tokens, choices=choices)
        bench.turn()
        assert bench.failed[request_id] is FailureReason.TOO_LARGE
    bench.check_baseline()


def test_a_failed_step_fails_its_requests_only():
    bench = Bench()
    doomed = bench.submit(prompt_of(bench.random, 9), 8)
    bench.turn()
    bench.device.fail_next = RuntimeError("device")
    bench.turn()
    bench.turn()
    bench.turn()
    assert bench.failed == {doomed: FailureReason.INTERNAL}
    healthy = bench.submit(prompt_of(bench.random, 9), 8)
    bench.run()
    bench.check_output(healthy)
    bench.check_baseline()


def test_a_prompt_behind_one_choice_of_many_gets_its_own_first_token():
    """A choice that is computed again by itself draws once, however many choices its request has:
    counting all of them shifted the draws of every prompt behind it in the step."""
    bench = Bench(step_tokens=64)
    prompt = prompt_of(bench.random, 9)
    given = (np.array([7], np.int32), np.array([8], np.int32))
    bench.submit(prompt, 12, choices=2, generated=given)
    bench.turn()
    behind = prompt_of(bench.random, 11)
    request_id = bench.submit(behind, 4, mode=Mode.PREFILL)
    while request_id not in bench.prefilled:
        bench.turn()
    (record,) = bench.prefilled[request_id].records
    assert record.token_id == expected_output(behind, 4, frozenset({3}))[0]
    bench.scheduler.requests.release(request_id)
    bench.run()
    bench.check_baseline()


def test_a_step_that_lacks_memory_is_tried_again_smaller():
    """Nobody loses or repeats a token; steps are small for a while, and grow again."""
    bench = Bench(slots=6, step_tokens=64)
    wanted = [bench.submit(prompt_of(bench.random, 20 + i), 30) for i in range(6)]
    received = bench.submit(prompt_of(bench.random, 9), 12, mode=Mode.RECEIVE)
    for turn in range(12):
        if turn in (1, 6):
            bench.device.fail_next = torch.OutOfMemoryError()
        bench.turn()
    assert bench.scheduler.requests.preemptions > 0
    assert bench.scheduler.budget.tokens < 64
    while received not in bench.reserved:
        bench.turn()
    deliver(bench, received)
    bench.turn()
    bench.device.fail_next = torch.OutOfMemoryError()
    bench.run()
    assert not bench.failed
    for request_id in wanted:
        bench.check_output(request_id)
    later = bench.submit(prompt_of(bench.random, 20), 80)
    bench.run()
    bench.check_output(later)
    assert bench.scheduler.budget.tokens == 64
    bench.check_baseline()


def test_a_chunk_in_flight_is_void_where_its_sequence_began_again_in_another_slot():
    """Else pages that nobody has computed yet were cached as if they were that chunk's."""
    bench = Bench(slots=6, num_pages=80, mixed=8)
    request_id = bench.submit(prompt_of(bench.random, 32), 4)
    bench.turn()
    (sequence,) = bench.scheduler.requests.by_id[request_id].sequences
    used, (other, _) = sequence.slot, bench.previous
    bench.scheduler.requests.preempt(sequence)
    batch = bench.scheduler.batch
    batch.slots.generation[:] = batch.chunks[other.number][0].task.generation
    batch.slots._free.reverse()
    bench.scheduler.admission.admit()
    assert sequence.slot != used
    bench.turn()
    assert bench.blocks.count_cached(page_keys(np.array(sequence.tokens, np.int32), 4, SALT)) == 0
    bench.run()
    bench.check_output(request_id)


def test_limits_of_prompts_change_while_they_are_computed():
    """A worker that decodes from now on keeps its steps short, and takes the prompts that it has to
    their end."""
    bench = Bench(step_tokens=32)
    request_id = bench.submit(prompt_of(bench.random, 80), 4)
    bench.turn()
    first, _ = bench.previous
    bench.scheduler.planner.limit(PromptLimits(alone_tokens=8))
    bench.turn()
    assert (first.prompt_tokens, bench.previous[0].prompt_tokens) == (32, 8)
    bench.run()
    bench.check_output(request_id)
    bench.check_baseline()


def test_memory_that_lacks_however_small_the_step_fails_the_request():
    bench = Bench()
    doomed = bench.submit(prompt_of(bench.random, 9), 8)
    for _ in range(20):
        bench.device.fail_next = torch.OutOfMemoryError()
        bench.turn()
        if bench.failed:
            break
    assert bench.failed == {doomed: FailureReason.INTERNAL}
    assert bench.scheduler.budget.failures == MAX_SHRINKS + 1
    bench.device.fail_next = None
    healthy = bench.submit(prompt_of(bench.random, 9), 8)
    bench.run()
    bench.check_output(healthy)
    bench.check_baseline()


def test_a_device_is_lost_by_its_own_word_or_by_failing_ever_again():
    bench = Bench()
    error = RuntimeError("device")
    while not bench.scheduler.recovery.is_lost(error):
        assert len(bench.failed) <= MAX_FAILED_STEPS
        bench.submit(prompt_of(bench.random, 9), 8)
        bench.device.fail_next = error
        bench.turn()
    assert bench.scheduler.budget.failures == MAX_FAILED_STEPS
    assert set(bench.failed.values()) == {FailureReason.INTERNAL}
    assert Bench().scheduler.recovery.is_lost(torch.AcceleratorError("CUDA error"))
    assert not Bench().scheduler.recovery.is_lost(torch.OutOfMemoryError())


def test_resumed_choices_that_differ():
    bench = Bench()
    prompt = prompt_of(bench.random, 9)
    want = expected_output(prompt, 12, frozenset({3}))
    given = (np.array(want[:5], np.int32), np.array(want[:2], np.int32))
    request_id = bench.submit(prompt, 12, choices=2, generated=given)
    bench.run()
    assert bench.outputs[request_id, 0] == want[5:]
    assert bench.outputs[request_id, 1] == want[2:]
    bench.check_baseline()


def test_resumed_choices_that_differ_are_cached_under_their_own_tokens():
    bench = Bench()
    prompt, given = [9] * 6, ([5] * 6, [7] * 6)
    generated = tuple(np.array(own, np.int32) for own in given)
    request_id = bench.submit(prompt, 20, choices=2, generated=generated)
    bench.run()
    whole = [[*prompt, *given[i], *bench.outputs[request_id, i]][:-1] for i in range(2)]
    for tokens in whole:
        pages = bench.blocks.acquire(page_keys(np.array(tokens, np.int32), 4, SALT))
        assert len(pages) == len(tokens) // 4
        assert bench.device.kv[pages].reshape(-1).tolist() == tokens[: 4 * len(pages)]
        bench.blocks.release(pages)
    crossed = np.array(whole[0][:8] + whole[1][8:], np.int32)
    assert bench.blocks.count_cached(page_keys(crossed, 4, SALT)) == 2, (
        "computed behind other tokens"
    )
    bench.check_baseline()


def test_many_stop_ids_cost_later_steps_nothing():
    """Every step compares its tokens with all columns of stop ids, whoever asked for them."""
    bench = Bench()
    prompt, stop = prompt_of(bench.random, 9), range(1000, 1400)
    wide = bench.submit(prompt, 8, stop=stop)
    bench.turn()
    beside = bench.submit(prompt_of(bench.random, 9), 30)
    bench.run()
    assert bench.scheduler.batch.slots.stop_ids.shape[1] == len(stop) + 1
    again = bench.submit(prompt, 8)
    bench.run()
    assert bench.scheduler.batch.slots.stop_ids.shape[1] == 4
    assert bench.outputs[again, 0] == bench.outputs[wide, 0]
    bench.check_output(beside)
    bench.check_baseline()


def test_prefill_holds_its_pages_until_release():
    bench = Bench()
    prompt = prompt_of(bench.random, 18)
    request_id = bench.submit(prompt, 8, mode=Mode.PREFILL, choices=3)
    bench.run()
    first = next_token(prompt)
    assert [r.token_id for r in bench.prefilled[request_id].records] == [first] * 3
    chunk = bench.chunks[request_id]
    assert chunk.end_token == 18
    stored = bench.device.kv[chunk.pages].reshape(-1)[:18]
    assert stored.tolist() == prompt
    assert bench.blocks.available == bench.blocks.total - 5
    bench.scheduler.requests.release(request_id)
    bench.check_baseline()


@pytest.mark.parametrize("choices", [1, 3])
def test_received_request_decodes_from_delivered_pages(choices):
    bench = Bench(num_pages=60)
    prompt = prompt_of(bench.random, 18)
    for _ in range(2):
        request_id = bench.submit(prompt, 9, mode=Mode.RECEIVE, choices=choices)
        bench.run()
        first = deliver(bench, request_id)
        bench.run()
        want = expected_output(prompt, 9, frozenset({3}))
        assert want[0] == first
        for choice in range(choices):
            assert bench.outputs[request_id, choice] == want[1:]
        bench.check_baseline()
    assert bench.reserved[request_id].held_pages == 4, "the second time D holds all full pages"


def test_a_delivered_prompt_is_keyed_while_it_decodes():
    bench = Bench(num_pages=60)
    prompt = prompt_of(bench.random, 18)
    request_id = bench.submit(prompt, 9, mode=Mode.RECEIVE)
    bench.run()
    deliver(bench, request_id)
    bench.turn()
    twin = bench.submit(prompt, 9, mode=Mode.RECEIVE)
    bench.turn()
    assert bench.reserved[twin].held_pages == 4


def test_pages_of_a_delivered_prompt_that_is_gone_again_are_not_keyed():
    bench = Bench(num_pages=60)
    prompt = prompt_of(bench.random, 18)
    request_id = bench.submit(prompt, 9, mode=Mode.RECEIVE)
    bench.run()
    deliver(bench, request_id)
    bench.scheduler.requests.cancel(request_id)
    successor = bench.submit(prompt_of(bench.random, 18), 9, mode=Mode.RECEIVE)
    bench.run()
    assert set(bench.reserved[successor].pages) & set(bench.reserved[request_id].pages)
    assert bench.blocks.evictable == 0
    bench.scheduler.check_invariants()


def test_aborted_reservation_is_quarantined_until_release():
    bench = Bench()
    request_id = bench.submit([5] * 18, 8, mode=Mode.RECEIVE)
    bench.run()
    bench.scheduler.requests.cancel(request_id)
    assert bench.scheduler.batch.slots.num_used == 0
    assert bench.blocks.available == bench.blocks.total - 5
    bench.scheduler.requests.deliver(request_id, [TokenRecord(9)])
    bench.run()
    assert not bench.outputs
    bench.scheduler.requests.release(request_id)
    bench.check_baseline()


@pytest.mark.parametrize("lacks_memory", [False, True])
@pytest.mark.parametrize(
    ("host_slots", "seed", "widths"),
    [
        *drawn(((0, seed, None) for seed in range(30)), 4),
        *drawn(((slots, seed, None) for seed in range(100) for slots in (12, 60)), 4),
        *drawn(((slots, seed, Switching) for seed in range(40) for slots in (0, 12, 60)), 4),
    ],
)
def test_random_operations_keep_every_promise(seed, lacks_memory, host_slots, widths):
    """With a host tier copies end late, out of step or not at all, and some fail. With widths each
    row of a step yields as many tokens as its drafts are right."""
    rng = random.Random(seed)
    bench = Bench(
        num_pages=rng.choice([12, 20, 40]),
        page_size=rng.choice([1, 4, 16]),
        slots=rng.choice([2, 6]),
        step_tokens=rng.choice([16, 64]),
        seed=seed,
        policy=rng.choice(sorted(POLICIES)),
        eviction=rng.choice(sorted(EVICTION_POLICIES)),
        prefix_cache=rng.random() < 0.8,
        watermark=rng.choice([0.05, 0.5, 0.9, 1.0]),
        mixed=rng.choice([8, 16]),
        host_slots=host_slots,
        lane_random=random.Random(seed),
        widths=widths() if widths else None,
    )
    play(bench, rng, lacks_memory=lacks_memory)


@pytest.mark.parametrize("lacks_memory", [False, True])
@pytest.mark.parametrize(
    ("host_slots", "seed", "widths"),
    [
        *drawn(((0, seed, None) for seed in range(150)), 3),
        *drawn(((slots, seed, None) for seed in range(60) for slots in (12, 60)), 2),
        *drawn(((slots, seed, Switching) for seed in range(40) for slots in (0, 12, 60)), 3),
    ],
)
def test_random_operations_over_three_groups(seed, lacks_memory, host_slots, widths):
    """Steps run when the next one is launched, and a page that is free holds nothing."""
    rng = random.Random(seed)
    size, slots, step_tokens = rng.choice([1, 4, 16]), rng.choice([2, 6]), rng.choice([16, 64])
    chunks, windows = 2 * -(-step_tokens // size), []
    for window in rng.sample([1, 2, 5, 16, 17, 24, 33], 2):
        each = Window(window).most_pages(size)
        windows.append((window, 1 + chunks + each * rng.randrange(1, slots + 1)))
    bench = Bench(
        num_pages=rng.choice([20, 40, 80]) * 16 // size // rng.choice([2, 4]),
        page_size=size,
        slots=slots,
        step_tokens=step_tokens,
        seed=seed,
        eviction=rng.choice(sorted(EVICTION_POLICIES)),
        prefix_cache=rng.random() < 0.8,
        mixed=rng.choice([16, 32]),
        windows=windows,
        host_slots=host_slots,
        lane_random=random.Random(seed),
        widths=widths() if widths else None,
    )
    play(bench, rng, lacks_memory=lacks_memory)


@pytest.mark.parametrize("lacks_memory", [False, True])
@pytest.mark.parametrize(
    ("host_slots", "seed"),
    [
        *drawn(((0, seed) for seed in range(150)), 3),
        *drawn(((slots, seed) for seed in range(60) for slots in (12, 60)), 2),
    ],
)
def test_random_operations_with_states(seed, lacks_memory, host_slots, monkeypatch):
    """A token is that of the state which its row has read. Now and then a cached one is spoilt:
    what goes on from it is computed again."""
    rng = random.Random(seed)
    size, slots, step_tokens = rng.choice([1, 4, 16]), rng.choice([2, 6]), rng.choice([32, 64])
    monkeypatch.setattr(state, "DECODED_TOKENS", 16)
    windows = [(17, 1 + slots * Window(17).most_pages(size) + 2 * -(-step_tokens // size))]
    bench = Bench(
        num_pages=rng.choice([20, 40, 80]) * 16 // size // rng.choice([2, 4]),
        page_size=size,
        slots=slots,
        step_tokens=step_tokens,
        seed=seed,
        eviction=rng.choice(sorted(EVICTION_POLICIES)),
        prefix_cache=rng.random() < 0.8,
        mixed=rng.choice([16, 32]),
        windows=rng.choice([[], windows]),
        states=rng.choice([4, 1 + slots, 3 * slots]),
        host_slots=host_slots,
        lane_random=random.Random(seed),
    )
    play(bench, rng, lacks_memory=lacks_memory)
    assert FailureReason.NUMERICAL not in bench.failed.values()


def spoil_a_state(bench, rng):
    """One that only the cache holds is said to be of more tokens than it is of."""
    blocks = bench.scheduler.others.groups[-1].blocks
    idle = [page for page in blocks._by_key.values() if not blocks._refcount[page]]
    if idle:
        bench.device.states[rng.choice(idle), 0] += 1


def play(bench, rng, *, lacks_memory, modes=(Mode.WHOLE, Mode.WHOLE, Mode.PREFILL, Mode.RECEIVE)):
    cancelled, delivered = bench.cancelled, set()
    for _ in range(150):
        action = rng.random()
        if action < 0.25:
            length = rng.randrange(1, 40)
            bench.submit(
                prompt_of(rng, length, shared=rng.choice([0, length // 2])),
                rng.randrange(1, 20),
                mode=rng.choice(modes),
                choices=rng.choice([1, 1, 2]),
                stop=rng.sample(range(VOCAB), 40),
                takeover_tokens=rng.choice([0, 8, 40]),
            )
        elif action < 0.35 and bench.requests:
            victim = rng.choice(list(bench.requests))
            bench.scheduler.requests.cancel(victim)
            cancelled.add(victim)
        elif action < 0.5:
            settle_transfers(bench, rng, cancelled, delivered)
        elif action < 0.6 and lacks_memory:
            bench.device.fail_next = torch.OutOfMemoryError()
        elif action < 0.65 and len(bench.device.states):
            spoil_a_state(bench, rng)
        bench.turn()
    for _ in range(300):
        settle_transfers(bench, rng, cancelled, delivered, everything=True)
        bench.turn()
    bench.run()
    bench.check_baseline()
    for request_id, request in bench.requests.items():
        whole = request.mode is Mode.WHOLE or request_id in bench.taken_over
        if whole and request_id not in cancelled | bench.failed.keys():
            bench.check_output(request_id)
        if request_id in delivered - cancelled - bench.failed.keys():
            want = expected_output(
                request.prompt_ids.tolist(), request.stop.max_tokens, request.stop.token_ids | {3}
            )
            for choice in range(request.choices):
                assert bench.outputs.get((request_id, choice), []) == want[1:]


def settle_transfers(bench, rng, cancelled, delivered, everything=False):
    """Plays the transfer thread: delivers or frees what waits for it."""
    for request_id in list(bench.reserved):
        if everything or rng.random() < 0.5:
            if request_id in cancelled:
                bench.scheduler.requests.release(request_id)
            elif request_id not in delivered:
                deliver(bench, request_id)
                delivered.add(request_id)
    for request_id in bench.requests:
        over = request_id in bench.prefilled or request_id in cancelled
        if over and (everything or rng.random() < 0.5):
            bench.scheduler.requests.release(request_id)
