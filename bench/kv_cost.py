"""What sending KV costs those who compute meanwhile: the sender's prefill, the receiver's decode.

python -m bench.kv_cost [--ways nixl "nixl, bare"] [--paced 5.5] [--repeats 3] [--device cuda]
                        [--model FOLDER] [--prompt 8000] [--batch 64] [--context 1024]
                        [--output 256] [--page-mib 2] [--burst-mib 256] [--json FILE]

Two processes, a GPU each. The sender's engine prefills one prompt of `prompt` tokens after the
other; the receiver's decodes `batch` sequences of `context` tokens for `output` steps. Meanwhile a
thread of the sender pushes bursts of scattered pages, from and into memory beside the engines'
pools: at `paced` GB/s, which is about what one saturated prefill worker sends, then as fast as
each way goes (`nixl, bare` is the raw transfer; ways as in `bench.kv_wire`). Quiet and sending
phases take turns.

A table: GB/s sent, the median prefill and decode step of each phase over all repeats, and how much
longer than in the quiet one. Steps that compute the batch's prompts do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.engine import SHAPE, Case, run_case
from bench.kv_pushes import Pipe, scattered
from bench.kv_wire import (
    Side,
    in_two_processes,
    prepared,
    push_bare,
    push_ours,
)
from engine.config import EngineConfig
from engine.engine import Engine
from kv_transfer.nccl.groups import RECEIVER

POLL_S = 2e-4
"""How often a worker's transfer thread polls."""
SETTLING_STEPS = 8
"""Of a batch, at its begin, that do not count beside those with prompts."""
START_S = 150.0
PHASE_S = 60.0
"""Bounds: of loading the model and compiling, and of one phase."""


class Phase(NamedTuple):
    """What is sent, and how fast."""

    name: str
    way: str = ""
    """As in `bench.kv_wire`; "": nothing is sent."""
    gigabytes_per_s: float = 0.0
    """0: as fast as it goes."""


class Sending(threading.Thread):
    """Pushes bursts until it is told to stop."""

    def __init__(self, side: Side, other: dict[str, Any], phase: Phase) -> None:
        super().__init__(daemon=True)
        self.sent_bytes = 0
        self._side, self._other, self._phase = side, other, phase
        self._over = threading.Event()

    def run(self) -> None:
        """See the class."""
        rng = np.random.default_rng(0)
        num_pages, page_bytes = self._side.pool.shape
        burst_bytes = num_pages // 2 * page_bytes
        due_s = time.perf_counter()
        while not self._over.wait(max(0.0, due_s - time.perf_counter())):
            source, target = (scattered(rng, num_pages, num_pages // 2, 1) for _ in range(2))
            if "bare" in self._phase.way:
                push_bare(self._side, self._other, source, target)
            else:
                push_ours(self._side, self._other, self._phase.way, source, target)
            self.sent_bytes += burst_bytes
            if rate := self._phase.gigabytes_per_s:
                due_s += burst_bytes / rate / 1e9

    def stop(self) -> int:
        """Bytes sent."""
        self._over.set()
        self.join(PHASE_S)
        return self.sent_bytes


def build(settings: Mapping[str, Any]) -> Engine:
    """An engine with dummy weights."""
    engine = Engine.build(
        EngineConfig(
            model=settings["model"],
            load_format="dummy",
            device=settings["device"],
            kv_memory_bytes=settings["kv_gib"] << 30,
            max_sequences=settings["batch"],
            prefix_cache=False,
        )
    )
    engine.start()
    return engine


def decode_steps_ms(engine: Engine, settings: Mapping[str, Any], seed: int) -> list[float]:
    """One batch; its steps once every sequence decodes."""
    case = Case(settings["batch"], settings["context"], settings["output"], 0, 0, 0)
    _, watch = run_case(engine, case, seed)
    gaps = 1e3 * np.diff(watch.step_times)
    found: list[float] = gaps[-(settings["output"] - SETTLING_STEPS) :].tolist()
    return found


def receive(side: Side, pipe: Pipe, settings: Mapping[str, Any]) -> None:
    """Decodes a batch whenever it is asked to."""
    engine = build(settings)
    threading.Thread(target=_poll, args=(side,), daemon=True).start()
    decode_steps_ms(engine, settings, seed=1)
    pipe.send("ready")
    while seed := pipe.recv():
        pipe.send(decode_steps_ms(engine, settings, seed))


def _poll(side: Side) -> None:
    while True:
        side.poll(side.ours)
        time.sleep(POLL_S)


def send(
    side: Side, other: dict[str, Any], pipe: Pipe, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Every phase, as often as asked for."""
    engine = build(settings)
    prompt = Case(1, settings["prompt"], 1, 0, 0, 0)
    run_case(engine, prompt, seed=1)
    assert pipe.poll(START_S), "the receiver is not ready"
    pipe.recv()
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for repeat in range(settings["repeats"]):
        for number, phase in enumerate(phases(settings)):
            seed = 1000 * (repeat + 1) + number * 100
            for name, values in one_phase(side, other, pipe, engine, prompt, phase, seed).items():
                found[phase.name][name] += values
    return {name: dict(values) for name, values in found.items()}


def one_phase(
    side: Side, other: dict[str, Any], pipe: Pipe, engine: Engine, prompt: Case, phase: Phase,
    seed: int,
) -> dict[str, list[float]]:  # fmt: skip
    """Prefills until the receiver's batch is through."""
    sending = Sending(side, other, phase)
    began_s = time.perf_counter()
    if phase.way:
        sending.start()
    pipe.send(seed)
    prefills = []
    while not pipe.poll() and time.perf_counter() - began_s < PHASE_S:
        seed += 1
        prefills.append(1e3 * run_case(engine, prompt, seed)[0])
    sent = sending.stop() if phase.way else 0
    took_s = time.perf_counter() - began_s
    assert pipe.poll(PHASE_S), "the receiver's batch did not end"
    return {"prefill_ms": prefills, "step_ms": pipe.recv(), "sent": [sent / took_s / 1e9]}


def phases(settings: Mapping[str, Any]) -> list[Phase]:
    """Quiet, paced, then each way at its full rate."""
    ways, rate = settings["ways"], settings["paced"]
    paced = Phase(f"{ways[0]} @ {rate:g}", ways[0], rate)
    return [Phase("quiet"), paced, *(Phase(way, way) for way in ways)]


def run(rank: int, pipe: Pipe, out: Any, settings: Mapping[str, Any]) -> None:
    """One process."""
    if settings["device"] == "cpu":
        torch.set_num_threads(1)
    side, other = prepared(rank, pipe, settings)
    if rank == RECEIVER:
        receive(side, pipe, settings)
        os._exit(0)  # as in `bench.kv_wire`
    out.put(send(side, other, pipe, settings))
    pipe.send(0)
    time.sleep(0.5)
    os._exit(0)


def summary(found: Mapping[str, Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    """A row a phase."""
    quiet = found["quiet"]
    rows = []
    for name, values in found.items():
        row: dict[str, Any] = {"phase": name, "sent_gigabytes_per_s": np.mean(values["sent"])}
        for key in ("prefill_ms", "step_ms"):
            row[key] = statistics.median(values[key])
            row[f"{key}_p99"] = float(np.percentile(values[key], 99))
            row[f"{key}_longer"] = row[key] / statistics.median(quiet[key]) - 1
            row[f"{key}_count"] = len(values[key])
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    print(f"{'':16} {'GB/s':>6} {'prefill':>12} {'':>7} {'decode step':>12} {'':>7} {'p99':>8}")
    for row in rows:
        print(
            f"{row['phase']:16} {row['sent_gigabytes_per_s']:6.1f}"
            f" {row['prefill_ms']:9.2f} ms {row['prefill_ms_longer']:+7.1%}"
            f" {row['step_ms']:9.3f} ms {row['step_ms_longer']:+7.1%} {row['step_ms_p99']:8.3f}"
        )


def main() -> None:
    """Measures, writes, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=["nixl", "nixl, bare"])
    parser.add_argument("--paced", type=float, default=5.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", default=str(SHAPE))
    parser.add_argument("--kv-gib", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--page-mib", type=float, default=2)
    parser.add_argument("--burst-mib", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = {
        **vars(arguments), "json": None,
        "page": int(arguments.page_mib * (1 << 20)), "total": arguments.burst_mib << 20,
    }  # fmt: skip
    timeout_s = 2 * START_S + PHASE_S * arguments.repeats
    rows = summary(in_two_processes(run, settings, timeout_s))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    show(rows)


if __name__ == "__main__":
    main()
