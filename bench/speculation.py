"""What verifying drafts brings one engine on a GPU, in turns with an engine without.

    python -m bench.speculation [--precisions bf16 fp8] [--cases NAME ...] [--repeats 5]
                                [--copying] [--profile] [--json FILE]

Dummy weights of the 8B shape, greedy, lengths forced, three drafts a row. Random weights accept
nothing, so `debug.synthetic_acceptance` accepts each draft with a probability: the device does all
of the work, and what it says has no meaning. `off` is an engine without drafts, `one` the other
engine with steps of one token a row: what it costs to have drafts configured.

Columns: output tokens a second of the whole run, from the first submission; and the decode rate,
from the first token of the last sequence to the end of the first sequence. `x` is the ratio to
`off`, medians of the repeats. `tokens` are those of a row and step, `width` that of most steps.

`--copying`: one row, seven drafts of the suffix drafter whose matches all hold (a probability of
0.97), as in an answer that copies its prompt. `--profile`: the kernels of a step of four tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from engine.bounds import UNBOUNDED
from engine.config import EngineConfig
from engine.engine import Engine
from engine.step.plan import StepPlan, StepResult
from engine.types import (
    Event,
    NewTokens,
    Request,
    RequestFailed,
    SamplingParams,
    SequenceEnded,
    StopRules,
)

SHAPE: Final = Path(__file__).parent / "shapes" / "llama-8b"
PRECISIONS: Final[dict[str, dict[str, Any]]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "fp8+kv": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
CASES: Final = {"1": (1, 128, 256), "64": (64, 1024, 256), "256": (256, 128, 256)}
"""Rows, tokens of prompts, of outputs."""
ALPHAS: Final = (0.8, 0.6)
DRAFTS: Final = 3
COPIED: Final = 7
COPYING: Final = 0.97
KV_TOKENS: Final = 110_000


class Watch:
    """The sink of all requests of a run."""

    def __init__(self, expected: int) -> None:
        self.done = threading.Event()
        self.failed = False
        self._left, self._expected = expected, expected
        self._started: set[bytes] = set()
        self._all_started = self._first_end = 0.0
        self._tokens = 0

    def __call__(self, events: Sequence[Event]) -> None:
        """See `engine.types.Sink`."""
        now = time.perf_counter()
        for event in events:
            if isinstance(event, NewTokens):
                self._count(event, now)
            if isinstance(event, RequestFailed):
                self.failed = True
            if isinstance(event, SequenceEnded | RequestFailed):
                self._left -= 1
                self._first_end = self._first_end or now
        if self._left == 0:
            self.done.set()

    def _count(self, event: NewTokens, now: float) -> None:
        if not self._all_started:
            self._started.update(event.request_ids)
            if len(self._started) == self._expected:
                self._all_started = now
        elif not self._first_end:
            self._tokens += len(event.token_ids)

    @property
    def decode_rate(self) -> float:
        """Tokens a second while all sequences decode."""
        return self._tokens / max(self._first_end - self._all_started, 1e-9)


class Steps:
    """Listens to the steps of an engine with drafts."""

    def __init__(self, engine: Engine) -> None:
        self.widths: Counter[int] = Counter()
        self.tokens = self.rows = 0
        settler = engine._loop._scheduler.settler
        settle = settler.settle

        def heard(plan: StepPlan, result: StepResult, *rest: Any) -> None:
            if plan.num_decodes and result.counts is not None:
                self.widths[plan.width] += 1
                self.tokens += int(result.counts[: plan.num_decodes].sum())
                self.rows += plan.num_decodes
            settle(plan, result, *rest)

        settler.settle = heard  # type: ignore[method-assign,assignment]

    def take(self) -> tuple[float, int]:
        """Tokens of a row and step, and the commonest width, since the last call."""
        width = self.widths.most_common(1)[0][0] if self.widths else 0
        tokens = self.tokens / max(self.rows, 1)
        self.widths.clear()
        self.tokens = self.rows = 0
        return tokens, width


class One:
    """Steps of one token a row."""

    most = 1

    def choose(self, rows: int, room: int) -> int:
        """See `engine.speculation.widths.Widths`."""
        return 1

    def settled(self, *_: object) -> None:
        """Learns nothing."""


def build(precision: str, drafts: int, sequences: int = 256) -> Engine:
    """An engine, ready; 0 drafts: without."""
    begin = time.perf_counter()
    options: dict[str, Any] = dict(PRECISIONS[precision])
    if drafts:
        options |= {
            "speculation": "suffix", "draft_tokens": drafts, "synthetic_acceptance": ALPHAS[0]
        }  # fmt: skip
    config = EngineConfig(
        model=str(SHAPE), load_format="dummy", device="cuda", max_sequences=sequences,
        max_step_tokens=8192, mixed_prefill_tokens=UNBOUNDED, prefix_cache=False,
        num_pages=KV_TOKENS // 16 if sequences > 8 else 600, max_context_tokens=8192, **options,
    )  # fmt: skip
    engine = Engine.build(config)
    engine.start()
    memory = torch.cuda.memory_reserved() / 2**30
    seconds = time.perf_counter() - begin
    print(f"{precision}, {drafts} drafts: ready in {seconds:.1f} s, {memory:.1f} GiB", flush=True)
    return engine


def drafting(engine: Engine) -> Any:
    """Its executor, which has the drafts."""
    return engine._loop._executor


def accept(engine: Engine, alpha: float) -> None:
    """From now on it accepts drafts with another probability."""
    executor = drafting(engine)
    executor._drafting = executor._drafting._replace(synthetic=alpha)
    executor._drawing._drafting = executor._drafting


def run(engine: Engine, case: tuple[int, int, int], seed: int) -> tuple[float, float]:
    """Tokens a second of the whole run, and the decode rate."""
    rows, prompt_tokens, output_tokens = case
    rng = np.random.default_rng(seed)
    vocab = engine.model.vocab_size
    prompts = rng.integers(3, vocab, (rows, prompt_tokens), dtype=np.int32)
    watch, stop = Watch(rows), StopRules(output_tokens, ignore_eos=True)
    begin = time.perf_counter()
    for i, prompt in enumerate(prompts):
        identity = seed.to_bytes(8, "big") + i.to_bytes(8, "big")
        params = replace(SamplingParams(temperature=0.0), seed=i + 1000 * seed)
        engine.submit(Request(identity, prompt, params, stop), watch)
    assert watch.done.wait(300), "a run took more than five minutes"
    assert not watch.failed, "a request failed"
    return rows * output_tokens / (time.perf_counter() - begin), watch.decode_rate


def compare(
    precision: str, name: str, off: Engine, on: Engine, steps: Steps, repeats: int
) -> list[dict[str, Any]]:
    """A case by both engines in turns."""
    case, measured = CASES[name], on._loop._scheduler.planner._widths
    rates: dict[str, list[tuple[float, float]]] = {}
    heard: dict[str, tuple[float, int]] = {}
    for repeat in range(-1, repeats):  # The first one warms up.
        for way in ("off", "one", *map(str, ALPHAS)):
            engine = off if way == "off" else on
            if way == "one" and repeat >= 0 and repeat % 2 == 0 and name != "1":
                continue
            if way != "off":
                on._loop._scheduler.planner._widths = One() if way == "one" else measured
                accept(on, 0.0 if way == "one" else float(way))
            pair = run(engine, case, 100 + repeat)
            if repeat >= 0:
                rates.setdefault(way, []).append(pair)
                heard[way] = steps.take()
    base = medians(rates["off"])
    figures = []
    for way, found in rates.items():
        whole, decode = medians(found)
        tokens, width = heard[way]
        figures.append({
            "precision": precision, "case": name, "way": way, "whole": whole, "decode": decode,
            "whole_x": whole / base[0], "decode_x": decode / base[1], "tokens": tokens,
            "width": width, "rates": found,
        })  # fmt: skip
        print(line(figures[-1]), flush=True)
    return figures


def medians(rates: list[tuple[float, float]]) -> tuple[float, float]:
    """Of the whole runs, and of decoding."""
    whole, decode = (statistics.median(column) for column in zip(*rates, strict=True))
    return whole, decode


def line(figure: dict[str, Any]) -> str:
    """Of the table."""
    return (
        f"{figure['precision']:>7} {figure['case']:>5} {figure['way']:>8}"
        f" {figure['whole']:9.1f} {figure['whole_x']:5.2f} x {figure['decode']:9.1f}"
        f" {figure['decode_x']:5.2f} x {figure['tokens']:6.2f} {figure['width']:5d}"
    )


def copying(precision: str, off: Engine, repeats: int) -> dict[str, Any]:
    """One row whose answer copies its prompt."""
    engine = build(precision, COPIED, sequences=4)
    accept(engine, COPYING)
    steps, rates = Steps(engine), []
    for repeat in range(-1, repeats):
        pair = run(off, CASES["1"], 100 + repeat), run(engine, CASES["1"], 100 + repeat)
        if repeat >= 0:
            rates.append(pair)
    tokens, width = steps.take()
    engine.stop()
    base, got = medians([pair[0] for pair in rates]), medians([pair[1] for pair in rates])
    figure = {
        "precision": precision, "case": "1", "way": "copying", "whole": got[0], "decode": got[1],
        "whole_x": got[0] / base[0], "decode_x": got[1] / base[1], "tokens": tokens,
        "width": width, "rates": rates,
    }  # fmt: skip
    print(line(figure), flush=True)
    return figure


def profile(engine: Engine, name: str) -> str:
    """The kernels of a case, by time."""
    rows, prompt, _ = CASES[name]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run(engine, (rows, prompt, 64), 7)
        torch.cuda.synchronize()
    averages = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    lines = [
        f"{e.self_device_time_total / 1e3:9.1f} ms {e.count:6d} x"
        f" {e.self_device_time_total / e.count:7.1f} us  {e.key[:100]}"
        for e in averages[:22]
    ]
    return "\n".join([f"kernels of {name}:", *lines])


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", nargs="+", default=["bf16"], choices=list(PRECISIONS))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--copying", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    figures: list[dict[str, Any]] = []
    times: dict[str, Any] = {}
    for precision in arguments.precisions:
        off, on = build(precision, 0), build(precision, DRAFTS)
        steps = Steps(on)
        captured = drafting(on).step_times.items()
        times[precision] = [[*shape[:1], shape.width, shape.differ, s] for shape, s in captured]
        for rows in (1, 8, 64, 256):
            own = {w: 1e3 * s for r, w, differ, s in times[precision] if r == rows and differ}
            print(
                f"captured, {rows} rows: " + ", ".join(f"{w}: {own[w]:.3f} ms" for w in sorted(own))
            )
        for name in arguments.cases:
            figures += compare(precision, name, off, on, steps, arguments.repeats)
            if arguments.json:
                about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
                found = about | {"figures": figures, "captured": times}
                arguments.json.write_text(json.dumps(found, indent=1))
            if arguments.profile and name != "256":
                accept(on, ALPHAS[0])
                print(profile(on, name), flush=True)
        on.stop()
        del on, steps
        gc.collect()
        torch.cuda.empty_cache()
        if arguments.copying:
            figures.append(copying(precision, off, arguments.repeats))
        off.stop()
        del off
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{'':>7} {'case':>5} {'way':>8} {'whole':>9} {'':>7} {'decode':>9} {'':>7} tokens width")
    for figure in figures:
        print(line(figure))
    if arguments.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        found = about | {"figures": figures, "captured": times}
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
