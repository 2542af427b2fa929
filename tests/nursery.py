"""Processes that start in a fraction of a second: forked from one that has imported everything.

A worker spends most of its start on imports, and tests start many. `python -m nursery` does them
once, with one thread and nothing open, and then forks a child for every line that orders one; such
a child has its own session, log and environment, and from there on is what `python -m baton` would
be, but that its interpreter ends at once. When the tests' process ends, however it ends, the
nursery ends and takes its children along.

The ranks of engines in the tests' own process come from it, too (`ranks_here`): a rank that starts
by itself takes 4 s of CPU before it loads a tiny model. They are grandchildren whose parent has
ended, so that the kernel makes them children of the tests' process, as theirs would be.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
from fetching_policy import FETCHING, everybody_fetches
from stand_in_names import NAMES, look_up_in

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
RANKS: Final = "engine.ranks"
ANSWER_S: Final = 100.0
"""Its first answer comes when it has imported everything: that took 60 on two cores that others
use."""
PRELOADED: Final = (
    "console.cli",
    "worker.process",
    "engine.ranks.follower",
    "router.server",
    "kv_transfer.transports.nixl",
    "nixl_cu13._bindings",
    "uvloop",
    # What loading a model imports on the way.
    "accelerate",
    "safetensors.torch",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "transformers.generation.configuration_utils",
    "transformers.models.auto.configuration_auto",
    "transformers.models.llama.configuration_llama",
)
"""Building a worker's engine on a tiny model takes 0.01 s of CPU after these, and 1.9 s before."""


class Child:
    """A process that somebody else is the parent of; looks like `subprocess.Popen`. Several threads
    may wait for it."""

    def __init__(self, pid: int, code_of: Callable[[int], int]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._code_of = code_of
        """Waits for a child that has ended, as its parent; its exit code."""
        self._fd = os.pidfd_open(pid)
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self._fd)

    def poll(self) -> int | None:
        """Not None once it has ended."""
        if self.returncode is None and select.select([self._fd], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Blocks until it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("child", timeout or 0)
            self._ended()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Does nothing to one that has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._fd, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ended(self) -> None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._code_of(self.pid)


class Nursery:
    """The tests' side."""

    def __init__(self, command: Sequence[str] = ("-m", "nursery")) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OMP_NUM_THREADS": "1",
                "GRPC_VERBOSITY": "error",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Starts `python [-P] -m baton ...`; what it writes is appended to the log."""
        words = argv[argv.index("-m") :]
        assert words[1] == "baton", argv
        order = {"argv": list(words[2:]), "environment": dict(environment), "log": str(log)}
        return Child(self._tell(order), lambda pid: self._tell({"ended": pid}))

    def start_rank(self, folder: str, environment: Mapping[str, str]) -> Child:
        """Starts `python -P -m engine.ranks FOLDER PARENT`, as a child of this process."""
        own = os.getpid()
        order = {"rank": [RANKS, folder, str(own)], "log": f"/proc/{own}/fd/2"}
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            pid = self._tell({**order, "environment": dict(environment)})
        finally:
            _prctl(PR_SET_CHILD_SUBREAPER, 0)
        return Child(pid, lambda pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Ends the nursery and every child of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _tell(self, order: Mapping[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            said, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
            answer = self._process.stdout.readline() if said else ""
            if not answer:
                asked = order.get("argv", order)
                raise AssertionError(f"no answer within {ANSWER_S:g} s to {asked}: {self._end()}")
            return int(answer)

    def _end(self) -> str:
        """Ends a nursery whose next answer would be taken for one to another order; what the kernel
        said of it and of its children."""
        found = psutil.Process(self._process.pid)
        family = [found, *found.children(recursive=True)]
        told = [one.as_dict(["pid", "status", "cpu_times", "cmdline"]) for one in family]
        self._process.kill()
        return "\n".join(map(str, told))


@functools.cache
def the_nursery() -> Nursery:
    """One for all tests of this process, from the first use to the end."""
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


def _living_nursery() -> Nursery:
    if the_nursery().has_ended:
        the_nursery.cache_clear()
    return the_nursery()


def fork(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
    """Starts `python -m baton ...` in a fraction of a second; what it writes is appended to the
    log."""
    return _living_nursery().start(argv, environment, log)


@contextmanager
def ranks_here() -> Iterator[None]:
    """Engines that this process builds have their ranks from the nursery. Not where there are
    GPUs: what is forked behind the imports, which look for GPUs, can use none."""
    import torch

    from engine.hosts.processes import RankProcesses

    if torch.cuda.is_available():
        yield
        return

    def start(self: RankProcesses, rank: int) -> Child:
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment = {**os.environ, **own, **self._environment(rank)}
        return _living_nursery().start_rank(str(self._folder), environment)

    before, RankProcesses._start = RankProcesses._start, start
    try:
        yield
    finally:
        RankProcesses._start = before


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _serve() -> None:
    """Forks a child for each line that orders one, or a rank, and answers with its pid; for one
    that names a child that has ended, with its exit code."""
    for line in sys.stdin:
        order = json.loads(line)
        if "ended" in order:
            _, status = os.waitpid(order["ended"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        if "rank" in order:
            print(_give_away(order), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(order)
        print(pid, flush=True)


def _give_away(order: dict[str, Any]) -> int:
    """Forks a rank of the process that asks for it; its pid, once it is that one's child."""
    told, tell = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            _become_rank(order)
        os.write(tell, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(told, 32))
    os.close(told)
    os.close(tell)
    return pid


def _become_rank(order: dict[str, Any]) -> None:
    """Runs `engine.ranks` in the forked process; never returns."""
    module, *arguments = order["rank"]
    while os.getppid() != int(arguments[-1]):
        time.sleep(0.001)
    _leave_home(order)
    paths = order["environment"]["PYTHONPATH"].split(os.pathsep)
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # A rank that comes to its end does so by itself.


def _leave_home(order: dict[str, Any]) -> None:
    """Has a session, files and an environment of its own."""
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(order["environment"])


def _become(order: dict[str, Any]) -> None:
    """Runs the command line in the forked child; never returns."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _leave_home(order)
    random.seed()  # trace ids are drawn from it
    sys.argv = ["baton", *order["argv"]]
    if FETCHING in os.environ:
        everybody_fetches(os.environ.pop(FETCHING))
    if NAMES in os.environ:
        look_up_in(Path(os.environ[NAMES]))
    # An orderly end of this interpreter takes a second and a half of CPU, for what it imported.
    os._exit(_run())


def _run() -> int:
    """Runs `baton` with the arguments in `sys.argv`; its exit code."""
    from console.cli import main

    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    for name in PRELOADED:
        __import__(name)
    _serve()
    os._exit(0)  # as its children end
