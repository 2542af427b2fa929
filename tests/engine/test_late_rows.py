"""A row that joins a step which is launched already draws the tokens that it would have drawn."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from engine_kit import GREEDY, Run, build, check_baseline, finish, hand_off, submit
from paths_kit import prompt_of
from waiting import wait_until

from engine.eager.late import LateStep
from engine.engine import Engine
from engine.loop import step_loop
from engine.step.plan import StepPlan
from engine.types import SamplingParams, TokenRecord

DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=7)
PENALISED = SamplingParams(
    temperature=1.0, seed=23, top_logprobs=2, frequency_penalty=0.4, repetition_penalty=1.2
)
TOKENS = 12
LATE = {"num_pages": 60, "max_sequences": 8, "late_rows": True}


class Decoding:
    """An engine that decodes. What is delivered comes when a step is launched and
    waits for the one before it."""

    def __init__(self, path, **options) -> None:
        self.engine = build(path, **LATE | options)
        self._loop = self.engine._loop
        self._go = threading.Event()
        self._go.set()
        steps = self._loop._executor.steps
        self._prepare, steps.prepare = steps.prepare, self._wait
        self._deliver, self.engine.deliver = self.engine.deliver, self.deliver
        self._stands = -1
        self.late = 0
        """Rows that came late."""
        draw = self._loop._late._rows.draw
        self._loop._late._rows.draw = lambda plan: (self._count(), draw(plan))[1]
        self.beside: list[Run] = []

    def _count(self) -> None:
        self.late += 1

    def _wait(self, plan: StepPlan) -> StepPlan:
        if not self._go.is_set():
            self._stands = plan.number
            assert self._go.wait(60)
            self._stands = -1
        return self._prepare(plan)

    def deliver(
        self, request_id: bytes, records: Sequence[TokenRecord], drafted_from: int | None = None
    ) -> None:
        """A request of its own decodes beside it."""
        self.beside.append(submit(self.engine, prompt_of(9, 1), 60, ignore_eos=True))
        wait_until(lambda: len(self.beside[-1].records[0]) > 3, poll_s=0.001)
        self._go.clear()
        try:
            wait_until(self._is_launched)
            self._deliver(request_id, records, drafted_from)
            late, known = self._loop._late, self._loop._scheduler.requests.by_id
            wait_until(lambda: late._offered or self._loop._held or request_id not in known)
            self.while_waiting(request_id)
        finally:
            self._go.set()

    def _is_launched(self) -> bool:
        """Whether a step waits for the one that the device is in."""
        flights = list(self._loop._flights)
        return len(flights) == 2 and flights[0].plan.number == self._stands

    def while_waiting(self, request_id: bytes) -> None:
        """What happens before the step begins."""


@pytest.fixture(scope="module")
def prefill(tiny_path) -> Iterator[Engine]:
    engine = build(tiny_path)
    yield engine
    check_baseline(engine)
    engine.stop()


@pytest.fixture
def decoding(tiny_path, monkeypatch) -> Iterator[Decoding]:
    monkeypatch.setattr(step_loop, "HOLD_S", 60.0)
    one = Decoding(tiny_path)
    yield one
    finish(*one.beside)
    check_baseline(one.engine)
    one.engine.stop()


def solo(prefill: Engine, run: Run) -> list[list[TokenRecord]]:
    """What the request says where it is computed whole."""
    asked = run.request
    one = submit(
        prefill, asked.prompt_ids, asked.stop.max_tokens, sampling=asked.sampling,
        choices=asked.choices, ignore_eos=True,
    )  # fmt: skip
    finish(one)
    return one.records


def same(run: Run, wanted: list[list[TokenRecord]]) -> None:
    for got, each in zip(run.records, wanted, strict=True):
        assert [one.token_id for one in got] == [one.token_id for one in each]
        assert [one.top_ids for one in got[1:]] == [one.top_ids for one in each[1:]]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, PENALISED], ids=["greedy", "drawn", "all"])
@pytest.mark.parametrize("length", [1, 32, 45])
def test_late_rows_draw_what_early_ones_do(decoding, prefill, length, sampling) -> None:
    """Of 32 tokens: the next one needs another page."""
    how = {"sampling": sampling, "ignore_eos": True}
    runs = [hand_off(prefill, decoding.engine, prompt_of(length), TOKENS, **how) for _ in range(2)]
    assert decoding.late == 2, "the second one's prompt was cached"
    for run in runs:
        same(run, solo(prefill, run))


def test_the_rows_of_the_step_are_as_before(decoding, prefill) -> None:
    hand_off(prefill, decoding.engine, prompt_of(30), TOKENS, ignore_eos=True)
    assert decoding.late == 1
    (beside,) = decoding.beside
    finish(beside)
    same(beside, solo(prefill, beside))
    decoding.beside.clear()


@pytest.mark.parametrize(("choices", "tokens"), [(3, TOKENS), (1, 1)], ids=["choices", "one token"])
def test_what_is_no_single_row_waits_for_the_next_plan(decoding, prefill, choices, tokens) -> None:
    run = hand_off(
        prefill, decoding.engine, prompt_of(45), tokens, choices=choices, sampling=DRAWN,
        ignore_eos=True,
    )  # fmt: skip
    assert decoding.late == 0
    same(run, solo(prefill, run))


def test_two_tokens_end_with_the_late_one(decoding, prefill) -> None:
    run = hand_off(prefill, decoding.engine, prompt_of(45), 2, ignore_eos=True)
    assert decoding.late == 1
    same(run, solo(prefill, run))


def test_a_row_that_comes_too_late_is_in_the_next_step(decoding, prefill, monkeypatch) -> None:
    monkeypatch.setattr(LateStep, "offer", lambda self, row: None)
    run = hand_off(prefill, decoding.engine, prompt_of(45), TOKENS, sampling=DRAWN, ignore_eos=True)
    assert decoding.late == 0
    same(run, solo(prefill, run))


def test_a_row_cancelled_while_it_waits_leaves_nothing(decoding, prefill) -> None:
    def leave(request_id: bytes) -> None:
        decoding.engine.cancel(request_id)
        raise LookupError

    decoding.while_waiting = leave
    with pytest.raises(LookupError):
        hand_off(prefill, decoding.engine, prompt_of(45), TOKENS, ignore_eos=True)
    wait_until(lambda: decoding.late == 1)
    for request_id in list(prefill._loop._scheduler.requests.by_id):
        prefill.release(request_id)


def test_a_row_that_came_late_is_preempted_and_goes_on(tiny_path, prefill, monkeypatch) -> None:
    monkeypatch.setattr(step_loop, "HOLD_S", 60.0)
    decoding = Decoding(tiny_path, num_pages=11, max_context_tokens=160)
    beside = [submit(decoding.engine, prompt_of(9, 2), 60, ignore_eos=True)]
    run = hand_off(prefill, decoding.engine, prompt_of(45), 60, sampling=DRAWN, ignore_eos=True)
    finish(*decoding.beside, *beside)
    assert decoding.late == 1
    assert run.ends[0].preemptions > 0
    same(run, solo(prefill, run))
    check_baseline(decoding.engine)
    decoding.engine.stop()
