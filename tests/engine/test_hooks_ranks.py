"""Hooks of several ranks whose devices run steps by themselves. No GPU is needed.

Two ranks run the same steps, each on a thread. What they do together goes through `Meeting`, so a
rank that does something else, or leaves something out, fails the test.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from test_hooks_graphs import (
    NOTHING,
    PAGE,
    Choosing,
    Heard,
    fixture_of_pool,  # noqa: F401
    steps_of,
)

from engine.bounds import Bounds
from engine.cuda.hooks.hooked import Hooked
from engine.cuda.steps.shapes import Shapes
from engine.ranks.steps import decode, encode
from engine.step.hooks import HookError, Narrowed
from engine.step.plan import StepPlan
from engine.step.sampling import SamplePlan

CPU = torch.device("cpu")
PAGES = 4
"""Of each row: decode rows are at position 12."""


class Meeting:
    """What two ranks do together."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=10)
        self._told = [torch.zeros(0)] * 2
        self.sizes: list[torch.Size] = []
        """Of what rank 0 has told."""

    def gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self._told[rank] = x.clone()
        self._barrier.wait()
        out = torch.stack(self._told)  # Of equal shapes.
        self._barrier.wait()
        if not rank:
            self.sizes.append(x.shape)
        return out


class Rank:
    """One of two, with its own objects of hooks."""

    def __init__(self, rank: int, meeting: Meeting, pool, *hooks) -> None:
        self.rank, self._meeting, self._hooks = rank, meeting, hooks
        bounds = Bounds(max_sequences=8, max_step_tokens=256, max_context_tokens=256)
        self.hooked = Hooked(steps_of(pool, *hooks), ranks=self)
        self.shapes = Shapes(bounds, 2, narrows=self.hooked.graph_pages > 0)
        self.runs: list[tuple[bool, int]] = []
        """Of each step: whether it has a shape, and its narrowed rows."""

    def gather_on_all(self, x: torch.Tensor) -> torch.Tensor:
        return self._meeting.gather(self.rank, x)

    def run(self, plan: StepPlan) -> list[tuple[str, str]]:
        """A step; the failures that it tells."""
        shape, narrowed = self.hooked.begin(plan, self.shapes, PAGE)
        self.runs.append((shape is not None, 0 if narrowed is None else len(narrowed.rows)))
        tokens = plan.num_tokens if shape is None else shape.tokens
        self.gather_on_all(torch.zeros(tokens, 1))  # Sums of the forward pass.
        for hook in self._hooks:
            if getattr(hook, "wants", 0) and narrowed is not None:
                self.hooked.hooks.note_beyond(torch.tensor(hook.wants > PAGES))
        tell = self.hooked.end(narrowed)
        self.gather_on_all(torch.zeros(1, 1))  # The draw.
        return [(failure.name, failure.point) for failure in tell()]


class Narrowing(Choosing):
    """Narrows its rows to two pages, and fails at a point in some step."""

    capturable, graph_pages = True, 2

    def __init__(self, at: str = "", step: int = -1) -> None:
        super().__init__("narrows", capturable=True)
        self._at, self._step = at, step
        self.wants = 1

    def _is_at(self, step, at: str) -> bool:
        return (self._at, self._step) == (at, step.number)

    def rows_narrowed(self, step):
        if self._is_at(step, "raises"):
            raise ZeroDivisionError
        rows = np.flatnonzero(step.tags[: step.num_decodes])
        if self._is_at(step, "nothing") or not rows.size:
            return None
        return Narrowed(rows, np.full(len(rows), 3 if self._is_at(step, "more") else 2, np.int32))

    def step_began(self, step):
        self.wants = PAGES + 1 if self._is_at(step, "beyond") else 1
        if self._is_at(step, "step_began"):
            raise ZeroDivisionError


def plan_of(number: int, tags: list[list[int]], prompt: int = 0) -> StepPlan:
    """Two decode rows, and perhaps a prompt. Tags by hook and row."""
    lens = np.array([1, 1, prompt][: 3 if prompt else 2], np.int32)
    contexts = np.array([13, 13, prompt][: len(lens)], np.int32)
    columns = -(-max(13, prompt) // PAGE)
    table = np.zeros((len(lens), columns), np.int32)
    positions = [np.arange(end - new, end) for end, new in zip(contexts, lens, strict=True)]
    slots = np.arange(len(lens), dtype=np.int32)
    return StepPlan(
        number=number, token_ids=np.zeros(lens.sum(), np.int32),
        positions=np.concatenate(positions).astype(np.int32), row_slots=slots, query_lens=lens,
        context_lens=contexts, num_decodes=2, page_table=table,
        sample_tokens=(lens.cumsum() - 1).astype(np.int32), sample_slots=slots,
        sample_generations=slots, sample_indices=slots, sample=SamplePlan(len(lens)),
        copy_source=NOTHING, copy_target=NOTHING, write_slots=NOTHING, write_tokens=NOTHING,
        hook_tags=np.array([[*row, 0][: len(lens)] for row in tags], np.int32),
    )  # fmt: skip


def run_all(ranks: list[Rank], plans: list[StepPlan]) -> list[list[list[tuple[str, str]]]]:
    """Runs the steps on both ranks; failures by rank and step."""
    with ThreadPoolExecutor(2) as threads:
        told: list[list[list[tuple[str, str]]]] = [[], []]
        for plan in plans:
            shaped = ranks[0].hooked.shaped(plan, ranks[0].shapes, PAGE)
            seen = shaped, decode(encode(shaped))
            done = [threads.submit(rank.run, own) for rank, own in zip(ranks, seen, strict=True)]
            for failures, one in zip(told, done, strict=True):
                failures.append(one.result(30))
    return told


def both(pool, hooks) -> tuple[list[Rank], Meeting]:
    meeting = Meeting()
    return [Rank(rank, meeting, pool, *hooks(rank)) for rank in range(2)], meeting


@pytest.mark.parametrize("prompt", [0, 100])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("at", "point"),
    [
        ("raises", "rows_narrowed"),
        ("more", "rows_narrowed"),
        ("step_began", "step_began"),
        ("beyond", "pages_wanted"),
    ],
)
def test_a_hook_that_fails_on_one_rank_keeps_all_in_step(pool, at, point, failing, prompt):
    """With 100 tokens of prompts a step is padded to 128 where no row is narrowed, else to 192; and
    not at all where a row reads more pages than a graph allows."""
    ranks, meeting = both(pool, lambda rank: [Narrowing(at if rank == failing else "", 1)])
    plans = [plan_of(number, [[7, 0]], prompt) for number in range(3)]
    told = run_all(ranks, plans)
    elsewhere, here = [("narrows", "another rank")], [("narrows", point)]
    if (at, failing) == ("more", 0):  # Its own step runs without a shape, so more is no failure.
        assert told == [[[], [], []]] * 2
    else:
        assert told[failing] == [[], here, []]
        assert told[1 - failing] == [[], elsewhere, []]
    shaped = [[step[0] for step in rank.runs] for rank in ranks]
    assert shaped[0] == shaped[1] == [True, (at, failing) != ("more", 0), True]
    assert [step[1] for step in ranks[1 - failing].runs][::2] == [1, 1]
    tokens = [size[0] for size in meeting.sizes[::3]]
    wide, usual = (200, 136) if prompt else (2, 2)
    second = {("raises", 0): usual, ("more", 0): 2 + prompt}.get((at, failing), wide)
    assert tokens == [wide, second, wide]


def test_a_rank_may_narrow_fewer_rows_than_rank_0(pool):
    """It reads all pages in the same shape, and so do its rows that rank 0 does not narrow."""
    ranks, _ = both(pool, lambda rank: [Narrowing("nothing", rank)])
    assert run_all(ranks, [plan_of(number, [[7, 0]]) for number in range(2)]) == [[[], []]] * 2
    assert [rank.runs for rank in ranks] == [[(True, 0), (True, 1)], [(True, 0), (True, 0)]]


def test_steps_without_rows_of_hooks_do_nothing_more_together(pool):
    """Their hooks may fail all the same, which each rank logs."""
    ranks, meeting = both(pool, lambda rank: [Narrowing("step_began" if rank else "", 0)])
    told = run_all(ranks, [plan_of(0, [[0, 0]]), plan_of(1, [[0, 7]])])
    assert told == [[[], []], [[("narrows", "step_began")], []]]
    assert meeting.sizes == [(2, 1), (1, 1), (2, 1), (1, 1), (1, 1)]


def test_a_hook_that_fits_no_graph_takes_steps_out_of_them_on_all_ranks(pool):
    def hooks(rank: int):
        return [Heard("plain"), Narrowing()]

    ranks, meeting = both(pool, hooks)
    assert run_all(ranks, [plan_of(0, [[7, 0], [0, 0]]), plan_of(1, [[0, 0], [7, 7]])])[0] == [
        [], [],
    ]  # fmt: skip
    for rank in ranks:
        assert rank.runs == [(False, 0), (True, 2)]
    assert meeting.sizes[1] == (1, 2)  # A number for each hook.


def test_without_hooks_no_step_is_looked_at():
    shapes = Shapes(Bounds(max_sequences=8, max_step_tokens=256, max_context_tokens=256), 2)
    plan = plan_of(0, [])
    hooked = Hooked()
    assert hooked.shaped(plan, shapes, PAGE) is plan
    assert hooked.begin(plan, shapes, PAGE) == (shapes.of(plan), None)
    assert hooked.end(None) is None


def test_ranks_whose_graphs_differ_are_refused(pool):
    def hooks(rank: int):
        hook = Narrowing()
        hook.graph_pages = 2 * rank
        return [hook]

    ranks, _ = both(pool, hooks)
    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(rank.hooked.check_alike, CPU) for rank in ranks]
        for one in done:
            with pytest.raises(HookError, match="read 0, 2 pages in graphs"):
                one.result(30)
