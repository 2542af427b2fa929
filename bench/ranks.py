"""What several ranks cost and gain: everything that two or four GPUs are wanted for, in one call.

python -m bench.ranks [--ranks 1,2,4] [--model FOLDER] [--device cuda] [--only PART]...
    [--rows 1,16x1152] [--context TOKENS] [--quantization fp8] [--out FILE.json]

Parts:

    read        a rank of eight reads a sparse checkpoint of Llama-3.3-70B's shape: its host memory
    collective  all-reduce, by bytes, in processes of their own; on GPUs with the norm behind it,
                by rows of Qwen3-32B (`bench.rank_sums`)
    steps       decode steps of --model, by ranks and rows, behind prompts of --context tokens (32)
                or as many as stand behind the rows; the wait for the slowest rank; on GPUs prompts
    hand-off    workers of unequal ranks, prompts of --context tokens (400): GB/s of the path, time
                to the first and the second token, and the exposed time of the hand-off
    kill        a rank of a decode worker is killed under a stream: the longest gap

The last two are in `bench.rank_workers`.

It runs on CPUs by default, with `bench/shapes/tiny`. On GPUs pass `--device cuda` and `--model
bench/shapes/llama-8b`, `qwen3-32b` or `llama-70b`. Weights are drawn, always the same. Each line is
printed as it is measured, and a table of all comes last.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import sparse_checkpoint
from bench.harness import table
from bench.rank_workers import hand_off, kill
from engine.config import EngineConfig
from engine.eager.collective import GlooCollective
from engine.engine import Engine
from engine.model import load_model
from engine.model.shard import Shard
from engine.types import (
    Event,
    Request,
    RequestFailed,
    SamplingParams,
    SequenceEnded,
    StopRules,
)

SHAPES = Path(__file__).with_name("shapes")
READ_RANKS = 8
COLLECTIVE_BYTES = [4 << 10, 64 << 10, 512 << 10, 2 << 20, 16 << 20]
ROUNDS = 50
COLLECTIVE_S = 300.0
"""Bound on all sums of so many ranks. A rank prints little, so none waits for its reader."""
ROWS = "1,16"
CONTEXT = 32
STEP_TOKENS = 40
PREFILL_TOKENS = 4096
PROMPTS = (128, 1024)
"""So many at once, and the tokens of each."""
Say = Callable[[dict[str, Any]], None]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--ranks", default="1,2,4", type=lambda text: list(map(int, text.split(",")))
    )
    parser.add_argument("--model", type=Path, default=SHAPES / "tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--context", type=int)
    parser.add_argument("--quantization", default="")
    parser.add_argument("--only", action="append", choices=PARTS, default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        CHILDREN[options.child[0]](*options.child[1:])
        return
    lines: list[dict[str, Any]] = []

    def say(line: dict[str, Any]) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)

    for part in options.only or PARTS:
        PARTS[part](options, partial(_say_of, part, say))
    _print_table(lines)
    if options.out:
        options.out.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def _print_table(lines: Sequence[dict[str, Any]]) -> None:
    """A table for each part: a row for each line."""
    for part in dict.fromkeys(line["part"] for line in lines):
        own = [line for line in lines if line["part"] == part]
        names = list(dict.fromkeys(name for line in own for name in line if name != "part"))
        rows = [[line.get(name, "") for name in names] for line in own]
        print(f"\n{part}\n{table([names, *rows])}")


def _say_of(part: str, say: Say, line: dict[str, Any]) -> None:
    say({"part": part, **line})


def _child(*arguments: object) -> subprocess.Popen[str]:
    """This module in a process of its own."""
    words = [sys.executable, "-m", "bench.ranks", "--child", *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


# -- reading ------------------------------------------------------------------------------------


def read(_: argparse.Namespace, say: Say) -> None:
    """One rank after the other would read the same amount: the first, and the last."""
    with tempfile.TemporaryDirectory(prefix="baton-sparse-") as folder:
        size = sparse_checkpoint.write(SHAPES / "llama-70b", Path(folder))
        for rank in (0, READ_RANKS - 1):
            say({"checkpoint_gb": size / 1e9, **read_rank(Path(folder), rank, READ_RANKS)})


def read_rank(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """A rank reads its part in a process of its own: seconds, and its peak of host memory."""
    child = _child("read", folder, rank, ranks)
    answer, _ = child.communicate()
    result: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return result


def _read_here(folder: str, rank: str, ranks: str) -> None:
    """Weights go to torch's `meta` device, which keeps nothing, in place of a GPU: what is left is
    the memory that a rank takes of its host. Pages of the mapped file are the kernel's and not
    counted: it takes them back when it needs room."""
    peak = _Peak()
    began_s = time.perf_counter()
    shard = Shard(int(rank), int(ranks))
    load_model(folder, dtype=torch.bfloat16, device=torch.device("meta"), shard=shard)
    took_s = time.perf_counter() - began_s
    print(json.dumps({"rank": int(rank), "s": took_s, "host_gib": peak.stop() / (1 << 30)}))


class _Peak:
    """The largest anonymous memory of this process, looked at every few milliseconds."""

    def __init__(self) -> None:
        import threading

        self._bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self._bytes

    def _look(self) -> None:
        while not self._over.wait(0.005):
            status = Path("/proc/self/status").read_text()
            anonymous = int(status.partition("RssAnon:")[2].split()[0]) << 10
            self._bytes = max(self._bytes, anonymous)


# -- the collective -----------------------------------------------------------------------------


def collective(options: argparse.Namespace, say: Say) -> None:
    """All ranks add up; the median of rank 0."""
    for ranks in options.ranks:
        if ranks == 1:
            continue
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            store = Path(folder) / "store"
            kind = "sums" if options.device == "cuda" else "collective"
            answer = _first_of([_child(kind, store, rank, ranks) for rank in range(ranks)])
        for line in answer.splitlines():
            say({"ranks": ranks, **json.loads(line)})


def _first_of(ranks: Sequence[subprocess.Popen[str]]) -> str:
    """What rank 0 printed. Where a rank fails, or they take too long, the program ends, and no rank
    is left: the others would wait for it."""
    until_s = time.monotonic() + COLLECTIVE_S
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            if failed := [number for number, code in enumerate(codes) if code]:
                raise SystemExit(f"rank {failed[0]} ended with code {codes[failed[0]]}")
            if None not in codes:
                return ranks[0].communicate()[0]
            if time.monotonic() > until_s:
                raise SystemExit(f"the ranks have not ended after {COLLECTIVE_S:.0f} s")
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _collective_here(store: str, rank: str, ranks: str) -> None:
    torch.set_num_threads(1)
    group = GlooCollective(int(rank), int(ranks))
    group.join(Path(store))
    for size in COLLECTIVE_BYTES:
        x = torch.ones(size // 4)
        times = []
        for _ in range(ROUNDS):
            group.barrier()
            began_s = time.perf_counter()
            group.all_reduce(x)
            times.append(time.perf_counter() - began_s)
        print(json.dumps({"bytes": size, "us": 1e6 * statistics.median(times)}), flush=True)


def _sums_here(store: str, rank: str, ranks: str) -> None:
    from bench.rank_sums import measure

    measure(Path(store), int(rank), int(ranks))


# -- steps --------------------------------------------------------------------------------------


def steps(options: argparse.Namespace, say: Say) -> None:
    """Decode steps of so many rows, all by one engine; on GPUs also the rates of prompts."""
    cases = _cases(options.rows, options.context or CONTEXT)
    for ranks in options.ranks:
        config = EngineConfig(
            model=str(options.model),
            load_format="dummy",
            device=options.device,
            tp=ranks,
            quantization=options.quantization,
            num_pages=max(rows * _pages(rows, context) for rows, context in cases)
            + PREFILL_TOKENS // 16
            + 8,
            max_sequences=max(rows for rows, _ in cases),
            prefix_cache=False,
        )
        engine, start = _started(config)
        line = {"model": options.model.name, "ranks": ranks}
        say({**line, **start})
        try:
            runs = _Runs(engine)
            for rows, context in cases:
                say({**line, "rows": rows, "context": context, **_step_times(runs, rows, context)})
            if options.device == "cuda":
                say({**line, "one_prompt_tokens_per_s": _prefill_rate(runs)})
                say({**line, "prompts_tokens_per_s": _prompts_rate(runs)})
        finally:
            engine.stop()


def _started(config: EngineConfig) -> tuple[Engine, dict[str, float]]:
    """An engine, and when rank 0 had done the first and the last part of each phase of its start.

    Between the last weights and the first graph it waits until the others have loaded, and joins
    them. The imports of their processes count, and those of this process do not.
    """
    began_s = time.monotonic()
    done_s: dict[str, float] = {}

    def progress(phase: str, _done: int, _total: int) -> None:
        done_s[f"{phase}_s"] = time.monotonic() - began_s
        done_s.setdefault(f"first_{phase}_s", done_s[f"{phase}_s"])

    engine = Engine.build(config, progress)
    return engine, {**done_s, "ready_s": time.monotonic() - began_s}


def _cases(text: str, context: int) -> list[tuple[int, int]]:
    """Rows and the tokens of their prompts: `1,64x1152`."""
    pairs = [one.partition("x") for one in text.split(",")]
    return [(int(rows), int(own or context)) for rows, _, own in pairs]


def _tokens(rows: int, context: int) -> int:
    """Of each answer: so many that all decode together, after the last prompt."""
    return STEP_TOKENS + rows * context // 1024


def _pages(rows: int, context: int) -> int:
    return (context + _tokens(rows, context)) // 16 + 4


class _Runs:
    """An engine, and the seconds of its steps by the rows that they decode."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.times: defaultdict[int, list[float]] = defaultdict(list)
        engine.start(lambda seconds, decoded: self.times[decoded].append(seconds))

    def finish(self, rows: int, context: int, tokens: int) -> None:
        """Runs so many requests at once."""
        ends: queue.SimpleQueue[SequenceEnded | RequestFailed] = queue.SimpleQueue()

        def sink(events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, SequenceEnded | RequestFailed):
                    ends.put(event)

        for row in range(rows):
            prompt = np.random.default_rng(row).integers(5, 4000, context).astype(np.int32)
            stop = StopRules(max_tokens=tokens, ignore_eos=True)
            greedy = SamplingParams(temperature=0.0)
            self.engine.submit(Request(row.to_bytes(16, "big"), prompt, greedy, stop), sink)
        for _ in range(rows):
            if isinstance(ended := ends.get(), RequestFailed):
                raise SystemExit(f"a request failed: {ended.reason}")


def _step_times(runs: _Runs, rows: int, context: int) -> dict[str, float]:
    runs.times.clear()
    runs.finish(rows, context, _tokens(rows, context))
    times = runs.times[rows]
    figures = {"step_ms": 1e3 * statistics.median(times), "steps": len(times)}
    ranks = runs.engine.ranks
    if ranks.skew_s is not None:
        load = ranks.loads()[0]
        figures["skew_ms"] = 1e3 * ranks.skew_s / load.steps
        if load.busy_s and load.waited_s:  # Nobody knows the first on GPUs.
            figures["waited_share"] = load.waited_s / (load.waited_s + load.busy_s)
    return figures


def _prompts_rate(runs: _Runs) -> float:
    """Of many prompts at once."""
    began_s = time.perf_counter()
    runs.finish(*PROMPTS, 1)
    return math.prod(PROMPTS) / (time.perf_counter() - began_s)


def _prefill_rate(runs: _Runs) -> float:
    """Of prompts that come one after the other, from the request to the first token."""
    times = []
    for _ in range(5):
        began_s = time.perf_counter()
        runs.finish(1, PREFILL_TOKENS, 1)
        times.append(time.perf_counter() - began_s)
    return PREFILL_TOKENS / statistics.median(times)


PARTS = {
    "read": read,
    "collective": collective,
    "steps": steps,
    "hand-off": hand_off,
    "kill": kill,
}
CHILDREN: dict[str, Callable[..., None]] = {
    "read": _read_here,
    "collective": _collective_here,
    "sums": _sums_here,
}

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
