"""What a step takes with sparse attention, and with hooks that do nothing.

python -m bench.sparse_attention steps [--rows 16] [--context 32768] [--budget 2048] [--steps 32]
    [--rounds 5] [--dense N] [--only NAME ...] [--model FOLDER] [--device auto|cuda|cpu]
    [--json FILE] [--profile FILE]

A table of five executors over one model and one pool, in one process:

    no hook      every row reads its whole context
    quest        every row but `--dense` reads `--budget` tokens in the layers that Quest narrows
    quest eager  the same without graphs: its steps run their kernels one by one
    capturable   a hook of `baton.attention` that does nothing and fits graphs
    eager        the same hook, which does not fit: its steps run their kernels one by one

With `--profile`, which needs a GPU, a last turn of the last case is profiled: FILE has its kernels
by their time.

`ready` is the time to make an executor, with its graphs and the first step, and `MiB` what it takes
on the device.

They take turns: `--rounds` times each runs `--steps` steps of `--rows` decode rows. Each step is
launched while the one before it runs, as the step loop does. A step's time is from the end of the
one before to its own, on the host. Dummy weights, random KV, greedy. The rows' contexts differ by a
token each up to a page, so that as many pages are completed in a step as in a batch that goes on.

The defaults take 64 GiB of pages, 4 of summaries for each Quest and 15 of weights, so they need an
H200. With `--rows 8 --context 16384` an H100 is enough.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.engine import SHAPE
from bench.harness import write_json
from engine.config import EngineConfig
from engine.parts.building import build_executor, load
from engine.parts.paging import make_pages
from engine.sampling import Sampler
from engine.step.collective import Alone
from engine.step.executor import Executor, Launched
from engine.step.hooks import AttentionHook, Hook
from engine.step.plan import StepPlan
from engine.types import SamplingParams, StopRules

QUEST = Path(__file__).parents[1] / "examples" / "hook-quest"
PAGE = 16
UNCOUNTED = 3
"""First steps of a turn."""
HIGHEST_BYTE = 56
"""Of random KV. Its numbers are finite in every precision."""
STEP_S = 600.0
NOTHING = np.zeros(0, np.int32)


def quest(options: Mapping[str, str]) -> Any:
    """The hook of `examples/hook-quest`."""
    if str(QUEST) not in sys.path:
        sys.path.insert(0, str(QUEST))
    return importlib.import_module("baton_quest").make(options)


class Idle(AttentionHook):
    """Does nothing in every layer."""

    def __init__(self, *, capturable: bool) -> None:
        self.name = "capturable" if capturable else "eager"
        self.capturable = capturable

    def attention_began(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Nothing."""
        return


class Case(NamedTuple):
    """An executor with one hook or none."""

    name: str
    executor: Executor
    plan: StepPlan
    times_ms: list[float]
    ready_s: float
    device_mib: float

    def run(self, steps: int) -> None:
        """One turn.

        Raises:
            RuntimeError: a hook failed.
        """
        before: Launched | None = None
        ends = []
        for _ in range(UNCOUNTED + steps):
            step = self.executor.launch(self.plan)
            if before is not None:
                ends.append(self._end(before))
            before = step
        if before is not None:
            ends.append(self._end(before))
        counted = np.diff(ends)[UNCOUNTED - 1 :]
        self.times_ms.extend((1e3 * counted).tolist())

    def _end(self, step: Launched) -> float:
        if failures := step.result(STEP_S).hook_failures:
            raise RuntimeError(f"a hook failed: {failures}")
        return time.perf_counter()


class Rig:
    """A model and a pool, and the cases over them."""

    def __init__(
        self,
        model: str,
        device: str,
        rows: int,
        context: int,
        budget: int,
        dense: int = 0,
        only: Sequence[str] | None = None,
    ) -> None:
        pages = -(-context // PAGE)
        self._rows, self._context, self._pages = rows, context, pages
        self._config = config = EngineConfig(
            model=model,
            load_format="dummy",
            device=device,
            dtype="float32" if device == "cpu" else "bfloat16",
            num_pages=rows * pages + 1,
            page_size=PAGE,
            max_sequences=rows,
            max_step_tokens=rows + PAGE,
            max_context_tokens=context,
            hook_limit_s=math.inf,
        )
        where = torch.device(device)
        self._loaded = load(config, where, collective=Alone())
        self._pools = make_pages(config.num_pages, config, self._loaded, where)
        self._pools.data.random_(0, HIGHEST_BYTE)
        chooses = {"sparse_tokens": str(budget)}
        tag = np.where(np.arange(rows) < rows - dense, budget // PAGE, 0)
        hooks: dict[str, tuple[Hook | None, np.ndarray]] = {
            "no hook": (None, tag),
            "quest": (quest(chooses), tag),
            "quest eager": (quest(chooses), tag),
            "capturable": (Idle(capturable=True), np.ones(rows)),
            "eager": (Idle(capturable=False), np.ones(rows)),
        }
        self.cases = [
            self._case(name, *hook)
            for name, hook in hooks.items()
            if name in ("no hook", *(only or hooks))
        ]

    def _case(self, name: str, hook: Hook | None, tag: np.ndarray) -> Case:
        began_s, before = time.perf_counter(), self._free()
        device, vocab = self._pools.first.device, self._loaded.config.vocab_size
        sampler = Sampler(self._rows, vocab, device, [0])
        greedy = SamplingParams(temperature=0.0)
        for slot in range(self._rows):
            sampler.assign(slot, greedy, StopRules(99), 0, NOTHING, NOTHING)
        hooks = [] if hook is None else [hook]
        config = replace(self._config, cuda_graphs=name != "quest eager")
        executor = build_executor(config, self._loaded, self._pools, sampler, hooks, None)
        plan = self._plan(sampler, np.tile(tag.astype(np.int32), (len(hooks), 1)))
        executor.launch(self._arriving(plan)).result(STEP_S)
        ready_s = time.perf_counter() - began_s
        return Case(name, executor, plan, [], ready_s, (before - self._free()) / 2**20)

    def _free(self) -> int:
        """Free memory of the device, bytes. What graphs keep is not free."""
        if self._pools.first.device.type == "cpu":
            return 0
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def _plan(self, sampler: Sampler, terms: np.ndarray) -> StepPlan:
        slots = np.arange(self._rows, dtype=np.int32)
        ends = (self._context - slots % PAGE).astype(np.int32)
        table = np.random.default_rng(0).permutation(self._rows * self._pages) + 1
        return StepPlan(
            number=0,
            token_ids=slots,
            positions=ends - 1,
            row_slots=slots,
            query_lens=np.ones(self._rows, np.int32),
            context_lens=ends,
            num_decodes=self._rows,
            page_table=table.astype(np.int32).reshape(self._rows, self._pages),
            sample_tokens=slots,
            sample_slots=slots,
            sample_generations=slots,
            sample_indices=slots,
            sample=sampler.plan(slots, slots),
            copy_source=NOTHING,
            copy_target=NOTHING,
            write_slots=NOTHING,
            write_tokens=NOTHING,
            hook_tags=terms,
        )

    def _arriving(self, plan: StepPlan) -> StepPlan:
        """The first step, with which all pages come."""
        values = {name: getattr(plan, name) for name in plan.__slots__}
        values["arrived"] = np.arange(1, self._rows * self._pages + 1, dtype=np.int32)
        return StepPlan(**values)

    def stop(self) -> None:
        """Stops the executors."""
        for case in self.cases:
            case.executor.shutdown()


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Prints the table. Returns its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=32768, help="tokens of a row")
    parser.add_argument("--budget", type=int, default=2048, help="tokens that Quest reads")
    parser.add_argument("--dense", type=int, default=0, help="rows that Quest leaves alone")
    parser.add_argument("--only", nargs="+", help="these cases, beside no hook")
    parser.add_argument("--steps", type=int, default=32, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case")
    parser.add_argument("--model", default=str(SHAPE), help="folder with a config.json")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path)
    given = parser.parse_args(arguments)
    device = given.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = given.rows, given.context, given.budget, given.dense
    rig = Rig(given.model, device, *shape, given.only)
    try:
        for _ in range(given.rounds):
            for case in rig.cases:
                case.run(given.steps)
        if given.profile:
            given.profile.write_text(_profiled(rig.cases[-1], given.steps))
    finally:
        rig.stop()
    found = [_row_of(case, rig.cases[0]) for case in rig.cases]
    _print(found, given, device)
    about = {"rows": given.rows, "context": given.context, "budget": given.budget}
    write_json(given.json, {**about, "cases": found})
    return found


def _profiled(case: Case, steps: int) -> str:
    """A table of the kernels of a turn on a GPU."""
    counted = len(case.times_ms)
    with torch.profiler.profile() as profile:
        case.run(steps)
    del case.times_ms[counted:]
    by_time = profile.key_averages()
    return str(by_time.table("self_device_time_total", row_limit=40, max_name_column_width=90))


def _row_of(case: Case, plain: Case) -> dict[str, Any]:
    p50 = statistics.median(case.times_ms)
    return {
        "hook": case.name,
        "steps": len(case.times_ms),
        "p50_ms": p50,
        "p90_ms": float(np.quantile(case.times_ms, 0.9)),
        "of_no_hook": p50 / statistics.median(plain.times_ms),
        "ready_s": case.ready_s,
        "device_mib": case.device_mib,
    }


def _print(found: Sequence[Mapping[str, Any]], given: argparse.Namespace, device: str) -> None:
    print(f"# {device}: {given.rows} rows of {given.context} tokens, budget {given.budget}")
    print("| hook | steps | p50, ms | p90, ms | p50 / no hook | ready, s | MiB |")
    print("|---|---|---|---|---|---|---|")
    for row in found:
        print(
            f"| {row['hook']} | {row['steps']} | {row['p50_ms']:.3f} | {row['p90_ms']:.3f}"
            f" | {row['of_no_hook']:.3f} | {row['ready_s']:.1f} | {row['device_mib']:.0f} |"
        )


if __name__ == "__main__":
    main()
