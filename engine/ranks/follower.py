"""Any rank but 0: it holds its part of the model and of each page, and repeats rank 0's steps.

Its life is that of `engine.ranks.process`. It plans nothing and samples nothing.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NoReturn

import torch
import zmq

from engine.eager.steps import TorchSteps
from engine.hosts.lifeline import LIFELINE, hold_on
from engine.hosts.meetings import RankMeetings
from engine.hosts.wires import MOST_WAITING, Ends
from engine.model import LoadedModel, ModelError
from engine.parts.building import (
    cuda_executor,
    load,
    open_all,
    pages_that_fit,
    torch_steps,
)
from engine.parts.paging import EngineError, make_arenas, make_pages, resolved, shard_of
from engine.pool.pools import KvPools
from engine.ranks.copies import begin_copying, send_memory
from engine.ranks.groups import RankGroup, device_of
from engine.ranks.process import (
    ADAPTER,
    FAILED,
    HELLO,
    LOADED,
    PAGES,
    READY,
    REPORTS,
    STEP,
    beside_of,
    copies_of,
    read_config,
    steps_of,
)
from engine.ranks.stats import RankStats, Stage, watched
from engine.ranks.steps import RankAdapters, decode
from engine.step.collective import CollectiveError
from engine.step.executor import Executor, Launched
from engine.step.grid import Grid
from engine.step.hooks import Hook
from engine.step.plan import StepPlan
from engine.tiers.movers import mover_for
from faults import failpoints

log = logging.getLogger("baton.engine")

Beside = Callable[[zmq.Socket[bytes], int, KvPools], None]
"""Runs beside a rank's steps until rank 0 ends it. It takes the socket to rank 0, the rank, and the
pages of that rank."""
LOOK_MS: Final = 500
"""A rank without a step looks this often whether those on its device have failed."""
CAUSE_S: Final = 1.0
"""Rank 0 gets this long to hear of a rank that is gone from the kernel, seconds."""


class Follower:
    """A rank, from its folder to its end."""

    def __init__(self, folder: Path, rank: int, local: int, size: int) -> None:
        self._folder = folder
        self._ends = Ends(folder)
        self._config, self._beside = read_config(folder)
        self._rank = rank
        self._meetings = RankMeetings(folder, self._config.nodes, size)
        self._device = device_of(self._config.device, local)
        grid = Grid(self._config.pp, self._config.tp)
        own = self._group = RankGroup(self._config.device, rank, grid, local)
        self._figures = RankStats(folder, size)
        self._collective, self._stages = watched(own.collective, own.stages, self._figures, rank)
        self._errors: SimpleQueue[BaseException] = SimpleQueue()
        """Errors of steps that were queued."""
        self._context = zmq.Context()
        self._reports = self._context.socket(zmq.PUSH)
        self._ends.connect(self._reports, REPORTS)
        self._inbox = self._context.socket(zmq.PAIR)
        self._inbox.set_hwm(MOST_WAITING)
        self._ends.connect(self._inbox, steps_of(rank))
        self._inbox.send(HELLO)
        if self._ends.over_hosts:
            hold_on(lambda socket: self._ends.connect(socket, LIFELINE))

    def run(self) -> int:
        """Loads, and repeats steps until rank 0 says stop. Returns the exit code."""
        try:
            self._live()
        except CollectiveError as error:
            # The rank that went first is the reason. Rank 0 kills this one when it has heard of it.
            time.sleep(CAUSE_S)
            self._report(FAILED, reason=_reason(error))
            return 1
        except Exception as error:
            log.exception("rank %d fails", self._rank)
            self._report(FAILED, reason=_reason(error))
            return 1
        finally:
            self._context.destroy(linger=1000)
        return 0

    def _live(self) -> None:
        failpoints.hit("rank.load", str(self._rank))
        config, device = self._config, self._device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Of this thread, which runs the steps.
        hooks = open_all(config)
        loaded = load(
            config,
            device,
            shard=shard_of(config, self._rank),
            collective=self._collective,
            stages=self._stages,
            progress=self._sign,
        )
        if (pairs := loaded.model.pairs) is not None:
            pairs.tell = partial(self._figures.computed, self._rank)
        num_pages = pages_that_fit(config, loaded, device, hooks)
        self._reach(Stage.LOADED)
        self._report(LOADED, revision=loaded.revision, num_pages=num_pages)
        message = self._inbox.recv_multipart()
        if message[0] != PAGES:
            return
        pools = make_pages(int(json.loads(message[1])), config, loaded, device)
        if self._beside:
            self._begin_beside(pools)
        if config.kv_host_bytes:
            arenas = make_arenas(config, pools)
            movers = [
                mover_for(own.data, arena.slots) for own, arena in zip(pools, arenas, strict=True)
            ]
            begin_copying(self._rank, movers, self._connect_copies)
            if config.kv_stores:
                send_memory(self._folder, self._rank, [arena.fd for arena in arenas])
        failpoints.hit("rank.join", str(self._rank))
        self._reach(Stage.JOINING)
        self._group.join(self._meetings)
        self._reach(Stage.JOINED)
        failpoints.hit("rank.joined", str(self._rank))
        run = self._steps(loaded, pools, hooks)
        self._reach(Stage.READY)
        self._report(READY)
        adapters = RankAdapters(self._folder)
        while (message := self._next())[0] in (STEP, ADAPTER):
            if message[0] == ADAPTER:
                adapters.put(message[1:])
                continue
            failpoints.hit("rank.step", str(self._rank))
            run(adapters.completed(decode(message[1:])))

    def _steps(
        self, loaded: LoadedModel, pools: KvPools, hooks: Sequence[Hook]
    ) -> Callable[[StepPlan], None]:
        """Runs this rank's part of a step, or queues it."""
        config = resolved(self._config, loaded, pools.first)
        fast = cuda_executor(config, loaded, pools, None, hooks, self._sign)
        if fast is not None:
            return partial(_queue, fast, self._errors)
        return partial(_run, torch_steps(config, loaded, pools, hooks))

    def _next(self) -> list[bytes]:
        """What rank 0 says next. Steps that were queued may fail meanwhile."""
        while not self._inbox.poll(LOOK_MS if self._device.type == "cuda" else None):
            self._check()
        self._check()
        return self._inbox.recv_multipart()

    def _check(self) -> None:
        if not self._errors.empty():
            raise self._errors.get()

    def _begin_beside(self, pools: KvPools) -> None:
        socket = self._connect(beside_of(self._rank))
        module, name = self._beside.rsplit(":", 1)
        run: Beside = getattr(importlib.import_module(module), name)
        arguments = run, socket, self._rank, pools
        threading.Thread(target=_beside, args=arguments, name="baton-beside", daemon=True).start()

    def _connect_copies(self, direction: str) -> zmq.Socket[bytes]:
        return self._connect(copies_of(self._rank, direction))

    def _connect(self, name: str) -> zmq.Socket[bytes]:
        """A socket for one thread alone."""
        socket = zmq.Context().socket(zmq.PAIR)
        self._ends.connect(socket, name)
        socket.send(HELLO)
        return socket

    def _reach(self, stage: Stage) -> None:
        self._figures.reach(self._rank, stage)

    def _sign(self, _phase: str, _done: int, _total: int) -> None:
        self._figures.sign(self._rank)

    def _report(self, kind: str, **more: Any) -> None:
        report = {"kind": kind, "rank": self._rank, **more}
        self._reports.send(json.dumps(report).encode())


@torch.inference_mode()
def _run(steps: TorchSteps, plan: StepPlan) -> None:
    """One step, with the collectives of `TorchExecutor` in their order."""
    plan = steps.prepare(plan)
    if plan.num_tokens == 0:
        steps.end_without_tokens()
        return
    hidden = steps.forward(plan)
    if not steps.draws:
        steps.end()
        return
    steps.spoilt()  # All ranks tell.
    for wanted in plan.scores:
        for _ in steps.scored(hidden, wanted):
            pass  # Rank 0 has the logits.
    if plan.sample is None:
        steps.end()
        return
    if steps.reads_logits(plan):
        steps.logits(hidden, plan)
    else:
        steps.best(hidden, plan)
    steps.keep(plan, steps.no_tokens(plan))


def _queue(executor: Executor, errors: SimpleQueue[BaseException], plan: StepPlan) -> None:
    """Queues a step. Its errors may come later."""

    def ended(launched: Launched) -> None:
        if (error := launched.exception()) is not None:
            errors.put(error)

    executor.launch(plan).add_done_callback(ended)


def _beside(run: Beside, socket: zmq.Socket[bytes], rank: int, pools: KvPools) -> None:
    """Without it this rank can do its part no more, so an error ends the process."""
    try:
        run(socket, rank, pools)
    except BaseException:
        log.exception("rank %d: what runs beside its steps fails", rank)
        os._exit(1)


def _reason(error: Exception) -> str:
    if isinstance(error, EngineError | ModelError | CollectiveError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def main(folder: str) -> NoReturn:
    """Runs a rank that torchrun's environment names. It never returns: nothing is left to tidy up.

    Args:
        folder: rank 0's private folder.
    """
    rank, local, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(levelname)s %(message)s")
    failpoints.arm(os.environ.get("BATON_DEBUG_FAILPOINTS", ""))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    code = Follower(Path(folder), rank, local, size).run()
    sys.stderr.flush()
    os._exit(code)
