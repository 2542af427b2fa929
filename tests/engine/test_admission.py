"""Who gets pages, and when: prompts in their turn, and fewer of them above the watermark."""

import random

import numpy as np
import pytest
from adapters_kit import adapter
from engine_fakes import expected_output, next_token
from scheduler_bench import deliver
from test_scheduler_property import Bench, prompt_of

from engine.loop.load import load_of
from engine.loop.rates import StepRates
from engine.schedule.sequences import RequestState
from engine.types import Mode


def overcommitted(watermark: float) -> Bench:
    """Runs requests that would grow to nearly five times the pool."""
    bench = Bench(num_pages=129, slots=32, step_tokens=64, watermark=watermark, prefix_cache=False)
    rng = random.Random(0)
    lengths = [(rng.randrange(32, 64), rng.randrange(16, 32)) for _ in range(60)]
    ids = [bench.submit(prompt_of(rng, prompt), output) for prompt, output in lengths]
    bench.run()
    for request_id in ids:
        bench.check_output(request_id)
    bench.check_baseline()
    return bench


def test_preemptions_fall_with_the_watermark() -> None:
    counts = [
        overcommitted(watermark).scheduler.requests.preemptions for watermark in (1.0, 0.9, 0.5)
    ]
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.parametrize("watermark", [0.01, 0.5, 0.9, 1.0])
def test_a_request_of_the_whole_pool_is_admitted_at_last(watermark: float) -> None:
    bench = Bench(num_pages=33, slots=4, step_tokens=64, watermark=watermark)
    rng = random.Random(2)
    ids = [bench.submit(prompt_of(rng, 12), 40) for _ in range(8)]
    ids.append(bench.submit(prompt_of(rng, 100), 28))
    ids += [bench.submit(prompt_of(rng, 5), 6) for _ in range(8)]
    bench.run()
    for request_id in ids:
        bench.check_output(request_id)
    bench.check_baseline()


def test_the_reserve_rises_from_a_page_each_to_all_that_is_wanted() -> None:
    bench = Bench(num_pages=101, slots=6, step_tokens=256, watermark=0.5, prefix_cache=False)
    for _ in range(2):
        bench.submit([5] * 80, 80)
    bench.scheduler.admission.admit()
    assert bench.scheduler.batch.slots.num_used == 2
    assert sorted(bench.scheduler.batch.slots.growth().tolist()) == [0] * 4 + [20, 20]
    used = bench.blocks.total - bench.blocks.available
    assert used == 40
    reserves = [bench.scheduler.admission.growth_reserve(wanted) for wanted in (0, 10, 35, 60)]
    assert reserves == [2, 2, 20, 40]


def test_a_prompt_gets_its_pages_when_the_next_step_may_begin_it() -> None:
    bench = Bench(num_pages=200, step_tokens=16)
    for _ in range(4):
        bench.submit(prompt_of(bench.random, 16), 4)
    bench.submit([5] * 8, 4, mode=Mode.RECEIVE)
    bench.scheduler.admission.admit()
    assert bench.blocks.total - bench.blocks.available == 4 + 2, "one prompt, and what is received"
    assert len(bench.scheduler.requests.waiting) == 3
    bench.turn()
    assert len(bench.scheduler.requests.waiting) == 3, "the next one is for the next step"
    bench.turn()
    assert len(bench.scheduler.requests.waiting) == 2


def test_a_prompt_to_hand_off_keeps_nothing_back_for_output() -> None:
    bench = Bench(num_pages=40, step_tokens=64)
    bench.submit([5] * 16, 100, mode=Mode.PREFILL)
    bench.scheduler.admission.admit()
    assert bench.scheduler.batch.slots.num_used == 1
    assert not bench.scheduler.batch.slots.growth().any()


def test_choices_resumed_one_by_one_beside_a_prompt_to_hand_off() -> None:
    # Each resumed choice draws one token, though its request has two: the prompt's follow them.
    bench = Bench(num_pages=80, step_tokens=64)
    own = expected_output([9] * 6, 12, frozenset({3}))
    generated = tuple(np.array(own[:count], np.int32) for count in (2, 4))
    resumed = bench.submit([9] * 6, 12, choices=2, generated=generated)
    bench.turn()  # They wait as if preempted, and come first.
    sent = bench.submit([8] * 10, 8, mode=Mode.PREFILL)
    bench.run()
    assert [record.token_id for record in bench.prefilled[sent].records] == [next_token([8] * 10)]
    for choice, given in enumerate(generated):
        assert bench.outputs[resumed, choice] == own[len(given) :]


@pytest.mark.parametrize("watermark", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_what_the_load_report_leaves_free_is_granted(watermark: float, seed: int) -> None:
    """A router that believes it sends no prompt whose grant must wait. The first token of such a
    prompt would be out, and the second would come when some other sequence has ended."""
    rng = random.Random(seed)
    bench = Bench(num_pages=200, slots=20, watermark=watermark, context=1000)
    for _ in range(rng.randrange(1, 12)):
        deliver_to(bench, prompt_of(rng, rng.randrange(20, 60)), rng.randrange(2, 60))
    bench.turn()
    load = load_of(bench.scheduler, StepRates(), (), progress=0, long_step_ms=0.0)
    free = load.free_pages + load.evictable_pages - load.wanted_pages
    assert free > 0
    for pages, is_granted in ((free + 2, False), (free - 1, True)):
        # One more page is wanted for the next token.
        request_id = bench.submit(prompt_of(rng, 4 * pages), 4, mode=Mode.RECEIVE)
        bench.scheduler.admission.admit()
        state = bench.scheduler.requests.by_id[request_id].state
        assert (state is RequestState.RESERVED) is is_granted
        bench.scheduler.requests.cancel(request_id)


def deliver_to(bench: Bench, prompt: list[int], max_tokens: int) -> None:
    request_id = bench.submit(prompt, max_tokens, mode=Mode.RECEIVE)
    while request_id not in bench.reserved:
        bench.turn()
    deliver(bench, request_id)


def with_adapters(count: int) -> tuple[Bench, list[bytes]]:
    """Slots for so many adapters, and the digests of one more."""
    bench = Bench(num_pages=400, slots=8, step_tokens=64, max_adapters=count)
    contents = [adapter(number) for number in range(1, count + 2)]
    for number, content in enumerate(contents):
        bench.adapters.add(f"a{number}", content)
    return bench, [content.digest for content in contents]


@pytest.mark.parametrize("count", [1, 2])
def test_who_lacks_an_adapters_slot_holds_up_nobody_without_one(count: int) -> None:
    bench, (*busy, other) = with_adapters(count)
    long = [bench.submit(prompt_of(bench.random, 8), 200, adapter=each) for each in busy]
    waiting = [bench.submit(prompt_of(bench.random, 8), 4, adapter=other) for _ in range(3)]
    base = [bench.submit(prompt_of(bench.random, 8), 4) for _ in range(60)]
    while not all((request_id, 0) in bench.ends for request_id in base):
        assert bench.turn()
    assert not any((request_id, 0) in bench.ends for request_id in long + waiting)
    bench.run()
    for request_id in long + waiting + base:
        bench.check_output(request_id)
    bench.check_baseline()
    assert bench.adapters.held == 0


@pytest.mark.parametrize("count", [1, 2])
def test_who_waits_for_an_adapters_slot_gets_its_turn(count: int) -> None:
    """Requests that keep the slots busy, and such without an adapter, come in every turn."""
    bench, (*busy, other) = with_adapters(count)
    for each in busy:
        bench.submit(prompt_of(bench.random, 8), 30, adapter=each)
    bench.turn()
    waiting = bench.submit(prompt_of(bench.random, 8), 4, adapter=other)
    turns = 0
    while (waiting, 0) not in bench.ends:
        bench.submit(prompt_of(bench.random, 8), 30, adapter=busy[turns % count])
        bench.submit(prompt_of(bench.random, 8), 2)
        assert bench.turn()
        turns += 1
        assert turns < 400, "it starved"
    bench.run(20_000)
    for request_id in bench.requests:
        bench.check_output(request_id)
    bench.check_baseline()
