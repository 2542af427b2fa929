"""RECEIVE requests whose prompt is computed here: which, and that they are WHOLE from then on."""

from __future__ import annotations

import random

import pytest
from engine_fakes import next_token
from test_scheduler_property import Bench, prompt_of

from engine.schedule.sequences import RequestState
from engine.schedule.slots import SlotState
from engine.types import Mode, TokenRecord

PAGE = 4
HELD = 24
"""Tokens of the first turn's prompt that the cache holds: whole pages."""


def with_a_first_turn(**options) -> tuple[Bench, list[int]]:
    """A bench whose prefix cache holds the prompt that is returned."""
    bench = Bench(**{"num_pages": 80, "step_tokens": 8, **options})
    prompt = prompt_of(random.Random(3), HELD)
    bench.submit(prompt, 1)
    bench.run()
    return bench, prompt


def receive(bench: Bench, prompt: list[int], allowed: int, output: int = 9, **more) -> bytes:
    return bench.submit(prompt, output, mode=Mode.RECEIVE, takeover_tokens=allowed, **more)


@pytest.mark.parametrize("choices", [1, 3])
def test_a_short_rest_is_computed_here(choices: int) -> None:
    bench, first = with_a_first_turn()
    request_id = receive(bench, [*first, 5, 6, 7], 3, choices=choices)
    bench.run()
    assert bench.taken_over[request_id].cached_tokens == HELD
    assert not bench.reserved
    bench.check_output(request_id)
    bench.check_baseline()


@pytest.mark.parametrize(("rest", "allowed"), [(3, 0), (3, 2), (HELD + 1, 100)])
def test_a_rest_that_is_longer_than_allowed_or_than_what_is_held_is_received(
    rest: int, allowed: int
) -> None:
    bench, first = with_a_first_turn()
    request_id = receive(bench, [*first, *range(10, 10 + rest)], allowed)
    bench.run()
    assert bench.reserved[request_id].held_pages == HELD // PAGE
    assert not bench.taken_over
    bench.scheduler.requests.cancel(request_id)
    bench.scheduler.requests.release(request_id)
    bench.check_baseline()


def test_what_is_not_held_is_received_whatever_is_allowed() -> None:
    bench = Bench(prefix_cache=False)
    first = receive(bench, [5] * 9, 100)
    second = with_a_first_turn()[0]
    scored = receive(second, prompt_of(random.Random(3), HELD), 100, prompt_logprobs=True)
    for one, request_id in ((bench, first), (second, scored)):
        one.run()
        assert one.reserved[request_id].held_pages == 0
        one.scheduler.requests.cancel(request_id)
        one.scheduler.requests.release(request_id)
        one.check_baseline()


def test_a_step_without_room_for_prompts_does_not_take_over() -> None:
    """Rather than wait for its turn behind other prompts it is received."""
    bench, first = with_a_first_turn()
    bench.submit(prompt_of(bench.random, 60), 2)
    bench.turn()
    request_id = receive(bench, [*first, 5], 8)
    bench.turn()
    assert request_id in bench.reserved
    bench.scheduler.requests.cancel(request_id)
    bench.scheduler.requests.release(request_id)
    bench.run()
    bench.check_baseline()


def test_a_delivery_for_what_was_taken_over_changes_nothing() -> None:
    bench, first = with_a_first_turn()
    prompt = [*first, 5, 6]
    request_id = receive(bench, prompt, 8)
    bench.turn()
    assert request_id in bench.taken_over
    bench.scheduler.requests.deliver(request_id, [TokenRecord(next_token(prompt))])
    bench.run()
    bench.check_output(request_id)
    bench.check_baseline()


def test_preempted_while_its_rest_is_computed() -> None:
    """As when older streams outgrow the pool between two chunks of the prompt: its pages go back,
    it is computed again when there is room, and nobody hears of a second take-over."""
    bench, first = with_a_first_turn(num_pages=36, step_tokens=8, slots=4, watermark=1.0)
    older = [bench.submit(prompt_of(random.Random(i), 8), 44) for i in range(2)]
    for _ in range(6):
        bench.turn()
    rest = prompt_of(random.Random(9), HELD - 2)
    request_id = receive(bench, [*first, *rest], HELD, 12)
    while request_id not in bench.taken_over:
        bench.turn()
    (active,) = [
        active
        for active in bench.scheduler.requests.by_id.values()
        if active.request.id == request_id
    ]
    assert active.state is RequestState.ACTIVE
    (sequence,) = active.sequences
    assert bench.scheduler.batch.slots.state[sequence.slot] == SlotState.PREFILLING
    bench.scheduler.requests.preempt(sequence)
    assert sequence in bench.scheduler.requests.preempted
    bench.scheduler.check_invariants()
    bench.run()
    assert sequence.preemptions >= 1
    for one in (request_id, *older):
        bench.check_output(one)
    bench.check_baseline()


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("turns", range(8))
def test_cancelled_at_any_turn(turns: int, choices: int) -> None:
    """Nothing waits for a release: nobody else was to write its pages."""
    bench, first = with_a_first_turn()
    rest = prompt_of(random.Random(9), HELD - 3)
    request_id = receive(bench, [*first, *rest], HELD, choices=choices)
    for _ in range(turns):
        bench.turn()
    bench.scheduler.requests.cancel(request_id)
    bench.run()
    bench.check_baseline()
