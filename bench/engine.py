"""The engine alone, offline in one process: tokens a second, case by case, beside what is known.

python -m bench.engine [--cases NAME ...] [--repeats 1] [--page-size 16 ...] [--json FILE]
                       [--profile NAME ...] [--sampling [NAME ...]] [--sampled-case NAME]
                       [--precisions NAME ...] [--model FOLDER] [--ranks N]

Dummy weights (the speed does not depend on them), random token ids, greedy, lengths forced, no
prefix cache. Before the cases, ten seconds of matrix products measure what the chip sustains.

Columns: `rate` is prompt tokens a second in prefill cases and output tokens a second elsewhere,
from the first submission to the last token. `floor` is what the rates of the libraries allow: the
products' operations at 653 TFLOP/s or their bytes at the measured rate of small batches, KV at
3.7 TB/s, attention over prompts at 520 TFLOP/s, summed, on one H200. `--sampling` runs 256 x
(128 + 512) again with each sampling option in all rows; `--page-size` takes several, and runs all
once for each, and so does `--precisions`. `target`, `floor` and `vllm` are those of the 8B shape in
bf16 on one GPU, whatever `--model` and `--ranks` (GPUs of this host) say. `vllm` is vLLM 0.25.1 on
one H200 (max_num_seqs 256, max_num_batched_tokens 8192, FlashAttention-3, CUDA graphs).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import write_json
from engine.bounds import UNBOUNDED
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import (
    Event,
    PrefillStarted,
    Request,
    RequestFailed,
    SamplingParams,
    SequenceEnded,
    StopRules,
)

SHAPE = Path(__file__).parent / "shapes" / "llama-8b"
INT4_SHAPE = SHAPE.with_name("llama-8b-int4")
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "fp8+kv": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "bf16+kv": {"kv_cache_dtype": "fp8"},
    "int4": {"model": str(INT4_SHAPE)},
    "wrapped": {"model_impl": "transformers"},
    "wrapped fp8": {"model_impl": "transformers", "quantization": "fp8"},
}
"""Options of engines, beside those of the command line."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Case:
    """So many prompts, of one length, with outputs of one length."""

    prompts: int
    prompt_tokens: int
    output_tokens: int
    vllm: float
    floor: float
    target: float

    @property
    def counted_tokens(self) -> int:
        """Tokens that the rate counts."""
        return self.prompts * (
            self.prompt_tokens if self.output_tokens == 1 else self.output_tokens
        )


SAMPLING = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=0.8, top_k=50),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "min-p": SamplingParams(temperature=0.8, min_p=0.05),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1
    ),
    "5 logprobs": SamplingParams(temperature=0.8, top_logprobs=5),
}
CASES = {
    "prefill-8192": Case(32, 8192, 1, 38_500, 39_200, 38_800),
    "prefill-1024": Case(128, 1024, 1, 43_400, 45_700, 44_000),
    "decode-1": Case(1, 128, 512, 201.7, 268, 225),
    "decode-256": Case(256, 128, 512, 18_600, 21_400, 20_000),
    "64x1024+256": Case(64, 1024, 256, 4_700, 5_360, 5_000),
    "256x2048+256": Case(256, 2048, 256, 3_410, 3_520, 3_450),
    "1000x1024+128": Case(1000, 1024, 128, 3_940, 4_140, 4_000),
    "1000x256+256": Case(1000, 256, 256, 14_100, 15_900, 15_200),
}


@dataclass
class Outcome:
    """One case, measured."""

    case: str
    rates: list[float] = field(default_factory=list)
    steps: int = 0
    step_p50_ms: float = 0.0
    step_p99_ms: float = 0.0
    cpu_per_step_ms: float = 0.0
    """CPU time of the step loop's thread."""

    @property
    def rate(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.rates)


class Watch:
    """The sink of all requests of a case: counts ends, and times steps on the loop's thread."""

    def __init__(self, expected: int) -> None:
        self.done = threading.Event()
        self.failed = False
        self.step_times: list[float] = []
        self.cpu_times: list[float] = []
        self._left = expected

    def __call__(self, events: Sequence[Event]) -> None:
        """See `engine.types.Sink`. That prompts begin is told when their step is planned."""
        if all(isinstance(event, PrefillStarted) for event in events):
            return
        self.step_times.append(time.perf_counter())
        self.cpu_times.append(time.thread_time())
        for event in events:
            if isinstance(event, RequestFailed):
                self.failed = True
            if isinstance(event, SequenceEnded | RequestFailed):
                self._left -= 1
        if self._left == 0:
            self.done.set()


def run_case(
    engine: Engine,
    case: Case,
    seed: int,
    sampling: SamplingParams = GREEDY,
    watch: Watch | None = None,
) -> tuple[float, Watch]:
    """Seconds from the first submission to the last token, and what `watch` saw meanwhile."""
    rng = np.random.default_rng(seed)
    vocab = engine.model.vocab_size
    prompts = rng.integers(3, vocab, (case.prompts, case.prompt_tokens), dtype=np.int32)
    watch = watch or Watch(case.prompts)
    stop = StopRules(case.output_tokens, ignore_eos=True)
    begin = time.perf_counter()
    for i, prompt in enumerate(prompts):
        identity = seed.to_bytes(8, "big") + i.to_bytes(8, "big")
        params = replace(sampling, seed=i)
        engine.submit(Request(identity, prompt, params, stop), watch)
    assert watch.done.wait(600), "a case took more than ten minutes"
    assert not watch.failed, "a request failed"
    return time.perf_counter() - begin, watch


def measure(
    engine: Engine,
    name: str,
    repeats: int,
    sampling: SamplingParams = GREEDY,
    cases: Mapping[str, Case] = CASES,
    run: Callable[..., tuple[float, Watch]] = run_case,
) -> Outcome:
    """Runs a case after a short one of the same shape. `run`: as `run_case`."""
    case, outcome = cases[name], Outcome(name)
    warm_up = Case(min(case.prompts, 16), case.prompt_tokens, min(case.output_tokens, 4), 0, 0, 0)
    run(engine, warm_up, 1, sampling)
    for repeat in range(repeats):
        seconds, watch = run(engine, case, 100 + repeat, sampling)
        outcome.rates.append(case.counted_tokens / seconds)
        gaps = np.diff(watch.step_times) * 1e3
        gaps = gaps[gaps > 0.2]
        outcome.steps = len(gaps) + 1
        if len(gaps):
            outcome.step_p50_ms, outcome.step_p99_ms = np.percentile(gaps, (50, 99)).tolist()
            outcome.cpu_per_step_ms = 1e3 * (watch.cpu_times[-1] - watch.cpu_times[0]) / len(gaps)
    return outcome


def sustained_tflops(seconds: float) -> float:
    """Rate of one large bf16 product, over and over."""
    if seconds <= 0:
        return 0.0
    a = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 28672, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(50):
            a @ b
        torch.cuda.synchronize()
        count += 50
    return 2 * 8192 * 4096 * 28672 * count / (time.perf_counter() - begin) / 1e12


def profile(
    engine: Engine,
    name: str,
    sampling: SamplingParams = GREEDY,
    rows: int = 14,
    cases: Mapping[str, Case] = CASES,
) -> str:
    """Where the device's time goes in a case: see `profiled`."""
    return profiled(name, lambda: run_case(engine, cases[name], 7, sampling)[0], rows)


def profiled(name: str, work: Callable[[], float], rows: int = 14) -> str:
    """Where the device's time goes in some work, which returns its seconds: kernels by time, the
    share that it idles, and between which kernels it waits longest."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profiler:
        seconds = work()
        torch.cuda.synchronize()
    averages = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    busy = sum(entry.self_device_time_total for entry in averages) / 1e6
    idle = 1 - busy / seconds
    lines = [f"{name}: {seconds:.3f} s, device busy {busy:.3f} s, idle {idle:.1%}"]
    lines += [
        f"{e.self_device_time_total / 1e3:10.1f} ms {e.count:7d} x"
        f" {e.self_device_time_total / e.count:8.1f} us  {e.key[:90]}"
        for e in averages[:rows]
    ]
    return "\n".join([*lines, *_gaps(profiler)])


def _gaps(profiler: Any, rows: int = 8) -> Iterator[str]:
    """The longest waits of the device, by the kernels around them."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    )
    waits: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    last, before = (spans[0][0], "") if spans else (0, "")
    for start, end, name in spans:
        if start > last:
            waits[before, name] += start - last
            counts[before, name] += 1
        if end > last:
            last, before = end, name
    for (left, right), wait in waits.most_common(rows):
        count = counts[left, right]
        yield f"{wait / 1e3:10.1f} ms {count:7d} x idle: {left[:40]} -> {right[:40]}"


def build(
    arguments: argparse.Namespace,
    page_size: int = 16,
    model: Path = SHAPE,
    options: Mapping[str, Any] | None = None,
) -> Engine:
    """The engine of all cases, ready. `options` replace those of the command line."""
    begin, last = time.perf_counter(), {"phase": ""}

    def progress(phase: str, done: int, total: int) -> None:
        if phase != last["phase"]:
            last["phase"] = phase
            print(f"{time.perf_counter() - begin:6.1f} s  {phase} ({total})", flush=True)

    usual: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "device": "cuda",
        "page_size": page_size,
        "max_sequences": arguments.sequences,
        "max_step_tokens": arguments.step_tokens,
        "mixed_prefill_tokens": arguments.mixed_tokens or UNBOUNDED,
        "prefix_cache": False,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "cuda_graphs": not arguments.no_graphs,
    }
    config = EngineConfig(**usual | dict(options or {}))
    engine = Engine.build(config, progress)
    pages = engine.pool.num_pages
    size = f"{pages} pages, {pages * page_size:,} tokens"
    print(f"{time.perf_counter() - begin:6.1f} s  ready, {size}", flush=True)
    engine.start()
    return engine


def report(outcome: Outcome) -> str:
    """A line of the table."""
    case = CASES[outcome.case]
    return (
        f"{outcome.case:>14} {outcome.rate:10,.1f} {case.target:10,.1f} {case.vllm:10,.1f}"
        f" {case.floor:10,.1f} {outcome.rate / case.vllm:6.3f} {outcome.steps:6d}"
        f" {outcome.step_p50_ms:9.2f} {outcome.step_p99_ms:9.2f} {outcome.cpu_per_step_ms:7.2f}"
    )


def run_all(arguments: argparse.Namespace, precision: str, page_size: int) -> dict[str, Any]:
    """Every case on one engine; prints the table, returns what it says."""
    print(f"{precision}, pages of {page_size}")
    options = {"tp": arguments.ranks, **PRECISIONS[precision]}
    engine = build(arguments, page_size, arguments.model, options)
    print(
        f"{'page ' + str(page_size):>14} {'rate':>10} {'target':>10} {'vllm':>10} {'floor':>10}"
        f" {'/vllm':>6} {'steps':>6} {'p50 ms':>9} {'p99 ms':>9} {'cpu ms':>7}"
    )
    outcomes = []
    for name in arguments.cases:
        outcomes.append(measure(engine, name, arguments.repeats))
        print(report(outcomes[-1]), flush=True)
    sampled = run_sampling(engine, arguments)
    for name in arguments.profile:
        print(profile(engine, name), flush=True)
    engine.stop()
    return {
        "page_size": page_size,
        "precision": precision,
        "cases": [{**asdict(o), "rate": o.rate, **asdict(CASES[o.case])} for o in outcomes],
        "sampling": sampled,
    }


def run_sampling(engine: Engine, arguments: argparse.Namespace) -> dict[str, float]:
    """Output tokens a second of one case with every row sampled in one way."""
    rates = {}
    for name in arguments.sampling:
        outcome = measure(engine, arguments.sampled_case, arguments.repeats, SAMPLING[name])
        rates[name] = outcome.rate
        step = f"{outcome.step_p50_ms:9.2f} ms, {outcome.cpu_per_step_ms:.2f} ms of CPU a step"
        print(f"{name:>16} {outcome.rate:10,.1f} {step}", flush=True)
    return rates


def free_memory() -> None:
    """Frees the pool and the graphs of an engine that is gone."""
    gc.collect()
    torch.cuda.empty_cache()


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What `build` reads."""
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--mixed-tokens", type=int, default=0)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--no-graphs", action="store_true")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_engine_options(parser)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--page-size", type=int, nargs="+", default=[16])
    parser.add_argument(
        "--precisions", nargs="+", default=["bf16"], choices=list(PRECISIONS), metavar="NAME"
    )
    parser.add_argument("--matmul-seconds", type=float, default=10.0)
    parser.add_argument("--profile", nargs="*", default=[], choices=list(CASES))
    parser.add_argument("--sampling", nargs="*", default=None, choices=list(SAMPLING))
    parser.add_argument("--sampled-case", default="decode-256", choices=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, default=SHAPE)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    if arguments.sampling is not None:
        arguments.sampling = arguments.sampling or list(SAMPLING)
    else:
        arguments.sampling = []
    return arguments


def main() -> None:
    """Runs what is asked for and prints the tables."""
    arguments = parse()
    sustained = sustained_tflops(arguments.matmul_seconds)
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {sustained:.0f} TFLOP/s sustained")
    runs = []
    for precision, page_size in itertools.product(arguments.precisions, arguments.page_size):
        runs.append(run_all(arguments, precision, page_size))
        free_memory()
    about = {"sustained_tflops": sustained, "sequences": arguments.sequences,
             "step_tokens": arguments.step_tokens, "runs": runs}  # fmt: skip
    write_json(arguments.json, about)


if __name__ == "__main__":
    main()
