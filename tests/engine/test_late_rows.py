"""A row that joins a step which is launched already draws the tokens that it would have drawn."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from engine_kit import GREEDY, Run, build, check_baseline, finish, hand_off, running, submit
from paths_kit import prompt_of
from waiting import wait_until

from engine.beams.params import BeamParams
from engine.config import EngineConfig
from engine.eager.late import LateStep, TorchLateRows
from engine.engine import Engine
from engine.loop import step_loop
from engine.loop.late import Delivery, LateJoins, _may_be_late
from engine.loop.step_loop import StepLoop
from engine.parts.scheduling import late_rows_of
from engine.pool.pools import KvPools
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequences import ActiveRequest, RequestState, Sequence
from engine.step.executor import NoLateRows
from engine.step.plan import StepPlan
from engine.types import Mode, Request, SamplingParams, StopRules, TokenRecord

DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=7)
PENALISED = SamplingParams(
    temperature=1.0, seed=23, top_logprobs=2, frequency_penalty=0.4, repetition_penalty=1.2
)
TOKENS = 12
BOUNDS = {"max_sequences": 8, "max_step_tokens": 64, "max_context_tokens": 128, "page_size": 16}
LATE = {"num_pages": 60, "max_sequences": 8}


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
        self, request_id: bytes, records: Seq[TokenRecord], drafted_from: int | None = None
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
    with running(tiny_path) as engine:
        yield engine


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


def test_beams_wait_for_the_next_plan(decoding, prefill) -> None:
    how = {"beams": BeamParams(2), "ignore_eos": True}
    hand_off(prefill, decoding.engine, prompt_of(45), TOKENS, **how)
    assert decoding.late == 0


REQUEST = Request(b"a", np.ones(3, np.int32), GREEDY, StopRules(9), Mode.RECEIVE)


@pytest.mark.parametrize(
    ("change", "may"),
    [
        ({}, True),
        ({"matchers": Future()}, False),
        ({"adapter_slot": 0}, False),
        ({"state": RequestState.ACTIVE}, False),
        ({"request": replace(REQUEST, beams=BeamParams(2))}, False),
        ({"sequences": []}, False),
    ],
    ids=["plain", "grammar", "adapter", "delivered before", "beams", "gone"],
)
def test_which_requests_may_come_late(change, may) -> None:
    active = ActiveRequest(REQUEST, lambda _: None, 0, state=RequestState.RESERVED)
    active.sequences.append(Sequence(active, 0, REQUEST.prompt_ids))
    for name, value in change.items():
        setattr(active, name, value)
    assert _may_be_late(active) == may


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2}, {"pp": 2}, {"expert_group": "f?rank=0&ranks=2"}, {"hooks": ("quest",)},
        {"speculation": "suffix"}, {"speculation": "mtp"}, {"speculation": "mtp", "decodes": False},
        {"late_rows": False}, {"groups": 2},
    ],
    ids=str,
)  # fmt: skip
def test_which_engines_have_late_rows(options) -> None:
    """Others, and models with windows or states, join what is not launched, as before."""
    groups = options.get("groups", 1)
    config = {name: value for name, value in options.items() if name != "groups"}
    pools, own = cast("KvPools", range(groups)), TorchLateRows(lambda *_: Future())
    found = late_rows_of(EngineConfig(model="m", **BOUNDS | config), own, pools)
    assert isinstance(found, NoLateRows)
    assert found.room() == 0
    plain = late_rows_of(EngineConfig(model="m", **BOUNDS), own, cast("KvPools", range(1)))
    assert plain is own


def test_other_processors_store_in_another_order(monkeypatch) -> None:
    own, pools = TorchLateRows(lambda *_: Future()), cast("KvPools", range(1))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert isinstance(late_rows_of(EngineConfig(model="m", **BOUNDS), own, pools), NoLateRows)


@pytest.mark.parametrize(("masked", "runs"), [([], True), ([0], False)], ids=["none", "masked"])
def test_no_draw_overtakes_one_that_waits_for_masks(masked, runs) -> None:
    """The sampler counts tokens for penalties in the order of the plans. Not even the request is
    looked up."""
    requests = SimpleNamespace(by_id={})
    late = LateJoins(
        cast("Scheduler", SimpleNamespace(requests=requests)), TorchLateRows(lambda *_: Future())
    )
    asked: list[bytes] = []
    requests.by_id = SimpleNamespace(get=asked.append)
    plan = SimpleNamespace(only_decodes=True, masked=np.array(masked, np.int32))
    assert not late.offers(Delivery(b"a", ()), cast("StepPlan", plan))
    assert bool(asked) == runs


def test_a_delivery_that_fails_costs_no_other_request(caplog) -> None:
    def fail(command: object, plan: object) -> bool:
        raise OverflowError

    flight = SimpleNamespace(plan=None)
    loop = SimpleNamespace(_late=SimpleNamespace(offers=fail), _flights=[flight])
    assert StepLoop._offers(cast("StepLoop", loop), Delivery(b"a", ()))
    assert "a command failed" in caplog.text


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
