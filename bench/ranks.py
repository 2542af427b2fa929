"""What several ranks cost and gain: everything that two or four GPUs are wanted for, in one call.

python -m bench.ranks [--ranks 1,2,4] [--model FOLDER] [--device cuda] [--only PART]...
    [--rows 1,16] [--context 32] [--out FILE.json]

Parts:

    read        a rank of eight reads a sparse checkpoint of Llama-3.3-70B's shape: its host memory
    collective  all-reduce, by bytes, in processes of their own; on GPUs with the norm behind it,
                by rows of Qwen3-32B (`bench.rank_sums`)
    steps       decode steps of --model, by ranks and rows, behind prompts of --context tokens; and
                the wait for the slowest rank
    hand-off    workers of unequal ranks: GB/s of the path, time to the first and the second token
    kill        a rank of a decode worker is killed under a stream: the longest gap

It runs on CPUs by default, with `bench/shapes/tiny`. On GPUs pass `--device cuda` and `--model
bench/shapes/llama-8b`, `qwen3-32b` or `llama-70b`. Weights are drawn, always the same. Each line is
printed as it is measured, and a table of all comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from baton.client.clients import Client
from baton.console import up
from bench import sparse_checkpoint
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model import load_model
from engine.model.shard import Shard
from engine.ranks.collective import GlooCollective
from engine.types import (
    Event,
    Request,
    RequestFailed,
    SamplingParams,
    SequenceEnded,
    StopRules,
)
from worker.settings import Role

SHAPES = Path(__file__).with_name("shapes")
READ_RANKS = 8
COLLECTIVE_BYTES = [4 << 10, 64 << 10, 512 << 10, 2 << 20, 16 << 20]
ROUNDS = 50
ROWS = (1, 16)
CONTEXT = 32
STEP_TOKENS = 40
PREFILL_TOKENS = 4096
PROMPT_TOKENS = 400
Say = Callable[[dict[str, Any]], None]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--ranks", default="1,2,4", type=lambda text: list(map(int, text.split(",")))
    )
    parser.add_argument("--model", type=Path, default=SHAPES / "tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", default=ROWS, type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--context", default=CONTEXT, type=int)
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
        cells = [names, *([_cell(line.get(name, "")) for name in names] for line in own)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        print(f"\n{part}")
        for row in cells:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
            children = [_child(kind, store, rank, ranks) for rank in range(ranks)]
            answers = [child.communicate()[0] for child in children]
        for child in children:
            if child.returncode:
                raise SystemExit(f"a rank ended with code {child.returncode}")
        for line in answers[0].splitlines():
            say({"ranks": ranks, **json.loads(line)})


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
    """Decode steps of so many rows, all by one engine; on GPUs also the prefill of long prompts."""
    for ranks in options.ranks:
        config = EngineConfig(
            model=str(options.model),
            load_format="dummy",
            device=options.device,
            tp=ranks,
            num_pages=max(rows * _pages(rows, options.context) for rows in options.rows)
            + PREFILL_TOKENS // 16
            + 8,
            max_sequences=max(options.rows),
            prefix_cache=False,
        )
        engine = Engine.build(config)
        line = {"model": options.model.name, "ranks": ranks}
        try:
            runs = _Runs(engine)
            for rows in options.rows:
                say({**line, "rows": rows, **_step_times(runs, rows, options.context)})
            if options.device == "cuda":
                say({**line, "prefill_tokens_per_s": _prefill_rate(runs)})
        finally:
            engine.stop()


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
    if loads := ranks.loads():
        seconds = loads[0].waited_s + loads[0].busy_s
        if seconds:  # Nobody measures it on GPUs.
            figures["skew_ms"] = 1e3 * ranks.skew_s / loads[0].steps
            figures["waited_share"] = loads[0].waited_s / seconds
    return figures


def _prefill_rate(runs: _Runs) -> float:
    """Of prompts that come one after the other, from the request to the first token."""
    times = []
    for _ in range(5):
        began_s = time.perf_counter()
        runs.finish(1, PREFILL_TOKENS, 1)
        times.append(time.perf_counter() - began_s)
    return PREFILL_TOKENS / statistics.median(times)


# -- workers ------------------------------------------------------------------------------------


def hand_off(options: argparse.Namespace, say: Say) -> None:
    """Every pair of different ranks."""
    for prefill in options.ranks:
        for decode in options.ranks:
            ranks = {Role.PREFILL: prefill, Role.DECODE: decode}
            figures = asyncio.run(_with_workers(_plan(options, 1, ranks), _ask))
            say({"prefill_ranks": prefill, "decode_ranks": decode, **figures})


def kill(options: argparse.Namespace, say: Say) -> None:
    """The last rank of a decode worker, of two, dies under a stream."""
    for ranks in options.ranks:
        if ranks > 1:
            plan = _plan(options, 2, {Role.DECODE: ranks})
            say({"ranks": ranks, **asyncio.run(_with_workers(plan, _kill_under_stream))})


def _plan(options: argparse.Namespace, decode: int, ranks: dict[Role, int | None]) -> up.UpPlan:
    what = up.UpOptions(
        model=str(options.model),
        decode=decode,
        tp_of=ranks,
        device=options.device,
        trace=False,
        grpc_port=0,
        http_port=0,
        admin_port=0,
        drain_s=5.0,
        kv_memory_gib=0.25,
    )
    plan = up.plan(what)
    dummy = {"BATON_DEBUG_LOAD_FORMAT": "dummy"}
    specs = [replace(one, environment={**one.environment, **dummy}) for one in plan.specs]
    return replace(plan, specs=tuple(specs))


async def _with_workers(
    plan: up.UpPlan, do: Callable[[up.UpPlan, Any], dict[str, Any]]
) -> dict[str, Any]:
    async with up.running(plan, lambda name, line: None) as supervisor:
        await up.wait_until_ready(plan, supervisor)
        return await asyncio.to_thread(do, plan, supervisor)


def _ask(plan: up.UpPlan, _: Any) -> dict[str, Any]:
    with Client(plan.router_address, timeout_s=300) as client:
        gaps = [_gaps(client, seed) for seed in range(5)]
    return {
        "gb_per_s": _metric(plan, "prefill-0", "baton_kv_peer_bytes_per_second") / 1e9,
        "first_token_ms": 1e3 * statistics.median(first for first, *_ in gaps),
        "second_token_ms": 1e3 * statistics.median(second for _, second, *_ in gaps),
    }


def _gaps(client: Client, seed: int, tokens: int = 8) -> list[float]:
    """Seconds to the first token and from each to the next."""
    prompt = np.random.default_rng(seed).integers(5, 4000, PROMPT_TOKENS).tolist()
    times = [time.perf_counter()]
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    with client.stream(token_ids=prompt, **options) as stream:
        times += [time.perf_counter() for _ in stream]
    return np.diff(times).tolist()


def _kill_under_stream(plan: up.UpPlan, supervisor: Any) -> dict[str, Any]:
    import threading

    def strike() -> None:
        time.sleep(1.0)
        for name, pid in supervisor.pids().items():
            if name.startswith("decode"):
                _other_ranks(pid)[-1].kill()
                return

    with Client(plan.router_address, timeout_s=300) as client:
        usual_s = max(_gaps(client, 1, 200)[1:])
        striking = threading.Thread(target=strike)
        striking.start()
        gaps: list[float] = []
        while striking.is_alive():
            gaps += _gaps(client, 2, 2000)
        striking.join()
    return {"usual_longest_gap_ms": 1e3 * usual_s, "longest_gap_ms": 1e3 * max(gaps)}


def _other_ranks(pid: int) -> Sequence[psutil.Process]:
    children = psutil.Process(pid).children()
    return [child for child in children if "engine.ranks" in child.cmdline()]


def _metric(plan: up.UpPlan, worker: str, name: str) -> float:
    """The largest of a metric's samples."""
    address = dict(plan.worker_admin_addresses)[worker]
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    found = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)]
    return max(found, default=0.0)


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
