"""What a decode worker's process costs the CPUs beside its device, by thread and by stretch.

    python -m bench.decode_cpu [--rate 24] [--steps 3000] [--slower 4] [--callbacks] [--json FILE]

A router, a prefill and a decode worker in processes of their own, and `baton bench` as the client,
with hand-offs through shared memory. All of it is as in production but the devices: they compute
nothing, and take `--step-ms` for a decode step and `PROMPT_TOKEN_S` for a token of a prompt. With
256 tokens an answer, 24 requests a second are 40 rows.

It prints CPU time, to which neighbours on a machine add by cold caches alone:

- each thread of the decode worker: share of a core, and what a step costs it;
- each stretch of its Python: calls a step, CPU of one call (p50, p99, largest), and together by
  step. Stretches may lie within others. With `--callbacks` the callbacks of the event loop, too:
  the loop is asyncio's own then.
"""

from __future__ import annotations

import argparse
import gc
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.harness import table, write_json

STEP_S, PROMPT_TOKEN_S = 6.4e-3, 22e-6
"""A decode step of 40 rows, and a token of a prompt of 1,024 tokens, on an H200
(`bench/README.md`)."""
PROMPT, OUTPUT = 1024, 256
READY_S, END_S = 180.0, 20.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 64, "head_dim": 32,
    "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 2,
    "num_hidden_layers": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": 4096,
}  # fmt: skip


# -- the device ---------------------------------------------------------------------------------


class _End:
    """The moment at which the device has come to the end of a step."""

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def synchronize(self) -> None:
        """Sleeps until then, with the interpreter released."""
        time.sleep(max(0.0, self._at_s - time.monotonic()))


class VirtualDevice:
    """An executor that computes nothing, for as long as a device would. It packs steps as the one
    on a GPU does, and its late rows come as they do there."""

    on_launch: Callable[[Any], None] = staticmethod(lambda _plan: None)
    """Called with each plan."""

    def __init__(self, config: Any, pools: Any, step_s: float, prompt_token_s: float) -> None:
        import torch

        from engine.cuda.steps.shapes import Shapes, most_integers
        from engine.cuda.steps.staging import StepStaging
        from engine.cuda.waiting import StepWaiter

        self._step_s, self._prompt_token_s = step_s, prompt_token_s
        self._page_size = pools.first.page_size
        self._nobody = config.max_sequences
        self._shapes = Shapes(config, 1)
        pages = [-(-config.max_context_tokens // self._page_size)]
        integers = most_integers(config, self._shapes.all[0], pages)
        self._staging = StepStaging(integers, torch.device("cpu"))
        self._waiter = StepWaiter()
        self._began_s = self._ends_s = 0.0
        self._room = self._pages = 0
        self._offered_s: float | None = None
        self._most_pages = pages[0]
        self.late = self

    def shaped(self, plan: Any) -> Any:
        """Nothing to decide."""
        return plan

    def launch(self, plan: Any) -> Future[Any]:
        """Queues the step."""
        from engine.cuda.steps.packing import pack

        VirtualDevice.on_launch(plan)
        self._room, self._offered_s = 0, None
        if plan.only_decodes:
            shape = self._shapes.of(plan)
            if shape is not None:
                self._staging.begin()
                pack(plan, shape, self._staging, self._nobody, self._page_size)
                self._staging.upload()
            self._room = self._most_pages if self._pages else 0
        self._began_s = max(time.monotonic(), self._ends_s)
        decode_s = self._step_s if plan.num_decodes else 0.0
        self._ends_s = self._began_s + decode_s + plan.prompt_tokens * self._prompt_token_s
        return self._wait(len(plan.sample_slots))

    def _wait(self, count: int) -> Future[Any]:
        from engine.step.plan import StepResult

        def read() -> Any:
            return StepResult(np.full(count, 7, np.int32), np.ones(count, bool), None, None, None)

        return self._waiter.add(_End(self._ends_s), read, Future())

    def mask_bits(self, count: int) -> Any:
        """No row is masked."""
        raise NotImplementedError

    def sample(self, masks: Any) -> None:
        """No row is masked."""

    def shutdown(self) -> None:
        """Ends the thread."""
        self._waiter.stop()

    def expect(self, pages: int) -> None:
        """See `LateRows`."""
        self._pages = pages

    def room(self) -> int:
        """See `LateRows`."""
        return self._room

    def offer(self, row: Any) -> None:
        """See `LateRows`."""
        self._offered_s = time.monotonic()

    def is_taken(self) -> bool:
        """See `LateRows`."""
        self._room = 0
        return self._offered_s is not None and self._offered_s < self._began_s

    def draw(self, plan: Any) -> Future[Any]:
        """See `LateRows`."""
        return self._wait(1)


# -- the decode worker's process -----------------------------------------------------------------


class Stretches:
    """CPU time of calls of functions, by name. It replaces the functions."""

    def __init__(self) -> None:
        self.is_on = False
        self.took_ns: defaultdict[str, list[int]] = defaultdict(list)

    def watch(self, owner: Any, name: str, shown: str = "") -> None:
        """Measures a function of a class, an object or a module from now on."""
        inner, took_ns = getattr(owner, name), self.took_ns[shown or _name_of(owner, name)]

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_ns = time.thread_time_ns()
            try:
                return inner(*args, **kwargs)
            finally:
                if self.is_on:
                    took_ns.append(time.thread_time_ns() - began_ns)

        setattr(owner, name, timed)

    def watch_garbage(self) -> None:
        """Measures each run of the garbage collector."""
        began_ns = [0]

        def look(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                began_ns[0] = time.thread_time_ns()
            elif self.is_on:
                took_ns = time.thread_time_ns() - began_ns[0]
                self.took_ns[f"garbage, generation {info['generation']}"].append(took_ns)

        gc.callbacks.append(look)

    def watch_callbacks(self) -> None:
        """Measures each callback of asyncio's own loop."""
        import asyncio

        from bench.parts import name_of

        inner = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            named, began_ns = name_of(handle), time.thread_time_ns()
            inner(handle)
            if self.is_on:
                self.took_ns[f"callback {named}"].append(time.thread_time_ns() - began_ns)

        asyncio.events.Handle._run = timed  # type: ignore[assignment, method-assign]


def _name_of(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__name__', type(owner).__name__).rpartition('.')[2]}.{name}"


def watch_worker(stretches: Stretches) -> None:
    """Measures what a decode worker does for a step, a request and a moment."""
    from decode_service import service, spans, token_stream
    from engine.cuda.waiting import StepWaiter
    from engine.loop import late, step_loop
    from engine.schedule.admission import Admission
    from engine.schedule.planning import Planner
    from engine.schedule.requests import Requests
    from engine.schedule.settling import Settler
    from kv_transfer.exchange import Exchange
    from kv_transfer.thread import TransferThread
    from telemetry import export
    from telemetry.metrics.worker import WorkerMetrics
    from worker.server import Worker
    from worker.stream import WorkerServicer
    from worker_base.outbox import LoopInbox, Outbox
    from worker_base.page_reports import PageReports

    watch = stretches.watch
    loop = step_loop.StepLoop
    for name in (
        "_turn",
        "_launch",
        "_settle",
        "_receive",
        "_hold_until_end",
        "_hand_over",
        "_end",
    ):
        watch(loop, name)
    watch(step_loop, "load_of")
    watch(step_loop, "hand_out")
    watch(late.LateJoins, "offers")
    watch(Admission, "admit")
    watch(Planner, "plan")
    watch(Settler, "settle")
    watch(VirtualDevice, "launch")
    watch(StepWaiter, "add")
    for name in ("submit", "deliver", "release", "take_events"):
        watch(Requests, name)
    watch(WorkerMetrics, "stepped")
    watch(WorkerMetrics, "second_token")
    watch(LoopInbox, "_run")
    watch(service.DecodeService, "_take_events")
    watch(service.DecodeService, "on_transfer")
    watch(service.DecodeService, "submit")
    watch(token_stream.TokenStream, "new_tokens")
    watch(token_stream.TokenStream, "choice_ended")
    watch(token_stream, "tokens_message")
    watch(spans, "write_spans")
    watch(Worker, "report")
    watch(WorkerServicer, "_receive")
    watch(WorkerServicer, "report")
    watch(Outbox, "report")
    watch(PageReports, "turn")
    watch(TransferThread, "_turn")
    watch(Exchange, "look")
    watch(Exchange, "work")
    watch(export._CountingExporter, "export", "export of spans")


class ThreadCpu(NamedTuple):
    """A thread of a process."""

    name: str
    cpu_s: float
    sleeps: int
    """How often it has waited for something."""


def threads() -> dict[int, ThreadCpu]:
    """Threads of this process, by id."""
    named = {one.native_id: one.name for one in threading.enumerate()}
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        number = int(folder.name)
        run_ns = int((folder / "schedstat").read_text().split()[0])
        status = (folder / "status").read_text()
        slept = int(status.partition("voluntary_ctxt_switches:")[2].split()[0])
        name = named.get(number) or (folder / "comm").read_text().strip()
        found[number] = ThreadCpu(name, run_ns / 1e9, slept)
    return found


def be_worker(args: argparse.Namespace) -> int:
    """Is a worker. The one that decodes measures `--steps` steps, from the first on that has nearly
    all rows, and writes what it saw to a file."""
    from engine import engine as engine_module
    from worker import process
    from worker.settings import WorkerDebug, WorkerSettings

    times = args.slower * STEP_S, args.slower * PROMPT_TOKEN_S

    def build(config: Any, loaded: Any, pools: Any, *_: Any) -> VirtualDevice:
        return VirtualDevice(config, pools, *times)

    setattr(engine_module, "build_executor", build)  # noqa: B010 - mypy takes no other function
    if args.be == "decode":
        stretches = Stretches()
        if not args.bare:
            watch_worker(stretches)
        stretches.watch_garbage()
        if args.callbacks:
            stretches.watch_callbacks()
            setattr(process, "loop_factory", lambda: None)  # noqa: B010 - likewise
        VirtualDevice.on_launch = Window(args, stretches).launched
    settings = WorkerSettings(
        role=args.be,
        name=args.be,
        model=args.model,
        device="cpu",
        threads=1,
        routers=(args.router,),
        admin="127.0.0.1:0",
        kv_memory_gib=0.2,
        max_sequences=128,
        max_context_tokens=4096,
        drain_s=1,
        debug=WorkerDebug(load_format="dummy", mixed_prefill_tokens=192),
    )
    return process.main(settings)


class Window:
    """Steps that are measured."""

    def __init__(self, args: argparse.Namespace, stretches: Stretches) -> None:
        self._args, self._stretches = args, stretches
        self._left = args.steps
        self._least_rows = 0.8 * args.rate * OUTPUT * STEP_S
        self._before: dict[int, ThreadCpu] = {}
        self._began_s = 0.0

    def launched(self, plan: Any) -> None:
        """A step is about to be launched."""
        if self._left == self._args.steps:
            if plan.num_decodes < self._least_rows:
                return
            self._before, self._began_s = threads(), time.monotonic()
            self._stretches.is_on = True
        self._left -= 1
        if self._left == 0:
            self._stretches.is_on = False
            self._write(time.monotonic() - self._began_s)

    def _write(self, seconds: float) -> None:
        none = ThreadCpu("", 0.0, 0)
        both = [(one, self._before.get(number, none)) for number, one in threads().items()]
        found = {
            "seconds": seconds,
            "threads": [
                (one.name, one.cpu_s - old.cpu_s, one.sleeps - old.sleeps) for one, old in both
            ],
            "stretches": self._stretches.took_ns,
        }
        new = Path(f"{self._args.found}.new")
        new.write_text(json.dumps(found))
        new.rename(self._args.found)


# -- all processes -------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A router and two workers; the router's address."""
    door, http, internal, admin = (f"127.0.0.1:{_free_port()}" for _ in range(4))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    router = [
        *("-m", "baton", "router", "--listen", door, "--internal-listen", internal),
        *("--http-listen", http, "--admin", admin),
    ]
    rest = sys.argv[1:]
    worker = ["-m", "bench.decode_cpu", *rest, "--router", internal, "--model", str(folder)]
    commands = {
        "router": router,
        **{role: [*worker, "--be", role, "--found", str(folder / role)] for role in ROLES},
    }
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                out = subprocess.STDOUT
                running[name] = subprocess.Popen([sys.executable, *command], stdout=log, stderr=out)
        _wait_until_ready(folder, running)
        yield door
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(folder: Path, running: dict[str, subprocess.Popen[bytes]]) -> None:
    """Returns when both workers serve."""
    end_s = time.monotonic() + READY_S
    for role in ROLES:
        log = folder / f"{role}.log"
        while "worker serves" not in (said := log.read_text()):
            for name, process in running.items():
                if process.poll() is not None or time.monotonic() > end_s:
                    said = (folder / f"{name}.log").read_text()
                    raise SystemExit(f"the {name} does not serve:\n{said[-2000:]}")
            time.sleep(0.1)
    time.sleep(1.0)  # The router has heard of both, and they of each other.


ROLES = ("prefill", "decode")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What the decode worker saw, and the client."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with cluster(folder) as door:
            rate, found = args.rate / args.slower, folder / "decode"
            lasts_s = 3 * args.steps * STEP_S * args.slower + END_S
            command = [
                *("-m", "baton", "bench", "--url", door, "--rate", str(rate)),
                *("--num", str(int(rate * lasts_s)), "--prompt-tokens", str(PROMPT)),
                *("--output-tokens", str(OUTPUT), "--vocabulary", "4000"),
            ]
            quiet = subprocess.DEVNULL
            client = subprocess.Popen([sys.executable, *command], stdout=quiet, stderr=quiet)
            try:
                while not found.exists():
                    if client.poll() is not None:
                        raise SystemExit("the client has ended before so many steps were seen")
                    time.sleep(0.2)
            finally:
                client.kill()
                client.wait()
            seen: dict[str, Any] = json.loads(found.read_text())
            seen["steps"] = args.steps
    return seen


def show(found: dict[str, Any], least_us: float) -> None:
    """Prints the tables."""
    steps, seconds = found["steps"], found["seconds"]
    print(f"{steps} steps in {seconds:.1f} s\n")
    lines: list[Sequence[object]] = [("thread", "% of a core", "us a step", "sleeps a step")]
    by_name: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, cpu_s, sleeps in found["threads"]:
        by_name[name][0] += cpu_s
        by_name[name][1] += sleeps
    for name, (cpu_s, sleeps) in sorted(by_name.items(), key=lambda one: -one[1][0]):
        if 1e6 * cpu_s / steps >= least_us:
            lines.append((name, 100 * cpu_s / seconds, 1e6 * cpu_s / steps, sleeps / steps))
    all_s = sum(cpu_s for _, cpu_s, _ in found["threads"])
    lines.append(("all", 100 * all_s / seconds, 1e6 * all_s / steps, ""))
    print(table(lines))
    lines = [("stretch", "calls a step", "p50 us", "p99 us", "largest us", "us a step")]
    for name, took_ns in sorted(found["stretches"].items(), key=lambda one: -sum(one[1])):
        if took_ns and sum(took_ns) / 1e3 / steps >= least_us / 4:
            p50, p99 = np.percentile(took_ns, (50, 99)) / 1e3
            each = len(took_ns) / steps, float(p50), float(p99), max(took_ns) / 1e3
            lines.append((name, *each, sum(took_ns) / 1e3 / steps))
    print()
    print(table(lines))


def main() -> None:
    """Prints what a step and a request cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=24.0, help="requests a second")
    parser.add_argument("--steps", type=int, default=3000, help="that are measured")
    parser.add_argument(
        "--slower", type=float, default=1.0,
        help="all times of devices, and between requests, so many times as long: on a busy machine",
    )  # fmt: skip
    parser.add_argument("--callbacks", action="store_true", help="of the event loop, too")
    parser.add_argument(
        "--bare", action="store_true", help="threads alone, nothing measured inside"
    )
    parser.add_argument("--least-us", type=float, default=8.0, help="of a step; less is not shown")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--be", choices=ROLES, help=argparse.SUPPRESS)
    for name in ("--router", "--model", "--found"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be:
        sys.exit(be_worker(args))
    found = measure(args)
    show(found, args.least_us)
    write_json(args.json, found)


if __name__ == "__main__":
    main()
