"""Random operations, while prompts come late: rows join steps that are launched, miss them, and go
while they wait. Every promise of the scheduler is kept."""

from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
import pytest
from engine_fakes import next_token
from scheduler_bench import Bench
from test_scheduler_property import play

from engine.loop.late import Delivery, LateJoins
from engine.schedule.sequences import RequestState
from engine.step.executor import LateRow, with_row
from engine.step.plan import StepPlan, StepResult
from engine.types import Mode


class DrawnLate:
    """`LateRows` of a device that takes a row, or not, as it is drawn."""

    def __init__(self, bench: Bench, rng: random.Random) -> None:
        self._device, self._rng = bench.device, rng
        self._run, bench.device._run = bench.device._run, self.run
        self._pages, self._room, self._number = 0, 0, -1
        self._row: LateRow | None = None
        self._taken: dict[int, LateRow] = {}
        self._drawn: dict[int, tuple[StepPlan, Future[StepResult]]] = {}
        self.taken = 0

    def launched(self, plan: StepPlan) -> None:
        self._room = self._pages if plan.only_decodes and self._rng.random() < 0.9 else 0
        self._row, self._number = None, plan.number

    def expect(self, pages: int) -> None:
        self._pages = pages

    def room(self) -> int:
        return self._room

    def offer(self, row: LateRow) -> None:
        assert self._row is None, "one at most"
        self._row = row

    def is_taken(self) -> bool:
        if self._row is None or self._rng.random() < 0.3:
            return False
        self._taken[self._number] = self._row
        self.taken += 1
        return True

    def draw(self, plan: StepPlan) -> Future[StepResult]:
        assert plan.number == self._number
        self._drawn[plan.number] = plan, Future()
        return self._drawn[plan.number][1]

    def run(self, plan: StepPlan) -> StepResult:
        """The device runs a step, and draws its late row, if it has one and the host wants it."""
        row = self._taken.pop(plan.number, None)
        result = self._run(plan if row is None else with_row(plan, row))
        if row is not None and plan.number in self._drawn:
            own, future = self._drawn.pop(plan.number)
            context = self._device.kv[row.pages].reshape(-1)[: row.position + 1]
            token = np.array([next_token(context.tolist())], np.int32)
            self._device.table[own.sample_slots] = token
            future.set_result(StepResult(token, np.ones(1, np.bool_), None, None, None))
        return result

    def failed(self, plan: StepPlan, error: Exception) -> None:
        self._taken.pop(plan.number, None)
        if plan.number in self._drawn:
            self._drawn.pop(plan.number)[1].set_exception(error)


class LateBench(Bench):
    """What is delivered comes behind the launch of a step."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.device.deferred = []
        self.late = DrawnLate(self, self.random)
        self.joins = LateJoins(self.scheduler, self.late)
        self._coming: list[Delivery] = []
        requests = self.scheduler.requests
        self._deliver, requests.deliver = requests.deliver, self._post

    def _post(self, request_id, records) -> None:
        self._coming.append(Delivery(request_id, records))

    def turn(self) -> bool:
        scheduler, requests = self.scheduler, self.scheduler.requests
        scheduler.admission.admit()
        self.joins.expect()
        plan = scheduler.planner.plan()
        launched = self.device.launch(plan) if plan else None
        requests.deliver = self._deliver
        if plan is not None:
            self.late.launched(plan)
            if self.previous:
                self._come(plan)
        if self.previous:
            self._end(*self.previous)
            self.joins.begun()
        for delivery in self._coming:
            delivery(scheduler)
        self._coming, requests.deliver = [], self._post
        requests.publish_delivered()
        self.previous = (plan, launched) if plan else None
        for sink, event in requests.take_events():
            sink([event])
        scheduler.check_invariants()
        return self.previous is not None

    def _come(self, plan: StepPlan) -> None:
        """While the step waits for the device, deliveries come, and some requests go."""
        before = self.scheduler.requests.by_id.copy()
        self._coming = [one for one in self._coming if not self.joins.offers(one, plan)]
        for request_id, active in before.items():
            came = active.state is RequestState.ACTIVE and active.request.mode.decodes
            if came and self.joins._offered and self.random.random() < 0.05:
                self.scheduler.requests.cancel(request_id)
                self.cancelled.add(request_id)

    def _end(self, before: StepPlan, result: Future[StepResult]) -> None:
        self.device.finish()
        if (error := result.exception()) is not None:
            self.late.failed(before, error)
            self.joins.settle(before, (0, 0))
            self.scheduler.recovery.recover(before, error)
            return
        self.joins.settle(before, (0, 0))
        self.scheduler.settler.settle(before, result.result())


@pytest.mark.parametrize("lacks_memory", [False, True])
@pytest.mark.parametrize(
    "seed", [*range(6), 63, *(pytest.param(n, marks=pytest.mark.slow) for n in range(64, 120))]
)
def test_random_operations_with_late_rows_keep_every_promise(seed, lacks_memory) -> None:
    rng = random.Random(seed)
    bench = LateBench(
        num_pages=rng.choice([20, 40]), page_size=rng.choice([4, 16]), slots=6, seed=seed,
        step_tokens=64, watermark=rng.choice([0.5, 1.0]), prefix_cache=rng.random() < 0.8,
    )  # fmt: skip
    play(bench, rng, lacks_memory=lacks_memory, modes=(Mode.WHOLE, Mode.RECEIVE, Mode.RECEIVE))
    assert bench.late.taken or seed > 63, "none came late"
