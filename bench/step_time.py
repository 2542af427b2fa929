"""What a step takes on a GPU: decode rows, and beside them a chunk of a prompt.

python -m bench.step_time [--rows 4 40 64] [--context 1100] [--spread 0] [--chunks 0 192]
                          [--behind 0 4000 7800] [--repeats 20] [--model FOLDER] [--no-graphs]
                          [--kv-cache-dtype auto|fp8]
                          [--profile] [--rows-are alike|different] [--json FILE]

A table, in ms: the median step of `rows` rows of `context` tokens each, alone and with `chunks`
tokens of one prompt of which `behind` tokens are computed, and how long the host takes to launch it
(`--no-graphs`: kernel by kernel), behind a step that runs and alone. The driver's queue may be full
in the first case, and then the host waits for the device. Dummy weights, random KV, greedy; each
step is launched while the one before it runs, as the step loop does. `--spread`: the rows' tokens
are the quantiles of a log-normal distribution of this sigma, around `context`, up to MOST_TOKENS.
`--profile` adds the
kernels of the last step. `--rows-are`: what decode attention takes the rows for, whatever their
lengths.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import math
import statistics
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from bench.engine import SHAPE
from bench.harness import write_json
from engine.attention import choose_backend
from engine.attention.grouped import PagedGroups
from engine.attention.paged import PagedAttention
from engine.bounds import Bounds
from engine.cuda.attention_kernels import CudaKernels
from engine.cuda.executor import CudaExecutor
from engine.cuda.steps import shapes
from engine.model import load_model
from engine.pool.kinds import POOLS, pool_type
from engine.pool.pools import one_group
from engine.sampling import Sampler
from engine.step.plan import StepPlan
from engine.types import SamplingParams, StopRules

PAGE_TOKENS = 16
SLOTS = 72
UNCOUNTED = 3
MOST_TOKENS = 16384
"""Longest row."""
HIGHEST_BYTE = 56
"""Largest byte of random KV. Its numbers are finite in every precision."""
NOTHING = np.zeros(0, np.int32)


class Stepper:
    """An executor, and plans for it."""

    def __init__(
        self,
        model_path: str,
        most_tokens: int,
        step_tokens: int,
        backend: str,
        graphs: bool,
        kv_cache_dtype: str,
    ) -> None:
        device = torch.device("cuda")
        loaded = load_model(model_path, dtype=torch.bfloat16, device=device, load_format="dummy")
        shape = loaded.config
        self._pool = pool_type(kv_cache_dtype, PAGE_TOKENS)(
            num_pages=most_tokens // PAGE_TOKENS + 2 * SLOTS, num_layers=shape.num_layers,
            num_kv_heads=shape.kept.kv_heads, head_dim=shape.kept.head_dim, page_size=PAGE_TOKENS,
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        self._pool.data.random_(0, HIGHEST_BYTE)
        self._sampler = Sampler(SLOTS, shape.vocab_size, device, [0])
        for slot in range(SLOTS):
            self._sampler.assign(
                slot, SamplingParams(temperature=0.0), StopRules(99), 0, NOTHING, NOTHING
            )
        attention = choose_backend(backend, self._pool, loaded.model.attention_specs, CudaKernels())
        assert isinstance(attention, PagedAttention), f"{backend} reads no pages"
        bounds = Bounds(
            max_sequences=SLOTS,
            max_step_tokens=step_tokens,
            max_context_tokens=MOST_TOKENS,
            gathers=self._pool.gathers,
        )
        torch.cuda.synchronize()
        pools = one_group(self._pool)
        groups = PagedGroups([attention], pools.places)
        self.executor = CudaExecutor(loaded.model, pools, groups, self._sampler, bounds)
        if graphs:
            self.executor.capture()

    def plan(self, contexts: list[int], chunk: int, behind: int) -> StepPlan:
        """Decode rows of so many tokens, then, if `chunk` is not 0, tokens of a prompt."""
        rows = len(contexts)
        news = np.array([1] * rows + [chunk] * (chunk > 0), np.int32)
        ends = np.array(contexts + [behind + chunk] * (chunk > 0), np.int32)
        needed = -(-ends // PAGE_TOKENS)
        pages = iter(np.random.default_rng(0).permutation(self._pool.num_pages - 1) + 1)
        table = np.zeros((len(ends), needed.max()), np.int32)
        for row, count in enumerate(needed):
            table[row, :count] = [next(pages) for _ in range(count)]
        slots = np.arange(len(ends), dtype=np.int32)
        positions = [np.arange(end - new, end) for end, new in zip(ends, news, strict=True)]
        return StepPlan(
            number=0, token_ids=np.arange(news.sum(), dtype=np.int32) % 4000,
            positions=np.concatenate(positions).astype(np.int32), row_slots=slots,
            query_lens=news, context_lens=ends, num_decodes=rows, page_table=table,
            sample_tokens=(news.cumsum() - 1).astype(np.int32), sample_slots=slots,
            sample_generations=slots, sample_indices=slots,
            sample=self._sampler.plan(slots, slots), copy_source=NOTHING, copy_target=NOTHING,
            write_slots=NOTHING, write_tokens=NOTHING,
        )  # fmt: skip

    def time_ms(self, plan: StepPlan, repeats: int) -> tuple[float, float]:
        """Medians: from the end of one step to the end of the next, and of launching one."""
        launches = []
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + UNCOUNTED)]
        before = None
        for end in ends:
            begin = time.perf_counter()
            step = self.executor.launch(plan)
            launches.append(1e3 * (time.perf_counter() - begin))
            end.record(self.executor.stream)
            if before is not None:
                before.result(60)
            before = step
        step.result(60)
        counted = ends[UNCOUNTED - 1 :]
        steps = [a.elapsed_time(b) for a, b in pairwise(counted)]
        return statistics.median(steps), statistics.median(launches[UNCOUNTED:])

    def launch_ms(self, plan: StepPlan, repeats: int) -> float:
        """Median of launching one while the device has nothing else, so that no launch waits for
        it."""
        found = []
        for _ in range(repeats):
            begin = time.perf_counter()
            step = self.executor.launch(plan)
            found.append(1e3 * (time.perf_counter() - begin))
            step.result(60)
        return statistics.median(found)

    def profile(self, plan: StepPlan, most: int = 16) -> str:
        """Kernels of one step by time."""
        activity = torch.profiler.ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[activity]) as profiler:
            self.executor.launch(plan).result(60)
            torch.cuda.synchronize()
        entries = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
        return "\n".join(
            f"{e.self_device_time_total / 1e3:8.3f} ms {e.count:5d} x"
            f" {e.self_device_time_total / e.count:7.1f} us  {e.key[:100]}"
            for e in entries[:most]
        )


def lengths(rows: int, context: int, spread: float) -> list[int]:
    """Tokens of each row: all alike, or longer and shorter ones around `context`."""
    normal = statistics.NormalDist(sigma=spread or 1.0)
    places = [normal.inv_cdf((row + 0.5) / rows) if spread else 0.0 for row in range(rows)]
    return [min(MOST_TOKENS - 1, round(context * math.exp(place))) for place in places]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 40, 64])
    parser.add_argument("--context", type=int, default=1100)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 192])
    parser.add_argument("--behind", type=int, nargs="+", default=[0, 4000, 7800])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--model", default=str(SHAPE))
    parser.add_argument("--attention", default="fa3")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=list(POOLS))
    parser.add_argument("--rows-are", choices=["alike", "different"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    return arguments


def main() -> None:
    """Times every step that is asked for."""
    arguments = parse()
    contexts = {rows: lengths(rows, arguments.context, arguments.spread) for rows in arguments.rows}
    most_tokens = max(map(sum, contexts.values())) + max(arguments.behind) + max(arguments.chunks)
    graphs = not arguments.no_graphs
    if arguments.rows_are:
        shapes.lengths_differ = lambda *_: arguments.rows_are == "different"  # type: ignore[attr-defined]
    step_tokens = max(2048, SLOTS + max(arguments.chunks))
    options = (arguments.attention, graphs, arguments.kv_cache_dtype)
    stepper = Stepper(arguments.model, most_tokens, step_tokens, *options)
    found = []
    for rows in arguments.rows:
        for chunk in arguments.chunks:
            for behind in arguments.behind if chunk else [0]:
                plan = stepper.plan(contexts[rows], chunk, behind)
                ms, launch_ms = stepper.time_ms(plan, arguments.repeats)
                alone_ms = stepper.launch_ms(plan, arguments.repeats)
                step = {"rows": rows, "chunk": chunk, "behind": behind}
                found.append({**step, "ms": ms, "launch_ms": launch_ms, "alone_ms": alone_ms})
                what = f"{rows:4d} rows, {chunk:4d} tokens behind {behind:5d}: {ms:7.2f} ms"
                print(f"{what}, {launch_ms:5.2f} of the host, {alone_ms:5.2f} alone", flush=True)
    if arguments.profile:
        print(stepper.profile(plan))
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
