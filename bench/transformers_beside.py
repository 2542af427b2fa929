"""Families without a file of ours beside `transformers.generate`, on one GPU: tokens a second.

python -m bench.transformers_beside [--shapes NAME ...] [--rows 1 32] [--new 128] [--json FILE]

Dummy weights, random prompts of 128 tokens, greedy, lengths forced. transformers runs in bfloat16
with its default attention and KV cache, a batch of equally long prompts, so that nothing is padded.
`8x1024+1` counts prompt tokens, the others output tokens. Every rate is of the second run. On a CPU
(`--device cpu`) it says only whether it runs.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.engine import Case, build, run_case
from bench.harness import table, write_json

SHAPES = Path(__file__).parent / "shapes"
PROMPT = 128
LONG = Case(8, 1024, 1, 0, 0, 0)


def ours(arguments: argparse.Namespace, folder: Path, cases: list[Case]) -> list[float]:
    """Tokens a second of each case on our engine."""
    options: dict[str, Any] = {"device": arguments.device, "model_impl": "transformers"}
    engine = build(arguments, model=folder, options=options)
    try:
        return [_second(case, lambda case=case: run_case(engine, case, 1)[0]) for case in cases]
    finally:
        engine.stop()


def theirs(arguments: argparse.Namespace, folder: Path, cases: list[Case]) -> list[float]:
    """Tokens a second of each case by `transformers.generate`."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device(arguments.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return [_second(case, lambda case=case: _generate(model, case)) for case in cases]


def _generate(model: Any, case: Case) -> float:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(
        3, model.config.vocab_size, (case.prompts, case.prompt_tokens), generator=draw
    )
    ids = ids.to(model.device)
    begin = time.perf_counter()
    count = {"max_new_tokens": case.output_tokens, "min_new_tokens": case.output_tokens}
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **count
    )
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _second(case: Case, run: Any) -> float:
    run()
    return case.counted_tokens / float(run())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=["arcee-4.5b", "starcoder2-7b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(
        sequences=64, step_tokens=8192, mixed_tokens=0, gpu_memory_utilization=0.7, no_graphs=False
    )
    arguments = parser.parse_args()
    cases = [LONG, *(Case(rows, PROMPT, arguments.new, 0, 0, 0) for rows in arguments.rows)]
    found, rows = [], [["shape", "case", "ours", "transformers", "ratio"]]
    for name in arguments.shapes:
        rates = []
        for measure in (ours, theirs):
            rates.append(measure(arguments, SHAPES / name, cases))
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
        for case, mine, other in zip(cases, *rates, strict=True):
            label = f"{case.prompts}x{case.prompt_tokens}+{case.output_tokens}"
            found.append({"shape": name, "case": label, "ours": mine, "transformers": other})
            rows.append([name, label, f"{mine:,.1f}", f"{other:,.1f}", f"{mine / other:.2f}"])
    print(table(rows))
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
