"""What a step takes of the prompts that wait, and in which order its tokens are told."""

from __future__ import annotations

import random

import pytest
from test_scheduler_property import Bench, prompt_of

from engine.step.plan import StepPlan
from engine.types import NewTokens

PAGE, STEP, FULL = 4, 64, 32


def planned(bench: Bench) -> StepPlan | None:
    bench.scheduler.admission.admit()
    return bench.scheduler.planner.plan()


def chunks_of(lengths: list[int], **options) -> list[list[int]]:
    """New tokens of each prompt, step by step, until all prompts are computed."""
    bench = Bench(num_pages=400, slots=16, step_tokens=STEP, prefix_cache=False, **options)
    for length in lengths:
        bench.submit(prompt_of(random.Random(length), length), 1)
    steps = []
    while (plan := planned(bench)) is not None:
        steps.append(plan.query_lens[plan.num_decodes :].tolist())
        bench.scheduler.settler.settle(plan, bench.device.launch(plan).result())
    return steps


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        pytest.param([40, 40], [[40], [40]], id="a full step is left to its prompt"),
        pytest.param([32, 4], [[32], [4]], id="just full"),
        pytest.param([10, 10, 30], [[10, 10, 12], [18]], id="filled up, in whole pages"),
        pytest.param(
            [100, 40], [[64], [36], [40]], id="chunks of one prompt are as long as before"
        ),
        pytest.param([70, 50, 5], [[64], [6, 24], [26, 5]], id="a prompt's end has company"),
    ],
)
def test_no_prompt_joins_a_step_that_is_full(lengths, steps):
    assert chunks_of(lengths, full=FULL) == steps


def test_without_a_bound_of_their_own_prompts_share_all_of_a_step():
    assert chunks_of([40, 40]) == [[40, 24], [16]]


def test_the_youngest_sequence_is_told_of_first():
    bench = Bench(num_pages=400, slots=16, step_tokens=STEP, prefix_cache=False)
    told: list[NewTokens] = []
    sink = bench.sink

    def watched(events):
        told.extend(event for event in events if isinstance(event, NewTokens))
        sink(events)

    bench.sink = watched
    rng = random.Random(1)
    for _ in range(5):
        bench.submit(prompt_of(rng, 8), 20)
        bench.turn()
    for event in told:
        assert event.indices.tolist() == sorted(event.indices.tolist())
    assert any(len(set(event.indices.tolist())) > 2 for event in told)
    bench.run()
    for request_id in bench.requests:
        bench.check_output(request_id)
    bench.check_baseline()


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        pytest.param([100, 40], [[64], [36], [40]], id="not beside a long context"),
        pytest.param([70, 50], [[64], [6, 28], [22]], id="as much of it as there is room for"),
        pytest.param([30, 30], [[30, 30]], id="those that begin are no longer than a step"),
    ],
)
def test_contexts_of_a_step_fit_the_scratch_together(lengths, steps):
    """100 tokens: a chunk needs room for all that is before it, too."""
    assert chunks_of(lengths, gathers=True, context=101) == steps
    free = chunks_of(lengths, context=101)
    assert (free == steps) == (lengths == [30, 30]), "else the bound changes nothing"


def test_a_prompt_is_one_array_from_its_request_to_its_chunks() -> None:
    """No turn joins prompt and output anew, however many chunks or turns a prompt takes."""
    bench = Bench(num_pages=400, slots=16, step_tokens=STEP, context=400)
    request_id = bench.submit(prompt_of(random.Random(3), 5 * STEP), 1)
    assert planned(bench) is not None
    (task,) = bench.scheduler.batch.prefills
    assert task.remaining == 4 * STEP
    assert task.tokens is task.leader.tokens is bench.requests[request_id].prompt_ids
