"""The step loop: `pace -> receive -> admit -> plan -> launch -> settle(previous)`, for ever.

One step is always in flight while the host settles the one before it, and the next is launched
shortly before that one ends (`engine.pacing`); until then who arrives is received and admitted.
Where there is none yet, who comes while a prompt is computed is launched behind it, not once it is
settled. The loop is the only one to touch the scheduler; others talk to it through `post`, and read
`load`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from engine.admission import admit
from engine.executor import Executor, Launched
from engine.load import load_of
from engine.pacing import LOOK_S, NEARLY, LaunchPacer, is_decode, look_s
from engine.planning import plan_step
from engine.prefix import prompt_keys
from engine.profiling import StepProfiler
from engine.rates import StepRates
from engine.recovery import is_lost, recover
from engine.scheduler import Scheduler
from engine.settling import settle_step
from engine.step import StepPlan
from engine.types import EngineLoad, Event, Prefilled, Request, Sink
from telemetry import failpoints

log = logging.getLogger("baton.engine")

Command = Callable[[Scheduler], None]
OnStep = Callable[[float, int], None]
"""Hears of a settled step, on the loop's thread: its seconds, and how many sequences it decoded."""
OnLost = Callable[[], None]
"""Called on the loop's thread when the device will run no further step."""
IDLE_TURN_S = 0.25
"""How long an idle turn waits for a command: progress is shown at least this often."""
LONG_STEP_S = 1.0
"""A step expected to take longer is announced."""
YIELD_S = 1e-4
"""As long as a thread waits for the interpreter where this one does not let go of it. On a busy CPU
of two cores the transfer thread took up a prompt's end 0.3 ms later than told, and 0.6 without."""
PROFILE_END_S = 10.0
"""Announced for the end of a profile: its events are gathered on the loop's thread."""
STOP_S = 60.0
"""How long the end waits for the step in flight."""


class StepLoop:
    """Owns the scheduler and the executor, on a thread of its own."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, profiler: StepProfiler | None = None
    ) -> None:
        self.profiler = profiler or StepProfiler()
        self.load = EngineLoad(max_sequences=scheduler.config.max_sequences)
        self.max_step_tokens = scheduler.config.max_step_tokens
        self._scheduler = scheduler
        self._executor = executor
        # No SimpleQueue: its timed `get` never ends where the time is up before it begins to wait.
        self._commands: queue.Queue[Command] = queue.Queue()
        self._stopping = False
        self._on_step: OnStep = _unobserved
        self._on_lost: OnLost = _unanswered
        self._thread = threading.Thread(target=self._run, name="baton-step-loop", daemon=True)
        self._rates = StepRates()
        self._pacer = LaunchPacer()
        self._progress = 0

    def start(self, on_step: OnStep | None = None, on_lost: OnLost | None = None) -> None:
        """Starts the thread."""
        self._on_step = on_step or _unobserved
        self._on_lost = on_lost or _unanswered
        self._publish_load()
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the step in flight; requests still inside are dropped. One that hangs
        is left to itself after STOP_S."""
        self._stopping = True
        self.post(lambda _: None)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.error("the step in flight has not ended within %d s: it is left behind", STOP_S)
        else:
            self._executor.shutdown()

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request on. Its prompt's keys are made here, on the caller's thread: those of
        8,000 tokens take some 0.4 ms, and no step is to wait for that."""
        keys = prompt_keys(self._scheduler.config, request, request.prompt_ids)
        self.post(lambda scheduler: scheduler.submit(request, sink, keys))

    def post(self, command: Command) -> None:
        """Runs `command` on the loop's thread before the next plan."""
        self._commands.put(command)

    def _run(self) -> None:
        previous: tuple[StepPlan, Launched] | None = None
        idle, verb = False, self.profiler.verb
        while not self._stopping:
            if previous is not None:
                self._pace(*previous)
            self._pacer.woke()
            with verb("receive"):
                self._receive(IDLE_TURN_S if idle else 0.0)
            failpoints.hit("engine.turn")
            with verb("admit"):
                admit(self._scheduler)
            with verb("plan"):
                plan = plan_step(self._scheduler)
                self._flush()
            with verb("launch"):
                launched = self._launch(plan) if plan is not None else None
            with verb("settle"):
                if previous is not None and (launched or not self._interrupted(*previous)):
                    self._settle(*previous)
                    previous = None
                self._scheduler.publish_delivered()
            # A command that came in the middle of a step is no sign that the step will ever end.
            self._progress += previous is None
            if plan is not None and launched is not None:
                previous = plan, launched
            idle = previous is None
            if idle:
                self._scheduler.blocks.inspect()
            if self.profiler.is_over():
                self._progress += 1
                self._publish_load(PROFILE_END_S)
                self.profiler.end()
            self._publish_load()

    def _pace(self, in_flight: StepPlan, launched: Launched) -> None:
        """Lets the step in flight come close to its end: who arrives until then joins the next, and
        gets pages at once: to find those of 8,000 tokens may take a millisecond, for which the next
        launch would be late, and the tokens of the step in flight with it."""
        began = self._rates.began(in_flight)
        while wait_s := self._pacer.wait_s(in_flight, began):
            if self._receive(min(wait_s, LOOK_S)):
                with self.profiler.verb("admit"):
                    admit(self._scheduler)
                    self._flush()
            if launched.done():
                self._pacer.overslept()
                return

    def _interrupted(self, in_flight: StepPlan, launched: Launched) -> bool:
        """Nothing can be launched behind the step in flight: waits until it is done, or until it
        nearly is and commands were received, which may have brought what can."""
        received = False
        while not is_decode(in_flight) and (expected_s := self._rates.usual_s(in_flight)):
            if launched.done():
                break
            ran_s = time.monotonic() - self._rates.began(in_flight)
            if received and ran_s >= NEARLY * expected_s:
                return True
            received |= self._receive(look_s(ran_s, expected_s))
        return False

    def _receive(self, wait_s: float) -> bool:
        """Runs the commands that are there or come until then; whether one was."""
        received = False
        for command in self._pending(wait_s):
            received = True
            try:
                command(self._scheduler)
            except Exception:
                log.exception("a command failed")
        self._flush()
        return received

    def _pending(self, wait_s: float) -> Iterator[Command]:
        try:
            yield self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            while True:
                yield self._commands.get_nowait()
        except queue.Empty:
            return

    def _launch(self, plan: StepPlan) -> Launched:
        self._rates.launched(plan)
        self._progress += 1
        self._publish_load()
        self.profiler.launching()
        launched = self._executor.launch(plan)
        self._pacer.launched()
        return launched

    def _settle(self, plan: StepPlan, launched: Launched) -> None:
        try:
            result = launched.result()
        except Exception as error:
            log.exception("step %d failed", plan.number)
            self._rates.failed(plan)
            recover(self._scheduler, plan, error)
            if is_lost(self._scheduler, error):
                self._on_lost()
            self._flush()
        else:
            self._rates.settled(plan)
            self._pacer.settled(plan, self._rates.step_s)
            settle_step(self._scheduler, plan, result, self._hand_over)
            self._on_step(self._rates.step_s, plan.num_decodes)

    def _hand_over(self) -> None:
        """Tells what is queued. Whoever sends the last chunk of a prompt has the interpreter for a
        moment: the client waits for that, while the device has its next step already, or nobody
        waits for this loop."""
        events = self._scheduler.take_events()
        hand_out(events)
        if any(isinstance(event, Prefilled) for _, event in events):
            time.sleep(YIELD_S)

    def _flush(self) -> None:
        hand_out(self._scheduler.take_events())

    def _publish_load(self, profile_s: float = 0.0) -> None:
        long_step_s = profile_s + self._rates.expected_s()
        self.load = load_of(
            self._scheduler,
            self._rates,
            progress=self._progress,
            long_step_ms=1e3 * long_step_s if long_step_s > LONG_STEP_S else 0.0,
        )


def _unanswered() -> None:
    """For callers that can do nothing about it."""


def _unobserved(_seconds: float, _decoded_sequences: int) -> None:
    """For callers that need no figures."""


def hand_out(events: list[tuple[Sink, Event]]) -> None:
    """Calls the sinks with their events, in order, one call for a run of the same sink."""
    start = 0
    for end in range(1, len(events) + 1):
        if end < len(events) and events[end][0] == events[start][0]:
            continue
        sink = events[start][0]
        try:
            sink([event for _, event in events[start:end]])
        except Exception:
            log.exception("a sink failed")
        start = end
