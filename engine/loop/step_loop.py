"""The step loop repeats `receive -> admit -> plan -> launch -> settle(previous)`.

One step is always in flight while the host settles the one before it. The next is launched shortly
before the one in flight ends (`engine.loop.pacing`); through several stages as soon as it is known
(`engine.step.lanes`). The loop waits for its queue alone, but for a short sleep that lets other
threads run. Others post commands there, and a step that has ended posts its end. Requests that
arrive while the loop waits get slots and pages at once. Between a launch and the end of a decode
step before it, commands are kept, so that tokens do not wait for them; but a prompt that arrives
may still join the step that was launched (`engine.loop.late`). Only the loop touches the
scheduler. Others use `post` and read `load`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.adapters.types import Adapter
from engine.bounds import PromptLimits
from engine.loop.late import LateJoins
from engine.loop.load import load_of
from engine.loop.pacing import LaunchPacer, Pacer, Unpaced
from engine.loop.profiling import StepProfiler
from engine.loop.rates import StepRates
from engine.loop.sinks import hand_out
from engine.loop.slow_steps import SlowSteps
from engine.masks.matchers import MaskFiller, TokenMatcher
from engine.pages.prefix import prompt_keys
from engine.schedule.scheduler import Scheduler
from engine.step.executor import Executor, LateRows, Launched, NoLateRows
from engine.step.plan import StepPlan
from engine.types import EngineLoad, Prefilled, Request, Sink
from faults import failpoints

log = logging.getLogger("baton.engine")

Command = Callable[[Scheduler], None]
OnStep = Callable[[float, int], None]
"""Called for a settled step on the loop's thread, with its seconds and the sequences it decoded."""
OnLost = Callable[[], None]
"""Called on the loop's thread when no step will run any more: the device or the loop failed."""
IDLE_TURN_S = 0.25
"""Longest wait of an idle turn for a command, seconds. Progress is shown at least this often."""
LONG_STEP_S = 1.0
"""A step that is expected to take longer than this many seconds is announced."""
YIELD_S = 1e-4
"""Sleep that gives other threads the interpreter, seconds. They would wait as long for it
otherwise. On a busy CPU of two cores the transfer thread handled a prompt's end 0.3 ms after the
event, and 0.6 ms without this sleep."""
HOLD_S = 5e-3
"""Commands wait for the end of a step at most so long, seconds. A launch comes less than that
before the end. A step that hangs keeps no command for longer."""
PROFILE_END_S = 10.0
"""Announced duration of the end of a profile, seconds. The loop's thread gathers its events."""
STOP_S = 60.0
"""Longest wait for the step in flight at the end, seconds."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A step that was launched."""

    plan: StepPlan
    at_s: float
    """Time of the launch, by `time.monotonic`."""
    launched: Launched = field(init=False)
    """Set by the launch, and taken away when it is settled: it refers to the flight, and else only
    a collection of garbage would free the step."""
    launched_s: float = 0.0
    """Time at which the launch was done."""
    ended_s: float = 0.0
    """Time at which the device had finished it. The loop may hear of it later, since it launches
    another step meanwhile."""
    ended: bool = False
    """Whether the loop knows that the device has finished it."""


class StepLoop:
    """Owns the scheduler and the executor, on a thread of its own."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        profiler: StepProfiler | None = None,
        late: LateRows | None = None,
    ) -> None:
        """`late`: the executor's; None: rows join only steps that are not launched."""
        self.profiler = profiler or StepProfiler()
        self.load = EngineLoad(
            max_sequences=scheduler.config.max_sequences,
            tiers=scheduler.tiers.load(),
            hook_failures={} if scheduler.hooks else None,
            speculation=scheduler.drafts.load() if scheduler.drafts else None,
            adapters=scheduler.batch.adapters.load() if scheduler.config.max_adapters else None,
        )
        self.max_step_tokens = scheduler.config.max_step_tokens
        self._scheduler = scheduler
        self._executor = executor
        self._late = LateJoins(scheduler, late or NoLateRows())
        # Not a SimpleQueue: its timed `get` never ends if the time is up before it begins to wait.
        self._commands: queue.Queue[Command | _Flight] = queue.Queue()
        self._flights: deque[_Flight] = deque()
        """Steps launched and not settled, oldest first: at most `Lanes.flights`."""
        self._held: deque[Command] = deque()
        """Commands that came when a step was about to end. They run when its tokens are out."""
        self._stopping = False
        self._on_step: OnStep = _unobserved
        self._on_lost: OnLost = _unanswered
        self._thread = threading.Thread(target=self._run, name="baton-step-loop", daemon=True)
        self._filler = MaskFiller()
        self._rates = StepRates()
        self._pacer: Pacer = LaunchPacer() if scheduler.lanes.mixes else Unpaced()
        self._slow = SlowSteps(self.profiler.verb)
        self._progress = 0
        scheduler.tiers.wakes(lambda: self.post(_nothing))

    def start(self, on_step: OnStep | None = None, on_lost: OnLost | None = None) -> None:
        """Starts the thread."""
        self._on_step = on_step or _unobserved
        self._on_lost = on_lost or _unanswered
        self._publish_load()
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the step in flight. Remaining requests are dropped. A step that hangs
        is abandoned after STOP_S."""
        self._stopping = True
        self.post(lambda _: None)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.error("the step in flight has not ended within %d s: it is left behind", STOP_S)
        else:
            self._executor.shutdown()
        self._scheduler.tiers.stop()

    def submit(
        self,
        request: Request,
        sink: Sink,
        matchers: Future[list[TokenMatcher]] | None = None,
        adapter: Future[Adapter] | None = None,
    ) -> None:
        """Accepts a request. The prompt's keys are made here, on the caller's thread, so that no
        step waits for them. Those of 8,000 tokens take some 0.4 ms.

        Args:
            request: the request.
            sink: receives its events.
            matchers: for a request whose tokens are restricted, which waits for them.
            adapter: the content of its adapter, which is held for it; it waits for that, too.
        """
        keys = prompt_keys(self._scheduler.config, request, request.prompt_ids)
        rest = keys, matchers, adapter
        self.post(lambda scheduler: scheduler.requests.submit(request, sink, *rest))

        def look(_: object) -> None:
            self.post(lambda scheduler: scheduler.requests.end_if_unprepared(request.id))

        if matchers is not None:
            matchers.add_done_callback(look)
        if adapter is not None and (not adapter.done() or adapter.exception() is not None):
            adapter.add_done_callback(look)

    def lose(self) -> None:
        """No step will run any more: the owner is notified, on the loop's thread."""
        self.post(lambda _: self._on_lost())

    def post(self, command: Command) -> None:
        """Runs `command` on the loop's thread before the next plan. The row of a `Delivery` joins
        the step that is launched, if it still can."""
        self._commands.put(command)

    def limit_prompts(self, limits: PromptLimits) -> None:
        """See `Engine.limit_prompts`."""
        config, planner = self._scheduler.config, self._scheduler.planner
        kept = limits.at_least(config.chunk_tokens)
        self.max_step_tokens = min(config.max_step_tokens, kept.alone_tokens)
        self.post(lambda _: planner.limit(kept))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            log.exception("the step loop failed: no step will run any more")
            self._on_lost()
            self._refuse_all()
        for flight in self._flights:
            flight.launched.exception()  # It may hang; `stop` waits only so long.

    def _refuse_all(self) -> None:
        """Fails the requests that are here, and those that still come."""
        while not self._stopping:
            self._scheduler.requests.abandon()
            self._flush()
            for command in self._pending(None):
                if not isinstance(command, _Flight):
                    with contextlib.suppress(Exception):
                        command(self._scheduler)

    def _turn(self) -> None:
        verb = self._slow.verb
        with verb("receive"):
            self._receive_until_due()
        failpoints.hit("engine.turn")
        with verb("admit"):
            self._scheduler.admission.admit()
        with verb("plan"):
            plan = self._scheduler.planner.plan()
            self._flush()
        if plan is not None:
            with verb("launch"):
                self._launch(plan)
        with verb("settle"):
            self._settle_previous(launched=plan is not None)
        if plan is not None and plan.masked.size:
            with verb("mask"):
                self._sample(plan)
        if not self._flights:
            self._progress += 1
            self._scheduler.blocks.inspect()
            self._scheduler.others.inspect()
        if self.profiler.is_over():
            self._progress += 1
            self._publish_load(PROFILE_END_S)
            self.profiler.end()
        self._publish_load()

    # -- waiting --------------------------------------------------------------------------------

    def _receive_until_due(self) -> None:
        """Receives commands until the next step should be prepared."""
        if not self._flights:
            self._receive(self._scheduler.tiers.wait_s(IDLE_TURN_S))
            return
        flight = self._flights[0]
        if flight.plan.only_decodes:
            self._receive_beside(flight, until_due=True)
        self._receive(0.0)

    def _settle_previous(self, *, launched: bool) -> None:
        """Settles the oldest step, and waits for its end if no further one can be in flight. If
        nothing could be launched behind it and a command comes, there may be work now."""
        is_full = len(self._flights) >= self._scheduler.lanes.flights
        flight = self._flights[0] if self._flights else None
        if flight is not None and (is_full or not launched or flight.ended):
            if launched and self._pacer.holds(flight.plan):
                self._hold_until_end(flight)
            self._receive_beside(flight, until_due=False, until_work=not launched)
            if flight.ended:
                self._flights.popleft()
                self._settle(flight)
                self._late.begun()
        self._scheduler.requests.publish_delivered()

    def _hold_until_end(self, flight: _Flight) -> None:
        """Defers commands, for HOLD_S at most, while a decode step is about to end, so that its
        tokens leave first."""
        until_s = time.monotonic() + HOLD_S
        while not (flight.ended or self._stopping) and (left_s := until_s - time.monotonic()) > 0:
            try:
                command = self._commands.get(timeout=left_s)
            except queue.Empty:
                return
            if isinstance(command, _Flight):
                command.ended = True
            elif self._held or not self._offers(command):
                self._held.append(command)

    def _offers(self, command: Command) -> bool:
        """Whether a command has run, and may have added its row to the step launched last."""
        try:
            return self._late.offers(command, self._flights[-1].plan)
        except Exception:
            log.exception("a command failed")
            return True

    def _receive_beside(
        self, flight: _Flight, *, until_due: bool, until_work: bool = False
    ) -> None:
        """Receives commands while a step is in flight, until it has ended.

        Args:
            flight: the oldest step in flight.
            until_due: return when the next step should be prepared.
            until_work: the same, but only after a command came.
        """
        while not (flight.ended or self._stopping):
            wait_s = self._due_s(flight) if until_due else None
            if wait_s == 0.0:
                return
            until_due |= self._receive(wait_s) and until_work

    def _due_s(self, flight: _Flight) -> float:
        """Seconds until the step after this one should be prepared."""
        began, prompts_s = self._rates.began(flight.at_s), self._rates.usual_s(flight.plan)
        return self._pacer.wait_s(flight.plan, began, prompts_s)

    def _receive(self, wait_s: float | None) -> bool:
        """Runs the commands that are there or come within `wait_s` (None: without a limit), and
        admits their requests. Returns whether there was a command. After a wake from the tiers it
        admits only where no turn follows at once, which does so, too."""
        received, woken, turns = False, False, wait_s == 0.0
        for command in self._pending(wait_s):
            if isinstance(command, _Flight):
                command.ended = turns = True
                continue
            if command is _nothing:
                woken = True
                continue
            received = True
            try:
                with self._slow.verb("commands"):
                    command(self._scheduler)
            except Exception:
                log.exception("a command failed")
        if received or (woken and not turns):
            with self._slow.verb("commands"):
                self._scheduler.admission.admit()
        if received:
            self._publish_load()
        self._flush()
        return received or woken

    def _pending(self, wait_s: float | None) -> Iterator[Command | _Flight]:
        if self._held:
            wait_s = 0.0
        while self._held:
            yield self._held.popleft()
        try:
            if wait_s != 0.0:
                yield self._commands.get(timeout=wait_s)
            while True:
                yield self._commands.get_nowait()
        except queue.Empty:
            return

    # -- steps ----------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> None:
        flight = _Flight(plan, time.monotonic())
        self._flights.append(flight)
        self._progress += 1
        if not plan.only_decodes:  # It may be long, and be launched for long.
            self._publish_load()
        self.profiler.launching()
        self._late.expect()
        flight.launched = self._executor.launch(plan)
        flight.launched_s = time.monotonic()
        flight.launched.add_done_callback(lambda _: self._end(flight))

    def _end(self, flight: _Flight) -> None:
        """The device has finished a step. Runs on the executor's thread."""
        flight.ended_s = time.monotonic()
        self._commands.put(flight)

    def _sample(self, plan: StepPlan) -> None:
        """Fills the masks of the step launched last, whose draw waits for them."""
        bits = self._executor.mask_bits
        self._executor.sample(self._scheduler.masking.fill(plan, self._filler, bits))
        self._flush()

    def _settle(self, flight: _Flight) -> None:
        plan = flight.plan
        self._progress += 1
        late = self._late.settle(plan, self._step_ns(flight))
        launched = flight.launched
        del flight.launched
        try:
            result = launched.result()
        except Exception as error:
            log.exception("step %d failed", plan.number)
            self._scheduler.recovery.recover(plan, error)
            if self._scheduler.recovery.is_lost(error):
                self._on_lost()
            self._flush()
        else:
            tokens = None if result.counts is None else int(result.counts.sum())
            self._rates.settled(plan, flight.at_s, flight.ended_s, tokens)
            self._scheduler.tiers.note_rate(self._rates.prefill.tokens_per_s)
            self._pacer.settled(plan, self._rates.step_s, self._idle_s(flight))
            self._scheduler.planner.settled(plan, result, self._rates.step_s)
            with self._slow.verb("tokens"):
                times = self._step_ns(flight)
                self._scheduler.settler.settle(plan, result, self._hand_over, times)
            self._slow.settled(self._scheduler, plan, self._rates.step_s)
            self._on_step(self._rates.step_s, plan.num_decodes + late)

    def _step_ns(self, flight: _Flight) -> tuple[int, int]:
        """When the last settled step was launched, and when it began, Unix nanoseconds."""
        now_s, now_ns = time.monotonic(), time.time_ns()
        began_s = max(flight.launched_s, flight.ended_s - self._rates.step_s)
        since_s = now_s - flight.launched_s, now_s - began_s
        return now_ns - int(1e9 * since_s[0]), now_ns - int(1e9 * since_s[1])

    def _idle_s(self, flight: _Flight) -> float:
        """How long the device waited behind a step for the one that was launched next, seconds. One
        with prompts may have no graph: then the device computes while the host launches it, for
        longer than a decode step takes, and nothing is learnt from that."""
        if not self._flights or not self._flights[0].plan.only_decodes:
            return 0.0
        return self._flights[0].launched_s - flight.ended_s

    def _hand_over(self) -> None:
        """Sends the queued events. After the last chunk of a prompt this thread sleeps for a
        moment, so that the sender gets the interpreter. The client waits for that chunk. The device
        has its next step already, or nothing waits for this loop."""
        events = self._scheduler.requests.take_events()
        hand_out(events)
        if any(isinstance(event, Prefilled) for _, event in events):
            time.sleep(YIELD_S)

    def _flush(self) -> None:
        hand_out(self._scheduler.requests.take_events())

    def _publish_load(self, profile_s: float = 0.0) -> None:
        plans = [flight.plan for flight in self._flights]
        long_step_s = profile_s + self._rates.expected_s(plans)
        self.load = load_of(
            self._scheduler,
            self._rates,
            plans,
            progress=self._progress,
            long_step_ms=1e3 * long_step_s if long_step_s > LONG_STEP_S else 0.0,
        )


def _nothing(_scheduler: Scheduler) -> None:
    """A command that only wakes the loop."""


def _unanswered() -> None:
    """Default for `on_lost`: does nothing."""


def _unobserved(_seconds: float, _decoded_sequences: int) -> None:
    """Default for `on_step`: does nothing."""
