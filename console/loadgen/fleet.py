"""Starts and leads the sender processes of a benchmark.

The processes start once and run one plan after another. Requests are dealt out in turn. Every wait
is bounded by the time limits of the requests and a margin.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple, Self

from console.loadgen import sender
from console.loadgen.endpoints import Target
from console.loadgen.errors import BenchError
from console.loadgen.outcome import UNREACHABLE, SenderReport
from console.loadgen.sender import NotReady, Progress, Ready, RunOrder, Sending, Start
from console.loadgen.workload import LoadPlan

START_DELAY_S: Final = 0.1
"""Delay of the start, so that its message reaches every sender in time."""
SPAWN_S: Final = 60.0
"""Interpreters that import everything at once took up to a minute on two busy cores."""
WRITING_S_PER_MILLION_TOKENS: Final = 20.0
"""For writing prompts before the run; many times what it takes, since it bounds a hang."""
END_S: Final = 5.0
"""A sender that was asked to end has nothing left to do."""
_POLL_S: Final = 0.1
"""So often the fleet looks whether a sender has died."""
_CORES_PER_SENDER: Final = 4
"""The others are for the servers, if they are of this machine."""
_MOST_SENDERS: Final = 8
"""More would only take cores from servers of this machine."""


OnProgress = Callable[[int, int], None]
"""A callback that takes the number of requests sent and the number ended."""


def usual_senders() -> int:
    """The default number of senders: a quarter of the cores, at most `_MOST_SENDERS`.

    The server may need the other cores."""
    return min(_MOST_SENDERS, max(1, (os.cpu_count() or 1) // _CORES_PER_SENDER))


class Fleet:
    """Sender processes; a context manager that ends them."""

    def __init__(self, size: int, sending: Sending) -> None:
        self._size = size
        self._sending = sending
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        spawn = multiprocessing.get_context("spawn")
        for number in range(self._size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=sender.main, args=(theirs,), name=f"sender-{number}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()

    def run(
        self, plan: LoadPlan, on_progress: OnProgress = lambda sent, ended: None
    ) -> list[SenderReport]:
        """Sends all requests of a plan. Returns each sender's report when the last has ended.

        Raises:
            BenchError: a warm-up request failed, or a sender process died or does not end.
        """
        used = self._pipes[: plan.most_senders]
        for number, pipe in enumerate(used):
            requests = plan.share(number, len(used))
            order = RunOrder(self._sending, requests, plan.seed, plan.in_turn, len(used))
            self._send(pipe, order)
        self._await_ready(used, plan)
        start = Start(time.perf_counter() + START_DELAY_S)
        for pipe in used:
            self._send(pipe, start)
        return self._await_reports(used, plan, on_progress)

    def _await_ready(self, pipes: list[Connection], plan: LoadPlan) -> None:
        tokens = sum(request.prompt_tokens for request in plan.requests)
        warm_ups = self._sending.warm_ups * len(self._sending.targets)
        limit_s = SPAWN_S + warm_ups * self._sending.asked.timeout_s
        limit_s += WRITING_S_PER_MILLION_TOKENS * tokens / 1e6
        waiting, give_up_s = list(pipes), time.monotonic() + limit_s
        failed: NotReady | None = None
        while waiting:
            for pipe in self._heard(waiting, give_up_s):
                match self._receive(pipe):
                    case Ready():
                        waiting.remove(pipe)
                    case NotReady() as failed:
                        waiting.remove(pipe)
        if failed is not None:
            raise _not_ready(failed, self._sending.targets)

    def _await_reports(
        self, pipes: list[Connection], plan: LoadPlan, on_progress: OnProgress
    ) -> list[SenderReport]:
        timeout_s = self._sending.asked.timeout_s
        give_up_s = time.monotonic() + plan.longest_s(timeout_s) + SPAWN_S
        progress = dict.fromkeys(pipes, Progress(0, 0))
        reports: dict[Connection, SenderReport] = {}
        while len(reports) < len(pipes):
            for pipe in self._heard([p for p in pipes if p not in reports], give_up_s):
                match self._receive(pipe):
                    case Progress() as so_far:
                        progress[pipe] = so_far
                    case SenderReport() as report:
                        reports[pipe] = report
                        progress[pipe] = Progress(len(report.outcomes), len(report.outcomes))
            counts = progress.values()
            on_progress(sum(one.sent for one in counts), sum(one.ended for one in counts))
        return [reports[pipe] for pipe in pipes]

    def _heard(self, pipes: list[Connection], give_up_s: float) -> list[Connection]:
        if time.monotonic() > give_up_s:
            raise BenchError("a sender process does not come to an end")
        return [pipe for pipe in wait(pipes, _POLL_S) if isinstance(pipe, Connection)]

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            raise self._gone(pipe) from None

    def _send(self, pipe: Connection, message: NamedTuple) -> None:
        try:
            pipe.send(message)
        except OSError:
            raise self._gone(pipe) from None

    def _gone(self, pipe: Connection) -> BenchError:
        process = self._processes[self._pipes.index(pipe)]
        with contextlib.suppress(ValueError):
            process.join(END_S)
        return BenchError(f"{process.name} ended by itself (exit code {process.exitcode})")


def _not_ready(failed: NotReady, targets: tuple[Target, ...]) -> BenchError:
    where = ", ".join(target.address for target in targets)
    if failed.status == UNREACHABLE:
        return BenchError(f"nobody answers at {where} ({failed.message})")
    return BenchError(f"a warm-up request to {where} failed: {failed.status}: {failed.message}")
