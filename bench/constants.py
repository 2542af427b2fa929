"""What tuning constants gain, on loads that they were not tuned on: a virtual device and clock.

python -m bench.constants [--only widths launches late states] [--draws 3] [--json FILE]
python -m bench.constants --gpu                   those of kernels: `bench.kernel_constants`

The product's own classes choose; the device is made up. A decode worker has rows by the arrivals of
a load. Its step takes `WEIGHTS_S`, and more for each token of KV and each column. That is near one
H200 with a model of 8B in bf16: at 64 rows of 1,152 tokens, 0.8 accepted, such a device gains 2.16
by steps of four tokens, and the real one gained 2.10.

    widths      output tokens a second of the busy time, by the constants of `MeasuredWidths`
    launches    p50 and p90 of the time until the first step with a request ends, and the share
                of the time in which the device idles, by those of `LaunchPacer`
    late        mean time until a request has its pages, or has given them up and computed them,
                by `LATE` of the tiers' copies and the fetches from peers
    states      first token of a conversation's next turn, and the share of decoding that keeping
                states takes, by `DECODED_TOKENS`. States of Qwen3-Next, 64 rows, messages of 100
                tokens

A line has one constant changed; `never` takes its rule away. Loads: lengths of the Azure
conversation trace, log-normal ones (mean 2,048 tokens in), and `agents`, with few rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

from bench.harness import table, write_json
from console.loadgen.trace_files import read_trace
from engine.averages import averaged
from engine.groups import state
from engine.loop import pacing
from engine.speculation import measured
from engine.step.plan import StepPlan, StepResult
from engine.tiers import lanes

WEIGHTS_S: Final = 4.1e-3
"""A step of no rows reads the weights: one row takes so long (`bench.engine`, one H200)."""
KV_TOKEN_S: Final = 3.2e-8
COLUMN_S: Final = 1.4e-5
"""Time of a token in KV, and of a computed token: what 64 x (1024 + 256) and 256 x (128 + 512)
leave of a step there."""
PROMPT_TOKEN_S: Final = 2.5e-5
"""Time of a prompt's token: 40,000 a second. A step is not shorter than that of one row."""
STATE_BYTES, COPIED_BYTES_S = 77e6, 1.65e12
"""State of a sequence of Qwen3-Next, and how many a device reads and writes a second."""
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NOTHING: Final = np.zeros(0, np.int32)
NEVER: Final = 10**9
REQUESTS: Final = 1200


class Load(NamedTuple):
    """Requests that come to one decode worker."""

    lengths: str
    """`azure` or `lognormal`."""
    rate: float
    """Requests a second."""
    acceptance: tuple[float, ...]
    """Acceptance of a draft, by kind of request. A request is of one kind; every `phase_s` another
    kind is the usual one."""
    phase_s: float


LOADS: Final = {
    "azure": Load("azure", 60.0, (0.15, 0.88), 8.0),
    "lognormal": Load("lognormal", 40.0, (0.1, 0.5, 0.8), 11.0),
    "azure, full": Load("azure", 150.0, (0.1, 0.88), 6.0),
    "lognormal, full": Load("lognormal", 100.0, (0.1, 0.5, 0.8), 8.0),
    "agents": Load("azure", 2.0, (0.49, 0.52, 0.88), 5.0),
}
"""Acceptance of SmolLM2's code, copies and edits with the suffix drafter was 0.49, 0.52 and 0.88.
Full: 256 rows all the time."""


class Sequences:
    """Sequences that decode, by columns."""

    def __init__(self, load: Load, requests: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.arrived_s = rng.exponential(1 / load.rate, requests).cumsum()
        if load.lengths == "azure":
            rows = read_trace("azure-conversation")
            picked = rng.integers(len(rows), size=requests)
            self.kv = np.array([rows[i].prompt_tokens for i in picked])
            self.left = np.array([max(2, rows[i].output_tokens) for i in picked])
        else:
            self.kv = rng.lognormal(math.log(2048) - 0.32, 0.8, requests).astype(int)
            self.left = rng.lognormal(math.log(256) - 0.32, 0.8, requests).astype(int) + 2
        kinds = len(load.acceptance)
        usual = (self.arrived_s / load.phase_s).astype(int) % kinds
        other = rng.integers(kinds, size=requests)
        kind = np.where(rng.random(requests) < 0.9, usual, other)
        self.acceptance = np.array(load.acceptance)[kind]
        self.came = 0

    def running(self, now_s: float, most: int) -> np.ndarray[Any, Any]:
        """Indices of at most so many that have come and are not done."""
        self.came = int(np.searchsorted(self.arrived_s, now_s, "right"))
        return np.flatnonzero(self.left[: self.came] > 0)[:most]


def _plan(width: int, contexts: np.ndarray[Any, Any]) -> StepPlan:
    rows, none = len(contexts), NOTHING
    ids = np.zeros(rows * width, np.int32)
    lens = contexts.astype(np.int32)
    return StepPlan(
        0, ids, ids, ids, ids, lens, rows, none, none, none, none, none, None,
        none, none, none, none,
        width=width,
    )  # fmt: skip


def _step_s(rng: np.random.Generator, kv: float, columns: int) -> float:
    usual_s = WEIGHTS_S + KV_TOKEN_S * kv + COLUMN_S * columns
    return usual_s * rng.lognormal(0.0, 0.02) + (rng.random() < 0.01) * 2e-3


def widths(load: Load, seed: int, fixed: int | None) -> dict[str, float]:
    """Decodes all requests; `fixed`: always with that width."""
    rng, sequences = np.random.default_rng(seed), Sequences(load, REQUESTS, seed)
    times = {
        (rows, width): WEIGHTS_S + COLUMN_S * rows * width for rows in SIZES for width in (1, 2, 4)
    }
    chooser = measured.MeasuredWidths(times)
    now_s = busy_s = tokens = 0.0
    while len(rows := sequences.running(now_s, SIZES[-1])) or sequences.came < REQUESTS:
        if not len(rows):
            now_s = sequences.arrived_s[sequences.came]
            continue
        width = chooser.choose(len(rows), 8) if fixed is None else fixed
        accepted = rng.random((len(rows), width - 1)) < sequences.acceptance[rows, None]
        counts = 1 + np.cumprod(accepted, axis=1).sum(axis=1).astype(np.int32)
        step = _plan(width, sequences.kv[rows])
        step_s = _step_s(rng, float(sequences.kv[rows].sum()), len(rows) * width)
        result = StepResult(NOTHING, NOTHING > 0, None, None, None, counts=counts)
        chooser.settled(step, result, step_s)
        tokens += float(np.minimum(counts, sequences.left[rows]).sum())
        sequences.kv[rows] += counts
        sequences.left[rows] -= counts
        now_s, busy_s = now_s + step_s, busy_s + step_s
    return {"tokens/s": tokens / busy_s}


class Clock:
    """The virtual time, in seconds."""

    now_s = 0.0

    def __call__(self) -> float:
        """Reads it."""
        return self.now_s


def launches(load: Load, seed: int, _: int | None) -> dict[str, float]:
    """Launches steps as the pacer says. The host wakes 0.1 ms late, and one time in ten 0.5 ms
    later. A launch takes it 0.6 ms and 4 us a row, spread log-normally, and 3 to 6 ms once in 60
    times, as where another thread has the interpreter."""
    rng, sequences = np.random.default_rng(seed), Sequences(load, REQUESTS, seed)
    clock = Clock()
    pacer = pacing.LaunchPacer(clock)
    waits_s: list[float] = []
    idle_s = began_s = ends_s = asked_s = 0.0
    step = _plan(1, np.zeros(1))
    joined = 0
    while len(rows := sequences.running(clock.now_s, SIZES[-1])) or sequences.came < REQUESTS:
        if not len(rows):
            clock.now_s = began_s = ends_s = float(sequences.arrived_s[sequences.came])
            continue
        clock.now_s += pacer.wait_s(step, began_s, 0.0)
        clock.now_s += rng.exponential(1e-4) + (rng.random() < 0.1) * rng.exponential(5e-4)
        rows = sequences.running(clock.now_s, SIZES[-1])
        came = sequences.arrived_s[joined : sequences.came]
        joined = sequences.came
        woke_s = clock.now_s
        slow_s = rng.uniform(3e-3, 6e-3) if rng.random() < 1 / 60 else 0.0
        clock.now_s += (6e-4 + 4e-6 * len(rows)) * rng.lognormal(0.0, 0.2) + slow_s
        dry_s = max(0.0, clock.now_s - ends_s)
        took_s, began_s = ends_s - began_s, max(woke_s, ends_s)
        clock.now_s = device_s = max(clock.now_s, ends_s)
        if took_s > 0:
            pacer.settled(step, took_s, dry_s)
            idle_s += dry_s
        step = _plan(1, sequences.kv[rows])
        ends_s = device_s + _step_s(rng, float(sequences.kv[rows].sum()), len(rows))
        waits_s += (ends_s - came).tolist()
        asked_s += ends_s - device_s
        sequences.kv[rows] += 1
        sequences.left[rows] -= 1
    p50, p90 = np.percentile(waits_s, [50, 90])
    return {"p50 ms": 1e3 * p50, "p90 ms": 1e3 * p90, "idle %": 100 * idle_s / (idle_s + asked_s)}


def late(load: Load, seed: int, _: int | None) -> dict[str, float]:
    """Loads prompts from a store that gives 1 GB/s in the mean, spread log-normally, and of which
    one copy in 200 hangs for up to 20 s. To compute a prompt takes three times the usual copy."""
    rng, sequences = np.random.default_rng(seed), Sequences(load, REQUESTS, seed)
    rate, total_s = 0.0, 0.0
    for tokens in sequences.kv:
        size = float(tokens) * 131072
        took_s = size / 1e9 * rng.lognormal(0.0, 0.35)
        took_s += rng.uniform(0.0, 20.0) if rng.random() < 1 / 200 else 0.0
        expected_s = size / (rate or 1e9)
        limit_s = max(lanes.LATE * expected_s, lanes.LEAST_DEADLINE_S)
        total_s += min(took_s, limit_s + 3 * expected_s) if took_s > limit_s else took_s
        rate = averaged(rate, size / took_s)
    return {"mean ms": 1e3 * total_s / len(sequences.kv)}


def states(load: Load, seed: int, _: int | None) -> dict[str, float]:
    """Each answer is followed by a turn. It begins where a state was kept: at the prompt's end, or
    at the last multiple of `DECODED_TOKENS` in the answer."""
    sequences = Sequences(load, REQUESTS, seed)
    ends = sequences.kv + sequences.left
    kept = np.maximum(sequences.kv, ends // state.DECODED_TOKENS * state.DECODED_TOKENS)
    first_s = np.maximum(WEIGHTS_S, PROMPT_TOKEN_S * (ends - kept + 100.0))
    saves = ends // state.DECODED_TOKENS - sequences.kv // state.DECODED_TOKENS
    token_s = WEIGHTS_S / 64 + KV_TOKEN_S * sequences.kv + COLUMN_S
    share = saves.sum() * STATE_BYTES / COPIED_BYTES_S / (token_s * sequences.left).sum()
    p50, p90 = np.percentile(1e3 * first_s, [50, 90])
    return {"p50 ms": p50, "p90 ms": p90, "mean ms": 1e3 * first_s.mean(), "%": 100 * share}


class Varied(NamedTuple):
    """A group of constants."""

    run: Callable[[Load, int, int | None], dict[str, float]]
    module: ModuleType
    loads: tuple[str, ...]
    values: dict[str, list[float]]
    """Other values of each."""


VARIED: Final = {
    "widths": Varied(
        widths, measured, ("azure, full", "lognormal, full", "agents"),
        {"width": [1, 2, 4], "PROBE_STEPS": [16, 256, NEVER]},
    ),
    "launches": Varied(
        launches, pacing, ("azure", "lognormal", "agents"),
        {"IDLE_SHARE": [0.003, 0.03], "LEARNT": [0.0, 0.03, 0.5]},
    ),
    "late": Varied(late, lanes, ("azure", "lognormal"), {"LATE": [1.2, 4.0, NEVER]}),
    "states": Varied(
        states, state, ("azure", "lognormal"), {"DECODED_TOKENS": [16, 64, 128, 512, NEVER]}
    ),
}  # fmt: skip


@contextmanager
def changed(module: ModuleType, name: str, value: float) -> Iterator[None]:
    """The constant has this value meanwhile."""
    before = getattr(module, name, None)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def simulate(group: Varied, name: str, value: float, draws: int) -> dict[str, float]:
    """Medians over the draws, by load and figure."""
    fixed = int(value) if name == "width" else None
    found: dict[str, float] = {}
    with changed(group.module, name, value):
        for load in group.loads:
            runs = [group.run(LOADS[load], seed, fixed) for seed in range(draws)]
            for figure in runs[0]:
                found[f"{load}: {figure}"] = float(np.median([one[figure] for one in runs]))
    return found


def main() -> None:
    """Prints a table for each group."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.gpu:
        from bench.kernel_constants import measure

        write_json(arguments.json, measure(arguments.only))
        return
    found = {}
    for name in arguments.only or VARIED:
        group, lines = VARIED[name], list[list[object]]()
        changes = [("as it is", 0.0)]
        changes += [(of, value) for of, values in group.values.items() for value in values]
        for of, value in changes:
            word = of if of == "as it is" else f"{of} {'never' if value == NEVER else value}"
            found[f"{name}: {word}"] = figures = simulate(group, of, value, arguments.draws)
            lines = lines or [[name, *figures]]
            lines.append([word, *figures.values()])
        print(table(lines) + "\n", flush=True)
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
